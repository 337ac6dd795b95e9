"""The flags of the stages: their values where they are left out, and their manuals."""

import importlib
import sys

import pytest

from runs import STAGES, run

PUBLISHED = {  # by the paper or in the authors' code
    "01_calibrate": {"sequences": 128, "dtype": "float32"},
    "03_group": {"by": "value", "criterion": "dist", "restarts": 200, "iterations": 3000},
    "04_align": {"rotate": "dist", "merge": "mean", "refit": None, "dtype": "source"},
}


@pytest.mark.parametrize("stage", PUBLISHED)
def test_flags_left_out_take_the_published_values(stage, monkeypatch):
    monkeypatch.setattr(sys, "argv", [stage])
    module = importlib.import_module(stage)
    left_out = vars(module.parse())
    assert left_out | PUBLISHED[stage] == left_out
    assert getattr(module, "LENGTH", 2048) == 2048  # tokens of a text


@pytest.mark.parametrize("stage", STAGES.values())
def test_a_stage_has_its_manual(stage):
    assert "\n\nevery stage:\n  -" in run(stage, "--help").stdout
