"""Stages 1 to 4 on a model in memory: the tensors of merged/, and the model that is given stays as it is."""

import contextlib
import copy
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.models.calibration import Calibration
from common.run.errors import UserError
from common.run.kinds import MERGES
from models import save_tiny, tiny_model
from pipelines import in_memory
from pipelines.in_memory import convert
from runs import run
from torchrun import ROOT

TOKENS = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(3))
MODELS = [
    {"bias": True}, {"model_type": "qwen3", "tie_word_embeddings": True}, {"model_type": "phi3"},
    {"model_type": "qwen2", "num_key_value_heads": 4, "dtype": torch.bfloat16}]
WAYS = [("energy", "closed-form", "attention"), ("value", "mean", "output")]  # 64 tokens: a context with gaps
LINES = (ROOT / "docs" / "METHOD.md").read_text().split("## From Python\n")[1].split("\n## ")[0]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]) and tensor.dtype == found[name].dtype, name


@pytest.mark.slow
@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_the_result_has_the_tensors_of_merged(changes, inputs, tmp_path):
    path, home = save_tiny(tmp_path / "model", **changes), tmp_path / "run"
    text = ["--text", inputs["text"], "--sequences", 6, "--length", 64]
    run("01_calibrate.py", "--run", home, "--model", path, *text)
    run("02_similarity.py", "--run", home, "--energy")
    tokens = Calibration(str(home / "calibration")).tokens()
    model = AutoModelForCausalLM.from_pretrained(path)
    for by, merge, refit in WAYS:
        run("03_group.py", "--run", home, "--kv-heads", 2, "--by", by, "--force")
        run("04_align.py", "--run", home, "--merge", merge, "--refit", refit, "--force")
        convert(model, tokens, 2, by, merge, refit).save_pretrained(tmp_path / merge)
        assert_same(*(load_file(directory / "model.safetensors")
                      for directory in (tmp_path / merge, home / "merged")))


@pytest.mark.parametrize("by", ["value", pytest.param("none", marks=pytest.mark.slow)])
def test_the_result_is_stock_and_the_model_stays(by, monkeypatch):
    monkeypatch.setattr(in_memory, "ITERATIONS", 10)
    model = AutoModelForCausalLM.from_config(tiny_model(attention_dropout=0.1).config)
    model.generation_config.max_new_tokens = 7
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    result = convert(model, TOKENS, 4, by=by, merge="mean", refit="output")
    assert type(result) is type(model) and not hasattr(result.model.layers[0].self_attn, "rope_pairs")
    assert result.config.to_dict() == config | {"num_key_value_heads": 4, "dtype": "float32"}
    assert result.generation_config.max_new_tokens == 7
    assert result.generation_config is not model.generation_config
    for parameter in result.parameters():
        parameter.data.zero_()
    assert model.config.to_dict() == config and not hasattr(model.model.layers[0].self_attn, "rope_pairs")
    assert model.training
    assert_same(model.state_dict(), before)


def test_what_cannot_be_converted_is_refused():
    """A kind of merge that is none, sequences too few to refit, and models that the proof refuses."""
    for model, message, arguments in (
        (tiny_model(), f"merge: expected one of {', '.join(MERGES)}, found sum", {"merge": "sum"}),
        (tiny_model(), r"with a refit two or more, found \[1, 24\]", {"refit": "output"}),
        (tiny_model(num_key_value_heads=1), "it has 1 key/value head: nothing to merge", {}),
        (get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])),
         "expected a LlamaForCausalLM, found a PeftModel", {}),
    ):
        with pytest.raises(UserError, match=message):
            convert(model, TOKENS[:1], 2, **arguments)


@pytest.mark.slow
def test_the_documented_lines_run(tmp_path, capsys):
    for name in ("common", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs").mkdir()
    lines = [line[4:] for line in LINES.splitlines() if line.startswith("    ")]
    with contextlib.chdir(tmp_path):
        exec("\n".join(lines), {})
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "merged").config.num_key_value_heads == 2
    assert "2 kv heads" in capsys.readouterr().out and os.listdir(tmp_path / "runs") == ["merged"]
