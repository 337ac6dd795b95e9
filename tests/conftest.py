"""Loads helpers.py, but not in the process that only hands tests to others: its imports take five seconds."""

import gc

gc.set_threshold(50_000, 20, 20)  # a sixth of the tests' time was spent looking for garbage


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("helpers")
