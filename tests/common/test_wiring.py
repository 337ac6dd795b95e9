"""What is easily wired wrongly: each input, flag and figure reaches what it names, one at a time."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from common import artifacts, cli, files
from common.errors import Complete, UserError
from common.records import find_fault
from common.training import checkpoints
from helpers import calibrate_arguments, calibrated_layer, copy_run, run
from test_records import MODEL, SHA, valid

OTHER = "cd" * 32
EXPORT, GROUP = "06_export.py", "03_group.py"


@pytest.fixture
def args(tmp_path):
    yield SimpleNamespace(run=str(tmp_path), seed=0, force=False, update=False)
    cli.cleanup.close()


def export(args, inputs: dict, card: str = "card") -> str:
    """Stage 6 in small: gqa/ with a card."""
    path = os.path.join(args.run, "gqa")
    try:
        started = artifacts.begin_stage(EXPORT, args, path, inputs=inputs)
        with files.write_directory(path) as aside:
            with open(os.path.join(aside, "README.md"), "w", encoding="utf-8") as file:
                file.write(card)
            artifacts.write_record(aside, started.record(MODEL, valid(EXPORT)["summary"]))
    finally:
        cli.cleanup.close()
    return path


@pytest.mark.parametrize("changed", ["calibration", "groups.json", "similarity.json"])
def test_each_input_alone_makes_an_artifact_another(args, changed):
    inputs = dict.fromkeys(("calibration", "groups.json", "similarity.json"), SHA)
    export(args, inputs)
    with pytest.raises(Complete):
        export(args, inputs)
    with pytest.raises(UserError, match=f"made from another {changed}; pass --force"):
        export(args, inputs | {changed: OTHER})


@pytest.mark.parametrize("card, edited, noticed", [
    ("a card", "another", True),
    ("a card <!-- scores -->1<!-- /scores --> end", "a card <!-- scores -->2<!-- /scores --> end", False),
    ("a card <!-- scores -->1<!-- /scores --> end", "edited <!-- scores -->1<!-- /scores --> end", True),
    ("a card <!-- scores -->1<!-- /scores --> end", "a card <!-- scores -->1<!-- /scores --> edited", True),
])
def test_an_edited_card_is_noticed_unless_scores_alone_changed(args, card, edited, noticed):
    path = export(args, {}, card)
    with open(os.path.join(path, "README.md"), "w", encoding="utf-8") as file:
        file.write(edited)
    with pytest.raises(UserError if noticed else Complete, match="was modified" if noticed else "complete"):
        export(args, {})


def test_a_digest_is_kept_once_both_times_of_a_file_are_old(tmp_path, monkeypatch):
    """A copy keeps the time of its content, and may be a moment old."""
    path, cache = tmp_path / "weights", tmp_path / "cache"
    monkeypatch.setattr(files, "LARGE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    path.write_bytes(b"aa")
    now = path.stat().st_ctime_ns
    old, later = now - int(10 * files.MTIME_SLACK_NS), now + int(10 * files.MTIME_SLACK_NS)
    for content, clock, kept in ((old, now, False), (later, later, False), (old, later, True)):
        os.utime(path, ns=(old, content))
        monkeypatch.setattr(files.time, "time_ns", lambda clock=clock: clock)
        assert files.known_sha256(str(path)) == files.sha256(str(path))
        assert cache.exists() == kept


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_grouping_merges_something(kv_heads):
    """Of MODEL's 4 heads: a group of one head each has nothing to merge."""
    groups = torch.arange(4).view(kv_heads, -1).tolist()
    record = valid(GROUP) | {"kv_heads": kv_heads, "groups": [groups] * MODEL["layers"]}
    record["summary"]["kv_heads"] = kv_heads
    fault = "record.kv_heads: expected a proper divisor of 4, found 4" if kv_heads == 4 else None
    assert find_fault(record, GROUP) == fault


def test_calibration_runs_in_the_dtype_asked_for(inputs, tmp_path):
    """What a pass in bfloat16 leaves are numbers of bfloat16; in float32 they are not."""
    for dtype in ("float32", "bfloat16"):
        home = tmp_path / dtype
        run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs), "--dtype", dtype)
        sample = calibrated_layer(home / "calibration", 1)["sample.value"]
        assert sample.equal(sample.bfloat16().float()) == (dtype == "bfloat16")


def test_an_export_has_the_held_out_metrics_of_its_step(finished_run, tmp_path):
    """The best checkpoint is not the last: here each step has figures of its own."""
    home = copy_run(finished_run, tmp_path / "run")
    train = home / "train"
    record = json.loads((train / "stage.json").read_text())
    first, *_, last = map(checkpoints.step_of, checkpoints.saved_checkpoints(str(train)))
    figures = {first: {"heldout_kl": 0.125}, last: {"heldout_kl": 0.25}}
    lines = [{"step": step} | figures[step] for step in figures]
    (train / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in checkpoints.saved_checkpoints(str(train)):  # saved with these metrics
        written = os.path.join(path, checkpoints.ORIGIN)
        with open(written, "w", encoding="utf-8") as file:
            json.dump(checkpoints.origin(path), file)
        digests = json.loads((train / os.path.basename(path) / checkpoints.DIGESTS).read_text())
        digests[checkpoints.ORIGIN] = files.sha256(written)
        (train / os.path.basename(path) / checkpoints.DIGESTS).write_text(json.dumps(digests))
    record["arguments"]["tasks"] = "none"
    artifacts.write_record(str(train), record, of=checkpoints.own_files(str(train), checkpoints.OF_STUDENT))
    shutil.rmtree(home / "gqa")
    run("06_export.py", "--run", home)
    summary = json.loads((home / "gqa" / "stage.json").read_text())["summary"]
    assert (summary["step"], summary["heldout_kl"]) == (first, 0.125)


@pytest.mark.parametrize("name", ["step-00000001/shard", "settings.json", "metrics.jsonl",
                                  "curves.png", "heldout.npy", "tensorboard/events.out.tfevents.1.host"])
def test_every_file_of_a_training_is_in_its_record(tmp_path, name):
    for file in (name, "notes.txt", "step-00000001/notes.txt", "tensorboard/notes.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("a")
    (tmp_path / "step-00000001" / "sha256.json").write_text(json.dumps({"shard": "ab" * 32}))
    own = checkpoints.own_files(str(tmp_path), checkpoints.OF_STUDENT)
    assert own == sorted([name, "step-00000001/sha256.json"])
