"""Artifacts come back as written, or are refused; a stage makes each once; what was complete is intact."""

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from common.run import artifact, errors, files
from common.run.errors import Complete, UserError
from runs import SMALL_MODEL, contents, valid_record

EXPORT, GROUP, TRAINING = "06_export.py", "03_group.py", "05_prune_train.py"


@pytest.fixture
def args(tmp_path):
    yield SimpleNamespace(run=str(tmp_path / "run"), seed=0, calibration=None, force=False, update=False)
    errors.cleanup.close()


def make(args, content: str = "content", inputs: dict | None = None, stage: str = EXPORT) -> Path:
    """A stage in small: RUN/gqa/ with three files, one of them in a part, and a card."""
    path = Path(args.run, "gqa")
    with errors.cleanup:
        started = artifact.begin_stage(stage, args, str(path), inputs=inputs or {})
        with artifact.write_directory(str(path)) as aside:
            save_file({"x": torch.full((100,), 2.0)}, os.path.join(aside, "weights.safetensors"))
            Path(aside, "config.json").write_text(content)
            Path(aside, "README.md").write_text("card")
            os.mkdir(os.path.join(aside, "step-1"))
            Path(aside, "step-1", "shard").write_text("shard")
            files.write_json(os.path.join(aside, "step-1", "stage.json"), {"files": {"shard": {"size": 5}}})
            artifact.write_record(aside, started.record(SMALL_MODEL, valid_record(stage)["summary"]))
    return path


def test_the_record_says_what_made_an_artifact_and_reading_gives_back_what_was_written(args):
    path = make(args, inputs={"RUN/merged": "ab" * 32})
    record = artifact.read_record(str(path), EXPORT, SMALL_MODEL)
    assert record["flags"] == {"seed": 0} and record["inputs"] == {"RUN/merged": "ab" * 32}
    assert record["model"] == SMALL_MODEL and set(record["packages"]) == set(artifact.PACKAGES)
    assert record["files"].keys() == {"weights.safetensors", "config.json", "README.md", "step-1/stage.json"}
    status = os.stat(path / "config.json")
    assert record["files"]["config.json"] == {"size": 7, "time": status.st_mtime_ns,
                                              "sha256": files.sha256(str(path / "config.json"))}
    tensors = artifact.read_tensors(str(path), "weights.safetensors", record)
    assert torch.equal(tensors["x"], torch.full((100,), 2.0))


def test_the_commit_is_that_of_this_source_and_says_if_it_was_edited(tmp_path, monkeypatch):
    source = tmp_path / "source"

    def git(*command):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *command], cwd=source, capture_output=True, check=True)
        return done.stdout.decode().strip()

    (source / "common" / "run").mkdir(parents=True)
    (source / "file").write_text("first")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(artifact, "__file__", str(source / "common" / "run" / "artifact.py"))
    assert artifact.source_commit() == git("rev-parse", "HEAD")
    (source / "file").write_text("edited")
    assert artifact.source_commit() == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "")  # without git
    assert artifact.source_commit() is None


@pytest.mark.parametrize(("record", "message"), [
    (valid_record(EXPORT) | {"format": 0}, "found none that this version can read"),
    (valid_record(GROUP), "expected an artifact of 06_export.py, found one of 03_group.py"),
])
def test_another_record_is_refused(tmp_path, record, message):
    files.write_json(str(tmp_path / "a" / "stage.json"), record)
    with pytest.raises(UserError, match=message):
        artifact.read_record(str(tmp_path / "a"), EXPORT, SMALL_MODEL)


def test_files_are_those_of_the_record(args):
    path = make(args)
    record = artifact.read_record(str(path), EXPORT)
    (path / "notes.txt").write_text("anyone's")
    (path / "README.md").write_text("stage 7 writes its scores here")
    os.utime(path / "config.json")  # a copy: its sha256 decides
    artifact.verify_files(str(path), record)
    for name, damaged in (("config.json", None), ("config.json", b"conten"), ("config.json", b"!ontent"),
                          ("step-1/shard", b"shar")):
        content = (path / name).read_bytes()
        (path / name).unlink() if damaged is None else (path / name).write_bytes(damaged)
        with pytest.raises(UserError, match=f"{name} is .*; run 06_export.py again with --force"):
            artifact.verify_files(str(path), record)
        (path / name).write_bytes(content)


def test_the_same_command_with_the_same_inputs_is_complete(args):
    inputs = {"RUN/calibration": "ab" * 32}
    make(args, inputs=inputs)
    before = contents(args.run)
    args.calibration = "elsewhere"  # a place of an input, whose content counts
    with pytest.raises(Complete, match="complete, by this command and from these inputs"):
        make(args, inputs={"../moved": "ab" * 32})
    for change, others, message in (
        ({"seed": 1}, inputs, "already exists, made with --seed 0, not --seed 1; pass --force"),
        ({}, {"RUN/calibration": "cd" * 32}, "already exists, made from another calibration; pass --force"),
    ):
        with pytest.raises(UserError, match=message):
            make(SimpleNamespace(**vars(args) | change), inputs=others)
    assert contents(args.run) == before
    args.update = True  # for another command or input, as --force
    make(args, "updated", {"RUN/calibration": "cd" * 32})
    args.force, args.update = True, False  # in any case
    make(args, "forced", {"RUN/calibration": "cd" * 32})
    assert contents(args.run).keys() == before.keys()


def test_a_run_that_has_moved_is_complete_and_its_record_is_of_where_it_is(args, tmp_path):
    args.text = [os.path.join(args.run, "train", "heldout.npy"), "c4"]
    make(args)
    moved = tmp_path / "moved"
    os.rename(args.run, moved)
    args.run = str(moved)
    with pytest.raises(UserError, match="made with --text .*'RUN/train/heldout.npy', 'c4'"):
        make(args)
    args.text = [str(moved / "train" / "heldout.npy"), "c4"]
    with pytest.raises(Complete):
        make(args)
    assert artifact.read_record(str(moved / "gqa"), EXPORT)["arguments"]["text"] == args.text


@pytest.mark.parametrize(("stage", "change", "kept"), [
    (EXPORT, None, False), (EXPORT, "README.md", False), (EXPORT, "notes", True),
    (EXPORT, "step-1/shard", True), (GROUP, None, True), (TRAINING, None, True),
])
def test_force_removes_what_can_be_made_again_and_moves_the_rest(args, stage, change, kept, capsys):
    """An edited file, one of a user's own, groups, a training."""
    path = make(args, stage=stage)
    if change:
        (path / change).write_text("mine, edited")
    before, args.force = contents(path), True
    make(args, "second", stage=stage)
    assert (path / "config.json").read_text() == "second"
    assert sorted(os.listdir(args.run)) == ["gqa", *["gqa.old-1"] * kept]
    if kept:
        assert contents(f"{path}.old-1") == before and "moved   " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gqa", "gqa/notes"])
def test_what_no_stage_has_written_is_neither_replaced_nor_moved(args, name):
    path = Path(args.run, name)
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    args.force = True
    with pytest.raises(UserError, match="expected nothing or what 06_export.py wrote, found something else;"):
        make(args)
    assert contents(args.run) == {name: "mine"}


def killed_at_rename(number: int, work) -> bool:
    """Whether work() was killed at its `number`-th rename, from 0; else it has fewer."""
    child = os.fork()
    if not child:
        rename, left = os.rename, iter(range(number))

        def rename_or_die(source, target):
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        os.rename = rename_or_die
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.parametrize("notes", [False, True])
def test_killed_at_any_rename_an_artifact_is_the_old_one_or_the_new_one(args, notes):
    """What is left is finished or removed when the stage begins again; a user's file is never lost."""
    path, number, seen = make(args, "old"), 0, []
    forced = SimpleNamespace(**vars(args) | {"force": True})
    if notes:
        (path / "notes").write_text("mine")
    while killed_at_rename(number, lambda: make(forced, "new")):
        artifact.sweep(args.run)
        seen.append((path / "config.json").read_text())
        assert not [name for name in os.listdir(args.run) if name.endswith((".unfinished", ".removed"))]
        assert [*Path(args.run).rglob("notes")] == [path / "notes"] * (notes and seen[-1] == "old") + [
            Path(f"{path}.old-1", "notes")] * (notes and seen[-1] == "new")
        number += 1
    assert seen == ["old", "old", "new", "new"]  # the part's record, its own, the old one's name, its own
    assert (path / "config.json").read_text() == "new"


def test_what_a_killed_process_left_is_removed_and_what_others_write_is_not(args):
    other = Path(args.run, ".merged.1-0.unfinished")  # of another stage, whose lock is not held
    other.mkdir(parents=True)
    assert killed_at_rename(0, lambda: make(args))
    (left,) = Path(args.run).glob(".gqa.*")
    make(args)
    assert not left.exists() and other.exists()


def test_a_failure_leaves_the_earlier_artifact_and_says_where(args):
    path = make(args)
    before, aside = contents(args.run), artifact.beside(str(path))
    for error, message in ((UserError(f"{aside}/weights: bad"), f"^{path}/weights: bad"),
                           (OSError(28, "No space left on device", f"{aside}/weights"),
                            f"^{path}: cannot be written: .*No space left on device: '{path}/weights'")):
        with pytest.raises(UserError, match=message), artifact.write_directory(str(path)):
            raise error
    with pytest.raises(KeyboardInterrupt), artifact.write_directory(str(path)):
        raise KeyboardInterrupt
    assert contents(args.run) == before


def test_parts_are_found_by_the_command_that_made_them_alone(tmp_path):
    home, fills = str(tmp_path / "parts"), []

    def fill(directory):
        fills.append(directory)
        Path(directory, "weights").write_text("abc")
        return {"loss": 0.5}

    parts = artifact.Parts(home, {"stage": "s", "flags": {"a": [1]}})
    made = parts.add("layer", fill)
    assert made == (os.path.join(home, "layer"), {"loss": 0.5})
    assert artifact.Parts(home, {"flags": {"a": [1]}, "stage": "s"}).find("layer") == made
    Path(home, "layer", "weights").write_text("ab")
    assert parts.find("layer") is None and parts.find("other") is None
    parts.add("layer", fill)
    artifact.Parts(home, {"stage": "s", "flags": {"a": [2]}})
    assert not os.listdir(home) and len(fills) == 2


@pytest.mark.parametrize(("running", "refused"), [
    (TRAINING, TRAINING), ("04_align.py", TRAINING), (TRAINING, "04_align.py"),
])
def test_a_stage_refuses_a_second_one_and_what_replaces_its_inputs(args, monkeypatch, running, refused):
    artifact.begin_stage(running, args)
    found = f"expected no {running} running there, found process {os.getpid()} on "
    with pytest.raises(UserError, match=found):
        artifact.begin_stage(refused, args)
    artifact.begin_stage(EXPORT, args)  # another stage
    artifact.begin_stage(refused, SimpleNamespace(run=args.run + "2"))
    monkeypatch.setenv("RANK", "1")
    artifact.begin_stage(refused, args)  # the first rank holds the lock for all
    monkeypatch.delenv("RANK")
    errors.cleanup.close()
    assert not os.path.exists(args.run)  # neither a lock nor an empty directory is left


def test_a_file_system_without_locks_is_a_warning(args, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    artifact.begin_stage(EXPORT, args)
    assert "has no locks: nothing stops a second 06_export.py there" in capsys.readouterr().err


def test_a_stage_does_not_replace_its_source(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="another directory than that of the source model"):
        artifact.refuse_own_source({"path": str(tmp_path / "gqa")}, str(tmp_path / "link" / "gqa"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "home" / "x"
    files.write_text(str(path), "first")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises((UserError, KeyboardInterrupt)), files.write_file(str(path)) as file:
            file.write(b"half")
            raise error
    assert contents(tmp_path) == {"home/x": "first"}
