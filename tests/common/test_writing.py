"""Files and directories are written whole or not at all, and only our own are replaced."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common import artifacts, files
from common.errors import UserError
from runs import contents, valid_record


def write(path: Path, text: str, record: bool = True) -> None:
    with files.write_directory(str(path)) as aside:
        Path(aside, "file").write_text(text)
        if record:
            artifacts.write_record(aside, valid_record("06_export.py"))


def test_a_replaced_directory_loses_only_the_files_that_its_record_names(tmp_path):
    path, old = tmp_path / "gqa", tmp_path / "gqa.old-1"
    old.mkdir()
    (old / "mine").write_text("mine")
    write(path, "first")
    write(path, "second")
    assert (path / "file").read_text() == "second" and contents(old) == {"mine": "mine"}
    (path / "notes").write_text("mine")
    write(path, "without a record", record=False)
    assert contents(tmp_path / "gqa.old-2") == {"notes": "mine"}
    write(path, "fourth")
    assert contents(tmp_path / "gqa.old-3") == {"file": "without a record"}
    assert sorted(os.listdir(tmp_path)) == ["gqa", "gqa.old-1", "gqa.old-2", "gqa.old-3"]


def test_a_failed_replacement_leaves_the_previous_directory(tmp_path, monkeypatch):
    path, rename = tmp_path / "gqa", os.rename
    write(path, "first", record=False)

    def refuse(source, target):
        if source.endswith("/gqa") and ".unfinished" in source:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(KeyboardInterrupt):
        write(path, "second", record=False)
    assert contents(tmp_path) == {"gqa/file": "first"}


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


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    """Nor what has such a name but is not ours; that of ours cannot be guessed."""
    path = str(tmp_path / "gqa")
    for name in (".gqa.mine.unfinished", ".gqa2.x.unfinished"):  # not of ours; of another output
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    assert killed_at_rename(0, lambda: write(tmp_path / "gqa", "half of them", record=False))
    assert len(list(tmp_path.iterdir())) == 3
    with files.write_directory(path) as first:
        assert len(list(tmp_path.iterdir())) == 3  # the killed one's is gone
        with files.unfinished(path):
            Path(first, "file").write_text("alive")
    assert contents(tmp_path) == {"gqa/file": "alive", ".gqa.mine.unfinished/file": "mine",
                                  ".gqa2.x.unfinished/file": "mine"}


def test_a_directory_killed_at_any_rename_is_the_old_one_or_the_new_one(tmp_path):
    path, number = tmp_path / "gqa", 0
    write(path, "old")
    (path / "notes").write_text("mine")
    while killed_at_rename(number, lambda: write(path, "new")):
        files.sweep(str(tmp_path))  # as the next stage in this directory does
        found = contents(tmp_path)
        expected = ("old", "gqa/notes") if number < 3 else ("new", "gqa.old-1/notes")
        assert len(found) == 3 and (found["gqa/file"], found.get(expected[1])) == (expected[0], "mine")
        number += 1
    assert number == 4  # the record, the old one's, the new one's, what is kept of the old one
    assert contents(tmp_path) == {"gqa/file": "new", "gqa/stage.json": (path / "stage.json").read_text(),
                                  "gqa.old-1/notes": "mine"}


def beside(path: Path, text: str) -> None:
    with artifacts.write_beside(str(path)) as aside:
        for name in ("x.safetensors", "x.png"):
            Path(aside, name).write_text(text)
        artifacts.write_record(aside, valid_record("02_similarity.py"), "x.json")


def test_files_next_to_each_other_killed_at_any_rename_are_the_old_ones_or_the_new_ones(tmp_path):
    path, number = tmp_path / "x.json", 0
    beside(path, "old")
    while killed_at_rename(number, lambda: beside(path, "new")):
        files.sweep(str(tmp_path))
        found = contents(tmp_path)
        record = found.pop("x.json")
        assert set(found.values()) == {"old" if number < 2 else "new"} and len(found) == 2
        assert artifacts.find_fault_of_files(str(path)) is None, record
        beside(path, "old")
        number += 1
    assert number == 4


def test_errors_of_descriptors_name_the_file(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device")
    (tmp_path / "x").write_text("mine")
    with pytest.raises(UserError, match=f"{tmp_path}/x: cannot be written: .*No space left"):
        with files.write_file(str(tmp_path / "x")):
            raise error
    assert (tmp_path / "x").read_text() == "mine"  # what was complete is intact
    with pytest.raises(UserError, match=f"{tmp_path}/x: cannot be read: .*No space left"):
        with files.open_text(str(tmp_path / "x")):
            raise error


def test_a_file_that_fails_leaves_nothing(tmp_path):
    for name in ("x.json", "empty"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="x.json: cannot be written: .*Is a directory"):
        files.write_json(str(tmp_path / "x.json"), {})
    for home in ("new", "empty"):
        with pytest.raises(UserError), files.write_file(str(tmp_path / home / "file")):
            raise UserError("bad input")
    assert sorted(os.listdir(tmp_path)) == ["empty", "x.json"]
    assert not os.listdir(tmp_path / "empty") and not os.listdir(tmp_path / "x.json")


def test_files_get_the_permissions_of_the_umask(tmp_path):
    """Also those that safetensors writes, with 0600."""
    before = os.umask(0o027)
    try:
        with files.write_directory(str(tmp_path / "run" / "gqa")) as aside:
            os.mkdir(os.path.join(aside, "folder"))
            save_file({"a": torch.zeros(1)}, os.path.join(aside, "folder", "weights"))
            artifacts.write_record(aside, valid_record("06_export.py"))
        with artifacts.write_beside(str(tmp_path / "run" / "x.json")) as aside:
            save_file({"a": torch.zeros(1)}, os.path.join(aside, "x.safetensors"))
            artifacts.write_record(aside, valid_record("02_similarity.py"), "x.json")
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) == 4 and {path.stat().st_mode & 0o777 for path in written} == {0o640}
