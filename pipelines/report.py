"""Runs common/reporting/report.py as a script: python -m would import from the working directory, a run's."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
import common.run.openmp  # noqa: E402, F401 - before torch

from common.reporting.report import main  # noqa: E402
from common.run.errors import run_stage  # noqa: E402

if __name__ == "__main__":
    run_stage(main)
