"""pipelines/smollm2.sh: its text; end to end on a tiny model, slow."""

import json
import random

import pytest

from common.run.errors import UserError
from models import save_tiny
from pipelines import smollm2
from runs import recipe
from torchrun import ROOT


def test_a_file_is_halved(tmp_path):
    (tmp_path / "text.txt").write_text("première moitié, seconde moitié")
    smollm2.write_halves(str(tmp_path), str(tmp_path / "text.txt"))
    halves = [(tmp_path / "text" / f"{name}.txt").read_text() for name in ("calibration", "heldout")]
    assert halves == ["première moitié", ", seconde moitié"]
    smollm2.write_halves(str(tmp_path), str(tmp_path / "text.txt"))  # again
    (tmp_path / "text.txt").write_text("corrected")
    with pytest.raises(UserError, match=f"{tmp_path}/text: expected the halves of .*; pass another RUN"):
        smollm2.write_halves(str(tmp_path), str(tmp_path / "text.txt"))
    assert halves == [(tmp_path / "text" / f"{name}.txt").read_text() for name in ("calibration", "heldout")]


def test_the_manual_is_long_enough_and_repeats_nothing():
    text = smollm2.manual()
    assert text == smollm2.manual() and len(text) > 300_000  # 48 + 12 sequences of 512 tokens are 130,000
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))


def read_results(run) -> dict:
    return json.loads((run / "eval" / "stage.json").read_text())["results"]


@pytest.mark.slow
def test_pipeline_on_a_tiny_model(tmp_path):
    run, model = tmp_path / "a [1] run", save_tiny(tmp_path / "model")
    settings = {"RUN": run, "MODEL": model, "TEXT": random.__file__, "SEQUENCES": 8, "LENGTH": 64,
                "KV_HEADS": 4, "TOKENS": 2000}
    done = recipe("smollm2.sh", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    source, *merged = read_results(run).values()
    assert [metrics["kv_heads"] for metrics in merged] == [4] * 6
    for metrics in merged:
        assert metrics["cache_bytes_per_token"] == source["cache_bytes_per_token"] / 2
    made = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}  # locks touch others
    again = recipe("smollm2.sh", **settings)  # everything exists: the table is shown again
    table = (run / "eval" / "eval.md").read_text()
    assert again.returncode == 0 and table in again.stdout
    assert all(line in table for line in (ROOT / "pipelines" / "prompts.txt").read_text().splitlines())
    assert made == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


@pytest.mark.release
def test_pipeline(tmp_path):
    """The defaults, from PyPI: the order of the initial models, and how close the best of them is."""
    run = tmp_path / "run"
    done = recipe("smollm2.sh", RUN=run)
    assert done.returncode == 0, done.stdout + done.stderr
    source, *others = (metrics["perplexity"] for metrics in read_results(run).values())
    assert others == sorted(others, reverse=True)
    assert source < others[-1] < others[-2] < 1.5 * source
