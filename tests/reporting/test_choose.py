"""The table of numbers of kv heads, from stages on the tiny model: every figure is that of its definition."""

import json
import shutil
from statistics import mean

import pytest
import torch
from matplotlib import pyplot
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.text import HELDOUT, load_tokens
from common.reporting import choose
from helpers import copy_run, expect_error, run

CHOICES = [{"kv_heads": 8 // number, "bytes": 1024 // number, "keys": number / 8, "values": number / 16,
            "perplexity": 20.0 + number, "kl": number / 4} for number in (1, 2, 4)]


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


def test_the_picture_shows_each_series_by_the_size_of_the_cache():
    figure = choose.curves.__wrapped__(pyplot, CHOICES)
    kl, lost = figure.axes
    assert (kl.get_ylabel(), lost.get_ylabel()) == ("KL from the source, nats (perplexity)",
                                                    "share of energy lost")
    assert [text.get_text() for text in lost.get_legend().get_texts()] == ["keys", "values"]
    for line, name in zip([*kl.lines, *lost.lines], ("kl", "keys", "values"), strict=True):
        assert list(line.get_xdata()) == [1024, 512, 256]
        assert list(line.get_ydata()) == [choice[name] for choice in CHOICES]
    assert [(text.xy, text.get_text()) for text in kl.texts] == [
        ((1024, 0.25), "(21)"), ((512, 0.5), "(22)"), ((256, 1.0), "(24)")]
    for axis in (kl, lost):
        assert axis.get_xlabel() == "kv heads, KV bytes per token"
        assert {tick.get_position()[0]: tick.get_text() for tick in axis.get_xticklabels()} == {
            1024: "8\n1,024", 512: "4\n512", 256: "2\n256"}
    pyplot.close(figure)


@pytest.mark.slow
@torch.no_grad()
def test_the_table_has_the_metrics_of_the_checkpoints(chosen, inputs):
    command = "pipelines/choose.py", "--run", chosen
    done = run(*command)
    assert done.stdout.endswith((chosen / "choose.md").read_text())
    assert (chosen / "choose.png").read_bytes().startswith(b"\x89PNG")
    header, _, *rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header] == [
        "kv heads", "KV bytes per token", "keys lost", "values lost", "perplexity", "KL, nats"]
    tokens = load_tokens(inputs["text"], AutoTokenizer.from_pretrained(inputs["model"]), 4, 64, HELDOUT)[0]
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
    for name in ("choose.md", "choose.png"):  # only its own files are replaced, unless forced
        run(*command)
        made = (chosen / name).read_bytes()
        (chosen / name).write_bytes(b"my notes")
        expect_error(f"{name} already exists; pass --force to replace it", *command)
        assert (chosen / name).read_bytes() == b"my notes"
        run(*command, "--force")
        assert (chosen / name).read_bytes() == made


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused(aligned_run, chosen, tmp_path):
    def refused(message: str, home=tmp_path / "run") -> None:
        expect_error(message, "pipelines/choose.py", "--run", home)

    refused("expected kvN/merged, found none", aligned_run)
    home = copy_run(chosen, tmp_path / "run")
    shutil.copytree(home / "kv2", home / "kv02")
    refused("kv2/merged: expected one directory of each number of kv heads, found "
            f"{home}/kv02/merged of 2, too")
    (home / "kv02" / "merged" / "model.safetensors").unlink()
    refused("kv02/merged")
    shutil.rmtree(home / "kv02")
    run("04_align.py", "--run", home / "kv2", "--calibration", home / "calibration", "--force")
    refused("kv2/merged: expected energy_lost")
    (home / "calibration" / "stage.json").write_text("{}")
    refused("calibration: expected the artifact that 04_align.py read")
