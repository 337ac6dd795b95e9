"""python -m audit"""

from audit import main
from common.cli import run_stage

if __name__ == "__main__":
    run_stage(main)
