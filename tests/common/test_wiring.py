"""What is easily wired wrongly: a flag and a figure reach what they name, and a record names every file."""

import json
import shutil

from common import artifacts
from common.training import checkpoints
from helpers import calibrate_arguments, calibrated_layer, copy_run, run


def test_calibration_runs_in_the_dtype_asked_for(inputs, tmp_path):
    """What a pass in bfloat16 leaves are numbers of bfloat16; in float32 they are not."""
    for dtype in ("float32", "bfloat16"):
        home = tmp_path / dtype
        run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs), "--dtype", dtype)
        sample = calibrated_layer(home / "calibration", 1)["sample.value"]
        assert sample.equal(sample.bfloat16().float()) == (dtype == "bfloat16")


def test_an_export_has_the_held_out_metrics_of_its_step(finished_run, tmp_path, monkeypatch):
    """The best checkpoint is not the last: here each step has figures of its own."""
    home = copy_run(finished_run, tmp_path / "run")
    train = home / "train"
    monkeypatch.setattr(checkpoints, "origin", lambda path: {})  # other metrics than it was saved with
    record = json.loads((train / "stage.json").read_text())
    first, *_, last = map(checkpoints.step_of, checkpoints.saved_checkpoints(str(train)))
    lines = [{"step": first, "heldout_kl": 0.125}, {"step": last, "heldout_kl": 0.25}]
    (train / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record["arguments"]["tasks"] = "none"
    artifacts.write_record(str(train), record, of=checkpoints.own_files(str(train), checkpoints.OF_STUDENT))
    shutil.rmtree(home / "gqa")
    run("06_export.py", "--run", home)
    summary = json.loads((home / "gqa" / "stage.json").read_text())["summary"]
    assert (summary["step"], summary["heldout_kl"]) == (first, 0.125)


def test_every_file_of_a_training_is_in_its_record(tmp_path):
    own = ["curves.png", "heldout.npy", "metrics.jsonl", "settings.json", "step-00000001/sha256.json",
           "step-00000001/shard", "tensorboard/events.out.tfevents.1.host"]
    for name in (*own, "notes.txt", "step-00000001/notes.txt", "tensorboard/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    (tmp_path / "step-00000001" / "sha256.json").write_text(json.dumps({"shard": "ab" * 32}))
    assert checkpoints.own_files(str(tmp_path), checkpoints.OF_STUDENT) == own
