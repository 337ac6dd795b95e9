"""Loads runs.py, but not in the process that only hands tests to others: its imports take five seconds."""

import gc
import os

import pytest

# read when packages are imported
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
pytest.register_assert_rewrite("reference")  # its assertions say what differs, as a test's do
gc.set_threshold(50_000, 20, 20)  # a sixth of the tests' time was spent looking for garbage


def pytest_configure(config):
    if os.environ.get("MUTANT_UNDER_TEST") == "stats":  # mutmut looks at the calls of this process alone
        del os.environ["MUTANT_UNDER_TEST"]
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("runs")
