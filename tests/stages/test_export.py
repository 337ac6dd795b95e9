"""Stage 6: the export's dtype, checkpoints and exports that are refused, and memory that a layer sets."""

import importlib
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.models.layers import Layers
from common.training.checkpoints import TrainedWeights, saved_checkpoints, step_of
from runs import copy_run, expect_error, run

NAME = "model.layers.1.mlp.up_proj.weight"


def after(real, change):
    """A method whose result is changed: `change` is called with it and with the method's arguments."""
    return lambda self, *arguments: change(real(self, *arguments), *arguments)


def put_nan(_, tensors) -> None:
    if NAME in tensors:
        tensors[NAME][-1, -1] = float("nan")


def enlarge_hidden_states(_, tensors) -> None:
    """Beyond float16, whose range the weights do not leave."""
    for name in tensors.keys() & {NAME, NAME.replace("up", "down")}:
        tensors[name] *= 1e4


def off_by(error: float):
    """Logits of the checkpoint loaded back; float32 stores what was computed."""
    return lambda logits, tokens: [rows + error for rows in logits]


@pytest.mark.parametrize(("owner", "method", "change", "flags", "message"), [
    (TrainedWeights, "names", lambda names: names - {NAME}, [], f"expected a tensor {NAME}, found none"),
    (TrainedWeights, "read", put_nan, [], f"step-00000010: NaN or Inf in {NAME}"),
    (TrainedWeights, "read", enlarge_hidden_states, ["--dtype", "float16"],
     "found NaN or Inf in torch.float16; try --dtype float32 or bfloat16"),
    (Layers, "logits", off_by(1e-2), [], "the export, loaded back, differs from the student"),
])  # fmt: skip
def test_a_student_or_an_export_with_a_fault_is_refused(
    finished_run, tmp_path, monkeypatch, owner, method, change, flags, message
):
    """And the earlier export stays."""
    home = copy_run(finished_run, tmp_path / "run")
    before = (home / "gqa" / "stage.json").read_bytes()
    monkeypatch.setattr(owner, method, after(getattr(owner, method), change))
    expect_error(message, "06_export.py", "--run", home, "--force", *flags)
    assert (home / "gqa" / "stage.json").read_bytes() == before and not list(home.glob(".*.unfinished"))


def test_the_export_has_the_sources_dtype_or_another(finished_run, tmp_path):
    home = copy_run(finished_run, tmp_path / "run")
    shutil.rmtree(home / "gqa")
    run("06_export.py", "--run", home, "--dtype", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(home / "gqa").dtype is torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(finished_run / "gqa").dtype is torch.float32


def test_the_best_checkpoint_is_exported(finished_run, tmp_path):
    """By the held-out KL in metrics.jsonl; after tasks the last one."""
    home, stage = copy_run(finished_run, tmp_path / "run"), importlib.import_module("06_export")
    training = str(home / "train")
    saved = [step_of(path) for path in saved_checkpoints(training)]
    lines = [{"step": saved[0], "heldout_kl": 0.1}, {"step": saved[-1], "heldout_kl": 0.2}]
    (home / "train" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for tasks, expected in (("none", saved[0]), ("hub", saved[-1])):
        chosen = stage.chosen_weights(training, {"arguments": {"tasks": tasks}})
        assert step_of(chosen.path) == expected
