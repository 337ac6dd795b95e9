"""Runs common/reporting/report.py: from here, as python -m would import from the working directory."""

import common.waiting  # noqa: F401 - before torch

from common.cli import run_stage
from common.reporting.report import main

if __name__ == "__main__":
    run_stage(main)
