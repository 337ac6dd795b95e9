"""Artifacts on disk: verified by content, replaced whole or not at all, by one process at a time."""

import contextlib
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from common import artifacts, cli, files
from common.cli import UserError
from test_records import valid


@pytest.fixture
def artifact(tmp_path) -> str:
    """A directory artifact with three files, one of them in a folder."""
    with files.write_directory(str(tmp_path / "gqa")) as aside:
        for name in ("config.json", "weights", "step-1/shard"):
            os.makedirs(os.path.dirname(os.path.join(aside, name)), exist_ok=True)
            Path(aside, name).write_bytes(name.encode() * 100)
        artifacts.write_record(aside, valid("06_export.py"))
    return str(tmp_path / "gqa")


def test_files_are_verified_by_content(artifact):
    record = artifacts.read_record(artifact, "06_export.py")
    assert record["files"].keys() == {"config.json", "weights", "step-1/shard"}
    Path(artifact, "README.md").write_text("added later")
    artifacts.verify_files(artifact, record)
    for name in record["files"]:
        path, content = Path(artifact, name), Path(artifact, name).read_bytes()
        for damaged in (content[:-1], b"", content[:50] + b"!" + content[51:], content + b" ", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(UserError, match=f"{name}: .*06_export.py|{name}: .*run it again"):
                artifacts.verify_files(artifact, record)
            path.write_bytes(content)
    artifacts.verify_files(artifact, record)


@pytest.mark.parametrize("name", ["model.safetensors", "config.py", "step-1/other", "notes/README.md"])
def test_files_that_the_record_does_not_name_are_refused(artifact, name):
    record = artifacts.read_record(artifact, "06_export.py")
    for harmless in (".DS_Store", ".cache/huggingface/README.md"):
        Path(artifact, harmless).parent.mkdir(parents=True, exist_ok=True)
        Path(artifact, harmless).write_text("anyone's")
    artifacts.verify_files(artifact, record)
    Path(artifact, name).parent.mkdir(exist_ok=True)
    Path(artifact, name).write_text("mine")
    with pytest.raises(UserError, match=f"expected only the files in its stage.json, found also {name}; rem"):
        artifacts.verify_files(artifact, record)


def test_inputs_are_identified_by_content(artifact, tmp_path):
    record = {"stage": "07_eval.py", "inputs": artifacts.input_digests(str(tmp_path / "run"), [artifact])}
    assert list(record["inputs"]) == ["../gqa"]
    os.rename(artifact, tmp_path / "moved")
    artifacts.check_input(record, str(tmp_path / "moved"))  # a moved artifact is the same one
    artifacts.write_record(str(tmp_path / "moved"), valid("06_export.py") | {"seconds": 2.0})
    with pytest.raises(UserError, match=r"moved: expected the artifact that 07_eval.py read"):
        artifacts.check_input(record, str(tmp_path / "moved"))


def content(path) -> dict[str, str]:
    return {file.name: file.read_text() for file in Path(path).iterdir()}


def test_only_what_this_call_moved_is_removed(tmp_path):
    path = tmp_path / "gqa"
    for name in ("gqa.old", "gqa.old-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text(name)
    (tmp_path / "gqa.old-2").symlink_to("nowhere")
    for text in ("first", "second"):
        with files.write_directory(str(path)) as aside:
            Path(aside, "file").write_text(text)
        assert content(path) == {"file": text}
    for name in ("gqa.old", "gqa.old-1"):
        assert content(tmp_path / name) == {"mine": name}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gqa", "gqa.old", "gqa.old-1", "gqa.old-2"]
    assert files.move_aside(str(path)) == f"{path}.old-3" and files.move_aside(str(path)) is None
    assert content(tmp_path / "gqa.old-3") == {"file": "second"}


@pytest.mark.parametrize("moment", ["in the block", "before the rename"])
def test_a_failed_replacement_leaves_the_previous_directory(tmp_path, monkeypatch, moment):
    path, rename = tmp_path / "gqa", os.rename
    with files.write_directory(str(path)) as aside:
        Path(aside, "file").write_text("first")

    def refuse(source, target):
        if source.endswith(".tmp"):
            raise KeyboardInterrupt
        rename(source, target)

    with pytest.raises(KeyboardInterrupt):
        with files.write_directory(str(path)) as aside:
            Path(aside, "file").write_text("second")
            if moment == "in the block":
                raise KeyboardInterrupt
            monkeypatch.setattr(os, "rename", refuse)
    assert content(path) == {"file": "first"}


def test_a_link_or_a_file_is_never_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("mine")
    for name, kind in (("link", "a symbolic link"), ("dangling", "a symbolic link"), ("file", "a file")):
        with pytest.raises(UserError, match=f"expected nothing or a directory, found {kind}"):
            with files.write_directory(str(tmp_path / name)):
                pass
        args = SimpleNamespace(run=str(tmp_path), force=name != "file")
        with pytest.raises(UserError, match="found a symbolic link|pass --force"):
            artifacts.claim("06_export.py", args, str(tmp_path / name))
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "link").is_symlink()


def test_tensors_get_their_name_after_their_record(tmp_path, monkeypatch):
    present, write = [], artifacts.write_json

    def note(path, record):
        present.append((tmp_path / "x.safetensors").exists())
        write(path, record)

    monkeypatch.setattr(artifacts, "write_json", note)
    artifacts.write_tensors(str(tmp_path / "x.safetensors"), {"a": torch.zeros(1)}, {})
    assert present == [False]
    written = json.loads((tmp_path / "x.json").read_text())
    assert written == {"sha256": files.sha256(str(tmp_path / "x.safetensors"))}


def test_a_file_that_cannot_take_its_name_leaves_nothing(tmp_path):
    for name in ("x.json", "x.safetensors"):
        (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError):
        files.write_json(str(tmp_path / "x.json"), {})
    with pytest.raises(IsADirectoryError):
        artifacts.write_tensors(str(tmp_path / "x.safetensors"), {"a": torch.zeros(1)}, {})
    assert sorted(os.listdir(tmp_path)) == ["x.json", "x.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_get_the_permissions_of_the_umask(tmp_path, umask):
    """Also those that safetensors writes, with 0600."""
    before = os.umask(umask)
    try:
        with files.write_directory(str(tmp_path / "run" / "gqa")) as aside:
            save_file({"a": torch.zeros(1)}, os.path.join(aside, "weights"))
            os.mkdir(os.path.join(aside, "folder"))
            save_file({"a": torch.zeros(1)}, os.path.join(aside, "folder", "weights"))
            artifacts.write_record(aside, valid("06_export.py"))
        artifacts.write_tensors(str(tmp_path / "run" / "x.safetensors"), {"a": torch.zeros(1)}, {})
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) == 5 and {path.stat().st_mode & 0o777 for path in written} == {0o666 & ~umask}


def test_overwriting_needs_force(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("mine")
    files.refuse_overwrite(str(path), force=True)
    files.refuse_overwrite(str(tmp_path / "other.json"), force=False)
    with pytest.raises(UserError, match="record.json already exists; pass --force"):
        files.refuse_overwrite(str(path), force=False)


@pytest.fixture
def claims(tmp_path):
    yield SimpleNamespace(run=str(tmp_path / "run"), force=False)
    cli.cleanup.close()


def test_a_stage_at_work_refuses_a_second_one(claims, monkeypatch):
    artifacts.claim("05_prune_train.py", claims)
    with pytest.raises(UserError) as refused:
        artifacts.claim("05_prune_train.py", claims)
    message = str(refused.value)
    assert f"expected no 05_prune_train.py running there, found process {os.getpid()} on " in message
    assert " since 20" in message
    artifacts.claim("06_export.py", claims)  # another stage
    other_run = SimpleNamespace(run=claims.run + "2", force=False)
    artifacts.claim("05_prune_train.py", other_run)
    monkeypatch.setenv("RANK", "1")
    artifacts.claim("05_prune_train.py", claims)  # the first rank holds the lock for all
    monkeypatch.delenv("RANK")
    cli.cleanup.close()
    assert not os.path.exists(claims.run)  # neither a lock nor an empty directory is left
    artifacts.claim("05_prune_train.py", claims)


@pytest.mark.parametrize("first, second", [("04_align.py", "05_prune_train.py"),
                                           ("05_prune_train.py", "04_align.py")])
def test_what_training_reads_is_not_replaced_meanwhile(claims, first, second):
    artifacts.claim(first, claims)
    with pytest.raises(UserError, match=f"no {first} running there, found process {os.getpid()} on "):
        artifacts.claim(second, claims)
    cli.cleanup.close()
    artifacts.claim(second, claims)
    artifacts.claim("03_group.py", claims)
    cli.cleanup.close()
    assert not os.path.exists(claims.run)


def test_what_a_killed_run_left_is_replaced(claims, tmp_path):
    """An artifact without the stage's last one is; a file or directory of the user's is not."""
    aligned, merged = tmp_path / "run" / "aligned", tmp_path / "run" / "merged"
    aligned.mkdir(parents=True)
    for changes, refused in ((lambda: None, True), ((aligned / "stage.json").touch, False),
                             (lambda: (merged.mkdir(), (merged / "stage.json").touch()), True)):
        changes()
        with pytest.raises(UserError, match="already exists") if refused else contextlib.nullcontext():
            artifacts.claim("04_align.py", claims, str(aligned), str(merged))


def test_an_empty_run_directory_that_existed_before_stays(claims):
    os.mkdir(claims.run)
    artifacts.claim("05_prune_train.py", claims)
    cli.cleanup.close()
    assert os.listdir(claims.run) == []


def test_a_killed_process_blocks_nobody(claims):
    child = os.fork()
    if not child:
        artifacts.claim("05_prune_train.py", claims)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.listdir(claims.run) == [".05_prune_train.lock"]
    artifacts.claim("05_prune_train.py", claims)


def test_a_live_process_is_named(claims):
    ready, leave = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(leave[1])  # so that the read below ends with the parent, whatever becomes of it
        artifacts.claim("01_calibrate.py", claims)
        os.write(ready[1], b"x")
        os.read(leave[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(UserError, match=f"found process {child} on "):
            artifacts.claim("01_calibrate.py", claims)
    finally:
        os.close(leave[1])
        os.waitpid(child, 0)
