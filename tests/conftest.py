"""Loads helpers.py, but not in the process that only hands tests to others: its imports take five seconds."""


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("helpers")
