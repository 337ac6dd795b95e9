"""Stage 4, stopped: nothing mixed is left, and the same command goes on where its refit was."""

import os
import shutil
from pathlib import Path

import pytest

from common.models import refit as refitting
from common.run.artifact import check_input, read_record
from common.run.errors import UserError
from runs import checkpoint_digests, copy_run, read, run, run_in_process

REFIT = ["--merge", "closed-form", "--refit", "attention", "--refit-sequences", 6]
RENAMES = 13  # a record and a directory for aligned/ and three layers, aligned/, and again two of each


@pytest.fixture(scope="module")
def refitted_run(aligned_run, tmp_path_factory) -> Path:
    home = copy_run(aligned_run, tmp_path_factory.mktemp("refitted") / "run")
    run("04_align.py", "--run", home, "--force", *REFIT)
    return home


def stopped(home: Path, rename: int, flags: list, killed: bool = False) -> bool:
    """Whether stage 4 gets as far as rename `rename`, where it is interrupted.

    killed: then it leaves what it was writing.
    """
    left, real = [rename], os.rename

    def counted(source, destination):
        left[0] -= 1
        if not left[0]:
            if killed:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            raise KeyboardInterrupt
        real(source, destination)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", counted)
        done = run_in_process("04_align.py", ["--run", str(home), *map(str, flags)])
    assert done.returncode == (130 if left[0] <= 0 else 0)
    return left[0] <= 0


def without_outputs(home: Path, target: Path) -> Path:
    """A copy of a run directory before stage 4."""
    copy_run(home, target)
    for name in ("aligned", "merged"):
        shutil.rmtree(target / name)
    return target


def require_same(home: Path, expected: Path) -> None:
    """Everything stage 4 wrote is the same, but for times, and nothing else is left."""
    assert {*os.listdir(home)} == {*os.listdir(expected)}
    assert checkpoint_digests(home) == checkpoint_digests(expected)
    for name in ("aligned", "merged"):
        ours, theirs = (read(path / name / "stage.json") for path in (home, expected))
        for record in (ours, theirs):
            record["summary"].pop("peak_memory_gib")
        assert all(ours[part] == theirs[part] for part in ("summary", "flags", "groups"))
    check_input(read_record(str(home / "merged"), "04_align.py"), str(home / "aligned"))


@pytest.fixture
def refits(monkeypatch) -> list:
    """The layers that are refitted."""
    calls, layer = [], refitting.Refit.layer
    monkeypatch.setattr(refitting.Refit, "layer", lambda *call: calls.append(call) or layer(*call))
    return calls


@pytest.mark.parametrize("rename", [6, 7, 8])
def test_an_interrupted_force_leaves_no_mixed_pair_unnoticed(aligned_run, tmp_path, rename):
    """At the renames of aligned/ and merged/, from the name and to it: the old pair, or one that differs."""
    home = copy_run(aligned_run, tmp_path / "run")
    assert stopped(home, rename, ["--rotate", "none", "--force"])
    if rename < 8:
        assert checkpoint_digests(home) == checkpoint_digests(aligned_run)
    else:
        with pytest.raises(UserError, match="expected the artifact that 04_align.py read"):
            check_input(read_record(str(home / "merged"), "04_align.py"), str(home / "aligned"))


@pytest.mark.slow
@pytest.mark.parametrize("rename", range(1, RENAMES + 2))
def test_killed_at_any_rename_it_goes_on_to_the_same_bytes(refitted_run, tmp_path, refits, rename):
    """What has its record is complete, though its directory has no name yet: aligned/, then each layer."""
    home = without_outputs(refitted_run, tmp_path / "run")
    assert stopped(home, rename, REFIT, killed=True) == (rename <= RENAMES)
    refits.clear()
    printed = run("04_align.py", "--run", home, *REFIT).stdout
    assert len(refits) == 3 - min(max(rename // 2 - 1, 0), 3)
    assert ("checked before this command was stopped" in printed) == (1 < rename < 9)
    require_same(home, refitted_run)


@pytest.mark.slow
def test_what_another_command_left_is_neither_used_nor_kept(refitted_run, tmp_path, refits):
    home = without_outputs(refitted_run, tmp_path / "run")
    assert stopped(home, 6, REFIT, killed=True)
    refits.clear()
    run("04_align.py", "--run", home, *REFIT, "--rotate", "cos")
    assert len(refits) == 3 and not (home / "align.partial").exists()
