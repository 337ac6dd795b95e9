"""Stages 1 to 4 on a model in memory: the tensors of merged/, and the model that is given stays as it is."""

import contextlib
import os
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel

from common.calibration import Calibration
from common.errors import UserError
from helpers import ROOT, run, save_tiny, tiny_model
from pipelines.in_memory import convert

TOKENS = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(3))
WAYS = {"closed-form": ["--energy"], "mean": []}


@pytest.mark.slow
@pytest.mark.parametrize(("by", "merge", "refit"), [
    ("energy", "closed-form", None), ("energy", "closed-form", "attention"), ("value", "mean", None),
    ("none", "mean", "output")])
@pytest.mark.parametrize("changes", [
    {"bias": True}, {"model_type": "qwen3", "tie_word_embeddings": True}, {"model_type": "phi3"},
    {"model_type": "qwen2", "num_key_value_heads": 4, "dtype": torch.bfloat16}], ids=lambda changes: str(changes))
def test_the_result_has_the_tensors_of_merged(changes, by, merge, refit, inputs, tmp_path):
    path, home = save_tiny(tmp_path / "model", **changes), tmp_path / "run"
    run("01_calibrate.py", "--run", home, "--model", path, "--text", inputs["text"], "--sequences", 6,
        "--length", 32)
    run("02_similarity.py", "--run", home, *["--energy"] * (by == "energy"))
    run("03_group.py", "--run", home, "--kv-heads", 2, "--by", by)
    run("04_align.py", "--run", home, "--merge", merge, *["--refit", refit] * bool(refit))
    model = AutoModelForCausalLM.from_pretrained(path)
    result = convert(model, Calibration(str(home / "calibration")).tokens(), 2, by, merge, refit)
    result.save_pretrained(tmp_path / "result")
    expected, found = (load_file(directory / "model.safetensors")
                       for directory in (home / "merged", tmp_path / "result"))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]) and tensor.dtype == found[name].dtype, name
