"""Artifacts come back as written, or are refused; a stage makes each once, and replaces only its own."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from common import artifacts, calibration, cli, files
from common.errors import Complete, UserError
from common.training import checkpoints
from runs import SMALL_MODEL, calibrate_arguments, calibrated_layer, contents, copy_run, run, valid_record

SIMILARITY, EXPORT = "02_similarity.py", "06_export.py"
MEANS = valid_record(SIMILARITY)["summary"]


@pytest.fixture
def args(tmp_path):
    yield SimpleNamespace(run=str(tmp_path), seed=0, calibration=None, force=False, update=False)
    cli.cleanup.close()


def similarity(args, value: float = 2.0, inputs: dict | None = None) -> str:
    """Stage 2 in small: a.safetensors and a.png, with the record a.json. Returns the path of the tensors."""
    path = os.path.join(args.run, "a.json")
    with cli.cleanup:
        started = artifacts.begin_stage(SIMILARITY, args, path, beside=("a.safetensors", "a.png"),
                                        inputs=inputs or {})
        with artifacts.write_beside(path) as aside:
            save_file({"x": torch.full((100,), value)}, os.path.join(aside, "a.safetensors"))
            Path(aside, "a.png").write_text(f"picture of {value}")
            artifacts.write_record(aside, started.record(SMALL_MODEL, MEANS), "a.json")
    return os.path.join(args.run, "a.safetensors")


def export(args, card: str = "card", inputs: dict | None = None) -> Path:
    """Stage 6 in small: gqa/ with three files, one of them in a folder, and a card."""
    path = Path(args.run, "gqa")
    with cli.cleanup:
        started = artifacts.begin_stage(EXPORT, args, str(path), inputs=inputs or {})
        with files.write_directory(str(path)) as aside:
            for name in ("config.json", "weights", "step-1/shard"):
                Path(aside, name).parent.mkdir(exist_ok=True)
                Path(aside, name).write_text("content")
            Path(aside, "README.md").write_text(card)
            artifacts.write_record(aside, started.record(SMALL_MODEL, valid_record(EXPORT)["summary"]))
    return path


def test_round_trip_and_record(args):
    tensors, record = artifacts.read_tensors(similarity(args), SIMILARITY)
    assert torch.equal(tensors["x"], torch.full((100,), 2.0))
    assert record["flags"] == {"seed": 0} and record["arguments"]["run"] == args.run
    assert record["summary"] == MEANS and record["model"] == SMALL_MODEL and record["inputs"] == {}
    assert set(record["packages"]) == set(artifacts.PACKAGES) and record["seconds"] >= 0
    assert record["files"].keys() == {"a.safetensors", "a.png"}
    assert artifacts.read_record(os.path.join(args.run, "a.safetensors"), SIMILARITY, SMALL_MODEL) == record


def test_a_record_is_written_without_git_and_without_packages_that_are_not_needed(args, monkeypatch):
    monkeypatch.setattr(artifacts, "PACKAGES", ("torch", "a-package-that-is-not-there"))
    monkeypatch.setenv("PATH", args.run)
    _, record = artifacts.read_tensors(similarity(args), SIMILARITY)
    assert record["packages"] == {"torch": torch.__version__} and record["commit"] is None


def test_the_commit_is_that_of_this_source_and_says_if_it_was_edited(tmp_path, monkeypatch):
    source = tmp_path / "source"

    def git(*command):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *command], cwd=source, capture_output=True, check=True)
        return done.stdout.decode().strip()

    (source / "common").mkdir(parents=True)
    (source / "file").write_text("first")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(artifacts, "__file__", str(source / "common" / "artifacts.py"))
    assert artifacts.source_commit() == git("rev-parse", "HEAD")
    (source / "file").write_text("edited")
    assert artifacts.source_commit() == git("rev-parse", "HEAD") + "-dirty"
    for place in (source, tmp_path):  # the repository around it is another, or there is none
        monkeypatch.setattr(artifacts, "__file__", str(place / "unpacked" / "common" / "artifacts.py"))
        (place / "unpacked" / "common").mkdir(parents=True)
        assert artifacts.source_commit() is None


@pytest.mark.parametrize(("value", "message"), [
    (math.nan, "NaN or Inf in value.raw"), (-math.inf, "NaN or Inf in value.raw"),
    (2, "its content does not match its record"),
])
def test_a_layer_of_another_calibration_or_one_with_NaN_is_refused(tmp_path, value, message):
    """A calibration may be replaced while a stage reads it layer by layer."""
    grams = torch.ones(10, 8, 8)  # of SMALL_MODEL's 4 kv heads
    values = grams.clone()
    values[-1, -1, -1] = value
    for index in range(SMALL_MODEL["layers"]):
        calibration.write_layer(str(tmp_path), index, {"key.raw": grams, "value.raw": values})
    calibration.write_tokens(str(tmp_path), torch.zeros(2, 32))
    artifacts.write_record(str(tmp_path), valid_record("01_calibrate.py"))
    opened = calibration.Calibration(str(tmp_path))
    assert opened.tokens().shape == (2, 32)
    if math.isfinite(value):
        assert opened.layer(0)["value.raw"].equal(values)
        calibration.write_layer(str(tmp_path), 0, {"key.raw": grams, "value.raw": -values})
    with pytest.raises(UserError, match=f"layer-00000.safetensors: {message}"):
        opened.layer(0)


def test_a_directory_has_the_files_of_its_record_and_none_that_transformers_would_load_with_them(args):
    artifact = export(args)
    record = artifacts.read_record(str(artifact), EXPORT)
    assert record["files"].keys() == {"config.json", "weights", "step-1/shard", "README.md"}
    for harmless in (".metrics.jsonl.swp", ".cache/huggingface/x.json", "notes.txt", "README.md"):
        (artifact / harmless).parent.mkdir(parents=True, exist_ok=True)
        (artifact / harmless).write_text("anyone's")
    artifacts.verify_files(str(artifact), record)
    for name, damaged in (("config.json", None), ("weights", b"conten"), ("step-1/shard", b"!ontent")):
        path = artifact / name
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{name}: .*run 06_export.py again"):
            artifacts.verify_files(str(artifact), record)
        path.write_text("content")
    for name in ("model.safetensors", "config.py", "step-1/other.bin"):
        (artifact / name).write_text("mine")
        with pytest.raises(UserError, match=f"expected only the files in its stage.json, found also {name};"):
            artifacts.verify_files(str(artifact), record)
        (artifact / name).unlink()


def test_inputs_are_identified_by_content(args, tmp_path):
    path = similarity(args)
    record = {"stage": "07_eval.py", "inputs": artifacts.input_digests(str(tmp_path / "run"), [path])}
    assert list(record["inputs"]) == ["../a.safetensors"]
    artifacts.check_input(record, path)
    args.force = True
    similarity(args, 2.5)
    with pytest.raises(UserError, match=r"its inputs: ../a.safetensors\), found a different one; run 07"):
        artifacts.check_input(record, path)


WHAT_IS_MADE = pytest.mark.parametrize("make", [similarity, export])


@WHAT_IS_MADE
def test_the_same_command_with_the_same_inputs_is_complete(args, tmp_path, make):
    inputs = {"calibration": "ab" * 32}
    make(args, inputs=inputs)
    before = contents(tmp_path)
    args.calibration = "elsewhere"  # a place of an input, whose content counts
    with pytest.raises(Complete, match="complete, by this command and from these inputs"):
        make(args, inputs={"../moved/calibration": "ab" * 32})
    args.seed = 1
    with pytest.raises(UserError, match="already exists, made with --seed 0, not --seed 1; pass --force"):
        make(args, inputs=inputs)
    args.seed = 0
    with pytest.raises(UserError, match="already exists, made from another calibration; pass --force"):
        make(args, inputs={"calibration": "cd" * 32})
    assert contents(tmp_path) == before
    args.update = True  # for another command or input, as --force
    make(args, inputs={"calibration": "cd" * 32})
    args.force, args.update = True, False  # in any case
    make(args, inputs={"calibration": "cd" * 32})
    assert contents(tmp_path).keys() == before.keys()


@WHAT_IS_MADE
def test_an_edited_file_is_replaced_by_force_alone(args, tmp_path, make):
    make(args)
    edited = tmp_path / ("a.png" if make is similarity else "gqa/README.md")
    edited.write_text("edited")
    args.update = True
    with pytest.raises(UserError, match=f"{edited} was modified after 0.* wrote it; pass --force to replace"):
        make(args, inputs={"calibration": "cd" * 32})
    assert edited.read_text() == "edited"
    args.force = True
    make(args)
    assert edited.read_text() != "edited"


@pytest.mark.parametrize(("edited", "noticed"), [
    ("a card <!-- scores -->2<!-- /scores --> end", False),
    ("edited <!-- scores -->1<!-- /scores --> end", True),
    ("a card <!-- scores -->1<!-- /scores --> edited", True),
])
def test_an_edited_card_is_noticed_unless_scores_alone_changed(args, edited, noticed):
    card = export(args, "a card <!-- scores -->1<!-- /scores --> end") / "README.md"
    card.write_text(edited)
    with pytest.raises(UserError if noticed else Complete, match="was modified" if noticed else "complete"):
        export(args)


def test_without_known_inputs_nothing_is_complete(args, tmp_path):
    export(args)
    with pytest.raises(UserError, match="gqa already exists; pass --force to replace it"):
        artifacts.begin_stage(EXPORT, args, str(tmp_path / "gqa"))


@pytest.mark.parametrize(("make", "name"), [
    (similarity, "a.png"), (export, "gqa/.git/config"), (export, "gqa"),
])
def test_what_no_record_names_is_never_replaced(args, tmp_path, make, name):
    """Neither a user's files in a directory of ours nor a file in the place of ours."""
    foreign = tmp_path / name
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text("mine")
    before = contents(tmp_path)
    args.force = True
    with pytest.raises(UserError, match="what 0.* wrote, found a file that no record of it names; move"):
        make(args)
    assert contents(tmp_path) == before


def test_a_file_of_an_earlier_artifact_is_removed_unless_it_was_edited(args, tmp_path):
    """Two pictures that an earlier version of the stage drew, and the new one does not."""
    similarity(args)
    for name in ("old.png", "edited.png"):
        (tmp_path / name).write_text("picture")
    record = tmp_path / "a.json"
    named = json.loads(record.read_text())
    named["files"] |= dict.fromkeys(("old.png", "edited.png"), files.sha256(str(tmp_path / "old.png")))
    record.write_text(json.dumps(named))
    (tmp_path / "edited.png").write_text("mine")
    args.force = True
    similarity(args, 3.0)
    assert not (tmp_path / "old.png").exists() and (tmp_path / "edited.png").read_text() == "mine"


def test_inputs_of_one_name_are_told_apart_and_one_that_is_gone_is_missed(args):
    inputs = {"a/t.txt": "ab" * 32, "b/t.txt": "cd" * 32}
    similarity(args, inputs=inputs)
    for others, found in (
        ({"a/t.txt": "cd" * 32, "b/t.txt": "ab" * 32}, "made from another t.txt"),
        (inputs | {"b/t.txt": "ef" * 32}, "made from another t.txt"),
        (inputs | {"c/t.txt": "ef" * 32}, "made from another t.txt"),
        ({"a/t.txt": "ab" * 32}, "made from b/t.txt, which is gone"),
    ):
        with pytest.raises(UserError, match=f"already exists, {found}; pass --force"):
            similarity(args, inputs=others)
    with pytest.raises(Complete):
        similarity(args, inputs=inputs)


def test_a_run_that_has_moved_is_complete(args, tmp_path):
    args.run, args.text = str(tmp_path / "old"), [str(tmp_path / "old" / "train" / "heldout.npy"), "c4"]
    similarity(args)
    os.rename(tmp_path / "old", tmp_path / "new")
    args.run = str(tmp_path / "new")
    with pytest.raises(UserError, match="made with --text .*'RUN/train/heldout.npy', 'c4'"):
        similarity(args)
    args.text = [str(tmp_path / "new" / "train" / "heldout.npy"), "c4"]
    with pytest.raises(Complete):
        similarity(args)


def test_what_a_killed_run_left_is_replaced(args, tmp_path):
    """X.json alone, or aligned/ without merged/: the process was killed while they took their names."""
    similarity(args)
    os.remove(tmp_path / "a.safetensors")
    similarity(args)
    aligned, merged = str(tmp_path / "aligned"), str(tmp_path / "merged")
    started = artifacts.begin_stage("04_align.py", args, aligned, merged)
    with files.write_directory(aligned) as aside:
        artifacts.write_record(aside, started.record(SMALL_MODEL, valid_record("04_align.py")["summary"]))
    cli.cleanup.close()
    artifacts.begin_stage("04_align.py", args, aligned, merged)


def test_a_stage_does_not_replace_its_source(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="another directory than that of the source model"):
        artifacts.refuse_own_source({"path": str(tmp_path / "gqa")}, str(tmp_path / "link" / "gqa"))


@pytest.fixture
def claims(args, tmp_path):
    """The same, for a run directory that is not there yet."""
    args.run = str(tmp_path / "run")
    return args


@pytest.mark.parametrize(("running", "refused"), [
    ("05_prune_train.py", "05_prune_train.py"), ("04_align.py", "05_prune_train.py"),
    ("05_prune_train.py", "04_align.py"),
])
def test_a_stage_at_work_refuses_a_second_one_and_what_replaces_its_inputs(claims, monkeypatch, running,
                                                                           refused):
    artifacts.begin_stage(running, claims)
    found = f"expected no {running} running there, found process {os.getpid()} on .* since 20"
    with pytest.raises(UserError, match=found):
        artifacts.begin_stage(refused, claims)
    artifacts.begin_stage("06_export.py", claims)  # another stage
    artifacts.begin_stage(refused, SimpleNamespace(run=claims.run + "2", force=False))
    monkeypatch.setenv("RANK", "1")
    artifacts.begin_stage(refused, claims)  # the first rank holds the lock for all
    monkeypatch.delenv("RANK")
    cli.cleanup.close()
    assert not os.path.exists(claims.run)  # neither a lock nor an empty directory is left
    os.mkdir(claims.run)
    artifacts.begin_stage(refused, claims)
    cli.cleanup.close()
    assert os.listdir(claims.run) == []  # a directory that was there before stays


def test_calibration_runs_in_the_dtype_asked_for(inputs, tmp_path):
    """What a pass in bfloat16 leaves are numbers of bfloat16; in float32 they are not."""
    for dtype in ("float32", "bfloat16"):
        home = tmp_path / dtype
        run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs), "--dtype", dtype)
        sample = calibrated_layer(home / "calibration", 1)["sample.value"]
        assert sample.equal(sample.bfloat16().float()) == (dtype == "bfloat16")


@pytest.mark.slow
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
