"""Print the checkpoint that a run directory's calibration has read: python -m pipelines.source RUN."""

import os
import sys

from common.models.load import source_model
from common.run.artifact import read_record
from common.run.errors import run_stage


def main() -> None:
    _, run = sys.argv
    print(source_model(read_record(os.path.join(run, "calibration"), "01_calibrate.py"), run)["path"])


if __name__ == "__main__":
    run_stage(main)
