"""python -m audit"""

from audit import main
from common.run.errors import run_stage

if __name__ == "__main__":
    run_stage(main)
