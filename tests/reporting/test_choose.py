"""The table of numbers of kv heads, from stages on the tiny model: every figure is that of its definition."""

import json
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.text import load_tokens
from common.reporting import choose
from conftest import copy_run, expect_error, run


@pytest.fixture(scope="module")
def chosen(aligned_run, tmp_path_factory):
    """A run directory with kv4 and kv2."""
    home = copy_run(aligned_run, tmp_path_factory.mktemp("choose") / "a [1] run")
    for kv_heads in (2, 4):
        part = home / f"kv{kv_heads}"
        run("03_group.py", "--run", part, "--similarity", home / "similarity.safetensors", "--by", "energy",
            "--kv-heads", kv_heads, "--restarts", 20, "--iterations", 300)
        run("04_align.py", "--run", part, "--calibration", home / "calibration", "--merge", "closed-form",
            "--refit", "output")
    return home


@torch.no_grad()
def test_figures_are_those_of_the_checkpoints(chosen, inputs):
    tokens = load_tokens(inputs["text"], AutoTokenizer.from_pretrained(inputs["model"]), 12, 64)[0][8:]
    paths = {8: inputs["model"], 4: chosen / "kv4" / "merged", 2: chosen / "kv2" / "merged"}
    choices = choose.read_choices(str(chosen))
    assert [choice["kv_heads"] for choice in choices] == list(paths)
    source = None
    for choice, (kv_heads, path) in zip(choices, paths.items(), strict=True):
        output = AutoModelForCausalLM.from_pretrained(path)(tokens, use_cache=True)
        cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers)
        assert choice["bytes"] == cached / tokens.numel()
        predicted = output.logits.double().log_softmax(-1)
        source = predicted if source is None else source
        loss = -predicted[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
        kl = (source.exp() * (source - predicted)).sum(-1).mean()
        assert choice["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
        assert choice["kl"] == pytest.approx(float(kl), rel=1e-4, abs=1e-9)
        layers = [{"keys": 0, "values": 0}]
        if kv_heads < 8:
            layers = json.loads((path / "stage.json").read_text())["summary"]["energy_lost"]
        for name in ("keys", "values"):
            assert choice[name] == pytest.approx(mean(layer[name] for layer in layers))
    assert 0 < choices[1]["keys"] < choices[2]["keys"] < 1 and 0 < choices[1]["kl"] < choices[2]["kl"]


def test_the_table_shows_each_in_its_column(chosen):
    done = run("common/reporting/choose.py", "--run", chosen)
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                        for line in done.stdout.splitlines() if line.startswith("|")]
    assert header == ["kv heads", "KV bytes per token", "keys lost", "values lost", "perplexity", "KL, nats"]
    for row, choice in zip(rows, choose.read_choices(str(chosen)), strict=True):
        name = "8 (source)" if choice["kv_heads"] == 8 else str(choice["kv_heads"])
        assert row == [name, str(choice["bytes"]),
                       f"{100 * choice['keys']:.1f}%", f"{100 * choice['values']:.1f}%",
                       f"{choice['perplexity']:.3f}", f"{choice['kl']:.4f}"]
    assert done.stdout.endswith((chosen / "choose.md").read_text())


def test_what_cannot_be_compared_is_refused(aligned_run, chosen, tmp_path):
    def refused(message: str, home=tmp_path / "run") -> None:
        expect_error(message, "common/reporting/choose.py", "--run", home)

    refused("expected kvN/merged, found none", aligned_run)
    home = copy_run(chosen, tmp_path / "run")
    run("04_align.py", "--run", home / "kv2", "--calibration", home / "calibration", "--force")
    refused("kv2/merged: expected energy_lost")
    (home / "calibration" / "stage.json").write_text("{}")
    refused("calibration: expected the artifact that 04_align.py read")
