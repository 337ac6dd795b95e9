"""The table of numbers of kv heads, from stages on the tiny model: every figure is that of its definition."""

import json
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.text import load_tokens
from helpers import copy_run, expect_error, run


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


@pytest.mark.slow
@torch.no_grad()
def test_the_table_has_the_figures_of_the_checkpoints(chosen, inputs):
    done = run("choose.py", "--run", chosen)
    assert done.stdout.endswith((chosen / "choose.md").read_text())
    assert (chosen / "choose.png").read_bytes().startswith(b"\x89PNG")
    header, _, *rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header] == [
        "kv heads", "KV bytes per token", "keys lost", "values lost", "perplexity", "KL, nats"]
    tokens = load_tokens(inputs["text"], AutoTokenizer.from_pretrained(inputs["model"]), 12, 64)[0][8:]
    paths = {8: inputs["model"], 4: chosen / "kv4" / "merged", 2: chosen / "kv2" / "merged"}
    source = None
    for (kv_heads, path), cells in zip(paths.items(), rows, strict=True):
        output = AutoModelForCausalLM.from_pretrained(path)(tokens, use_cache=True)
        cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers)
        predicted = output.logits.double().log_softmax(-1)
        source = predicted if source is None else source
        loss = -predicted[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
        kl = (source.exp() * (source - predicted)).sum(-1).mean()
        layers = [{"keys": 0, "values": 0}]
        if kv_heads < 8:
            layers = json.loads((path / "stage.json").read_text())["summary"]["energy_lost"]
        lost = [100 * mean(layer[name] for layer in layers) for name in ("keys", "values")]
        shown = [float(cell.strip(" %")) for cell in cells]
        assert shown[:2] == [kv_heads, cached / tokens.numel()]
        assert shown[2:4] == pytest.approx(lost, abs=0.0501)
        assert shown[4] == pytest.approx(float(loss.exp()), rel=1e-5, abs=6e-4)
        assert shown[5] == pytest.approx(float(kl), rel=1e-4, abs=6e-5)
        assert (kl > 0.01) == (kv_heads < 8) == (min(lost) > 1)


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused(aligned_run, chosen, tmp_path):
    def refused(message: str, home=tmp_path / "run") -> None:
        expect_error(message, "choose.py", "--run", home)

    refused("expected kvN/merged, found none", aligned_run)
    home = copy_run(chosen, tmp_path / "run")
    run("04_align.py", "--run", home / "kv2", "--calibration", home / "calibration", "--force")
    refused("kv2/merged: expected energy_lost")
    (home / "calibration" / "stage.json").write_text("{}")
    refused("calibration: expected the artifact that 04_align.py read")
