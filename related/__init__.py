"""The neighbouring systems, a small room each: keychannels, dha, skipless."""

import importlib


def register_models() -> None:
    """Make transformers' Auto classes know the models that the rooms write, so that they load like any other."""
    for room in ("dha", "skipless"):
        importlib.import_module(f"related.{room}.modeling")
