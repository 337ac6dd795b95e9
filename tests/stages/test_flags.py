"""The flags of the stages: their values where they are left out, and their manuals."""

import importlib
import sys

import pytest

from common.data.tasks import TASKS
from runs import STAGES, run

EVERY = {"run": "runs/demo", "force": False}
LEFT_OUT = {  # stage -> the flags that are not None or False where they are left out
    "01_calibrate": {"model": "demo", "sequences": 128, "sample_tokens": 256, "batch": 4, "device": "auto",
                     "dtype": "float32"},
    "02_similarity": {"device": "auto"},
    "03_group": {"by": "value", "criterion": "dist", "restarts": 200, "iterations": 3000, "seed": 0},
    "04_align": {"rotate": "dist", "merge": "mean", "dtype": "source", "device": "auto"},
    "06_export": {"dtype": "source"},
    "07_eval": {"only": TASKS, "sequences": 32, "batch": 64, "device": "auto", "dtype": "float32"},
}


@pytest.mark.parametrize("stage", LEFT_OUT)
def test_flags_left_out(stage, monkeypatch):
    monkeypatch.setattr(sys, "argv", [stage])
    module = importlib.import_module(stage)
    given = vars(module.parse())
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    assert chosen | {"force": False} == EVERY | LEFT_OUT[stage]
    assert stage != "01_calibrate" or module.LENGTH == 2048


@pytest.mark.parametrize("stage", STAGES.values())
def test_a_stage_has_its_manual(stage):
    assert "\n\nevery stage:\n  -" in run(stage, "--help").stdout
