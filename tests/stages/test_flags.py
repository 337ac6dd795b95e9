"""The flags of the stages: their values where they are left out, --help, and a flag that is none."""

import importlib
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


@pytest.mark.parametrize("stage", LEFT_OUT)
def test_flags_left_out(stage, monkeypatch):
    monkeypatch.setattr(sys, "argv", [stage])
    module = importlib.import_module(stage)
    given = vars(module.parse())
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    assert chosen | {"force": False} == EVERY | LEFT_OUT[stage]
    assert stage != "01_calibrate" or module.LENGTH == 2048


@pytest.mark.parametrize("stage", [stage for stage, flags in LEFT_OUT.items() if "device" in flags])
def test_a_device_that_is_not_there_is_refused(stage, monkeypatch):
    monkeypatch.setattr(sys, "argv", [stage, "--device", "tpu"])
    with pytest.raises(UserError, match="--device: expected auto, cpu, cuda or cuda:N, found tpu"):
        importlib.import_module(stage).parse()


SECTIONS = {
    "04_align": ("merging", "the equivalence check", "execution"),
    "05_prune_train": ("teacher and student", "length of training", "optimization"),
    "07_eval": ("checkpoints and tasks", "text, chats and speed", "execution"),
}


@pytest.mark.parametrize("stage", ["05_prune_train", *LEFT_OUT])
def test_a_stage_has_its_manual_and_refuses_a_wrong_flag(stage, monkeypatch, capsys):
    parse = importlib.import_module(stage).parse
    monkeypatch.setattr(sys, "argv", [stage, "--help"])
    with pytest.raises(SystemExit) as ended:
        parse()
    manual = capsys.readouterr().out
    assert ended.value.code == 0 and "\n\nevery stage:\n  -" in manual
    for title in SECTIONS.get(stage, ()):
        assert f"\n\n{title}:\n  -" in manual
    monkeypatch.setattr(sys, "argv", [stage, "--runs", "there"])
    with pytest.raises(UserError, match="unknown flag --runs; did you mean --run\\?"):
        parse()
