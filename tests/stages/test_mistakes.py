"""Mistakes a user makes in flags and between stages: one line each."""

import shutil

import pytest

from helpers import copy_run, expect_error, run, save_tiny


def test_mistakes_in_calibration(inputs, tmp_path):
    command = ["01_calibrate.py", "--run", tmp_path / "run", "--sequences", 4, "--length", 64]
    model = ["--model", inputs["model"]]
    expect_error("neither a directory nor a hub repository", *command, "--model", "no/such-model")
    expect_error("expected c4, demo, or", *command, *model, "--text", "missing.txt")
    message = "expected 4000 x 64 = 256000 tokens in its training part, found"
    expect_error(message, *command, *model, "--text", inputs["text"], "--sequences", 4000)
    assert not (tmp_path / "run").exists()


def test_missing_inputs_name_the_stage_that_writes_them(aligned_run, inputs, tmp_path):
    home, empty = copy_run(aligned_run, tmp_path / "run"), tmp_path / "empty"
    expect_error("calibration not found; run 01_calibrate.py first", "02_similarity.py", "--run", empty)
    expect_error("train not found; run 05_prune_train.py first", "06_export.py", "--run", home)
    expect_error("expected one of teacher, merged, gqa, found none", "07_eval.py", "--run", empty)
    expect_error("nowhere/at-all: expected a checkpoint directory, found none", "07_eval.py", "--run", empty,
                 "--model", "nowhere/at-all", "--text", "none")
    shutil.rmtree(home / "merged")
    expect_error("merged not found; run 04_align.py first", "05_prune_train.py", "--run", home,
                 "--tasks", inputs["tasks"])


@pytest.mark.parametrize(("command", "flags", "message"), [
    ("02_similarity.py", ["--key-context", 8], "--key-context: expected --energy with it"),
    ("02_similarity.py", ["--layers-drawn", 0, 3], "--layers-drawn: expected layers from 0 to 2, found 3"),
    ("03_group.py", ["--kv-heads", 3], "kv heads: expected one of [1, 2, 4] for 8 key/value heads, found 3"),
    ("04_align.py", ["--merge-keys", "pairs"],
     "--merge-keys pairs: expected --merge closed-form with it, found mean"),
])  # fmt: skip
def test_flags_that_do_not_fit_are_refused_before_anything_is_written(aligned_run, tmp_path, command, flags,
                                                                      message):
    home = copy_run(aligned_run, tmp_path / "run")
    before = times(home)
    expect_error(message, command, "--run", home, "--force", *flags)
    assert times(home) == before


def times(home) -> dict:
    """When each file was written."""
    return {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}


def test_groups_of_another_model_are_refused(aligned_run, inputs, tmp_path):
    model, home = save_tiny(tmp_path / "model", seed=9, bias=True), tmp_path / "run"
    run("01_calibrate.py", "--run", home, "--model", model, "--text", inputs["text"], "--sequences", 2,
        "--length", 64)
    shutil.copy(aligned_run / "groups.json", home)
    expect_error("expected an artifact of model", "04_align.py", "--run", home)
