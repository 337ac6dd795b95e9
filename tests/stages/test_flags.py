"""The flags of the stages: their values where they are left out, and the sections of --help."""

import importlib
import re
import sys

import pytest

from common.data.tasks import TASKS
from common.errors import UserError

EVERY = {"run": "runs/demo", "force": False}
LEFT_OUT = {  # stage -> the flags that are not None or False where they are left out
    "01_calibrate": {"model": "demo", "sequences": 128, "sample_tokens": 256, "batch": 4, "device": "auto",
                     "dtype": "float32"},
    "02_similarity": {"device": "auto"},
    "03_group": {"by": "value", "criterion": "dist", "restarts": 200, "iterations": 3000, "seed": 0},
    "04_align": {"rotate": "dist", "merge": "mean", "merge_keys": "rope", "sequences": 4, "dtype": "source",
                 "device": "auto"},
    "06_export": {"dtype": "source"},
    "07_eval": {"only": TASKS, "sequences": 32, "batch": 64, "device": "auto", "dtype": "float32"},
}
SECTIONS = {
    "01_calibrate": ["input", "output", "execution"],
    "02_similarity": ["this stage"],
    "03_group": ["this stage", "grouping", "search"],
    "04_align": ["this stage", "merging", "the equivalence check", "execution"],
    "05_prune_train": ["data", "teacher and student", "length of training", "optimization",
                       "held-out measurement: KL to the teacher, next-token loss, top-1 agreement",
                       "execution"],
    "06_export": ["this stage"],
    "07_eval": ["checkpoints and tasks", "perplexity and speed", "execution"],
}


@pytest.mark.parametrize("stage", LEFT_OUT)
def test_flags_left_out(stage, monkeypatch):
    monkeypatch.setattr(sys, "argv", [stage])
    given = vars(importlib.import_module(stage).parse())
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    assert chosen | {"force": False} == EVERY | LEFT_OUT[stage]


@pytest.mark.parametrize("stage", [stage for stage, flags in LEFT_OUT.items() if "device" in flags])
def test_a_device_that_is_not_there_is_refused(stage, monkeypatch):
    monkeypatch.setattr(sys, "argv", [stage, "--device", "tpu"])
    with pytest.raises(UserError, match="--device: expected auto, cpu, cuda or cuda:N, found tpu"):
        importlib.import_module(stage).parse()


@pytest.mark.parametrize("stage", SECTIONS)
def test_help_lists_flags_in_sections(stage, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [stage, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(stage).parse()
    titles = re.findall(r"\n\n(\S.*):\n  -", capsys.readouterr().out)
    assert titles == ["every stage", *SECTIONS[stage]]
