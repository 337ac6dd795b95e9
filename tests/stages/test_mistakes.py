"""Mistakes a user makes in flags and between stages: one line each."""

import shutil

from helpers import copy_run, expect_error, run, save_tiny


def test_mistakes_in_calibration(inputs, tmp_path):
    command = ["01_calibrate.py", "--run", tmp_path / "run", "--sequences", 4, "--length", 64]
    model = ["--model", inputs["model"]]
    expect_error("neither a directory nor a hub repository", *command, "--model", "no/such-model")
    expect_error("expected c4, demo, or", *command, *model, "--text", "missing.txt")
    message = "expected 4000 x 64 = 256000 tokens in its training part, found"
    expect_error(message, *command, *model, "--text", inputs["text"],
                 "--sequences", 4000)
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


def test_mistakes_between_stages(aligned_run, inputs, tmp_path):
    home, other = copy_run(aligned_run, tmp_path / "run"), tmp_path / "other"
    expect_error("kv heads: expected one of [1, 2, 4] for 8 key/value heads, found 3",
                 "03_group.py", "--run", home, "--kv-heads", 3, "--force")

    model = save_tiny(tmp_path / "model", seed=9, bias=True)
    text = ["--text", inputs["text"], "--sequences", 2, "--length", 64]
    run("01_calibrate.py", "--run", other, "--model", model, *text)
    shutil.copy(home / "groups.json", other)
    expect_error("expected an artifact of model", "04_align.py", "--run", other)


def test_flags_that_do_not_fit_are_refused_before_anything_is_written(aligned_run, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    before = (home / "similarity.json").read_bytes()
    command = ["02_similarity.py", "--run", home, "--force"]
    expect_error("--key-context: expected --energy with it", *command, "--key-context", 8)
    expect_error("--layers-drawn: expected layers from 0 to 2, found 3", *command, "--layers-drawn", 0, 3)
    assert (home / "similarity.json").read_bytes() == before
    expect_error("--merge-keys pairs: expected --merge closed-form with it, found mean",
                 "04_align.py", "--run", home, "--force", "--merge-keys", "pairs")
