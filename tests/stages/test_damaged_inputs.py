"""Whole stages on damaged or exchanged inputs, and on a full disk: one line, and nothing is lost."""

import resource
import shutil
import signal
from pathlib import Path

import pytest

from helpers import copy_run, expect_error, run


@pytest.fixture
def home(aligned_run, tmp_path) -> Path:
    return copy_run(aligned_run, tmp_path / "run")


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def replace(old: str, new: str):
    """A damage: the record says another thing."""

    def damage(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode())

    return damage


def refuse_each(home: Path, damages) -> None:
    """Damage one file after another (None: remove it), expect the command to refuse, repair it."""
    for file, damage, command, message in damages:
        path = home / file
        content = path.read_bytes()
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(content) if callable(damage) else damage)
        expect_error(message, command, "--run", home, "--force")
        path.write_bytes(content)


def test_stages_refuse_damaged_inputs(home):
    layer, not_recorded = "calibration/layer-00001.safetensors", "its content does not match"
    similarity, align, group = "02_similarity.py", "04_align.py", "03_group.py"
    four_heads = replace('"kv_heads": 8', '"kv_heads": 4')
    refuse_each(home, (
        (layer, (home / layer).read_bytes()[:-8], similarity, not_recorded),
        (layer, flip_last, align, not_recorded),
        (layer, None, similarity, "expected the file written by 01_calibrate.py, found none"),
        ("calibration/stage.json", four_heads, similarity, "of shape [10, 8, 8] for the model"),
        ("similarity.safetensors", flip_last, group, not_recorded),
        ("similarity.json", four_heads, group, "of shape [3, 4, 4], found [3, 8, 8]"),
        ("similarity.json", b"[]", group, "record: expected an object, found []"),
        ("groups.json", replace('"kv_heads": 2', '"kv_heads": 4'), align, "expected 4 groups of 2 heads"),
        ("groups.json", b"\xff", align, "groups.json: expected the record of 03_group.py"),
    ))
    assert not list(home.glob(".*.unfinished")) and not list(home.glob(".*.lock"))


@pytest.mark.parametrize("command", ["01_calibrate.py", "02_similarity.py", "04_align.py"])
def test_a_full_disk_is_one_line_and_keeps_what_there_was(home, inputs, command):
    """The kernel's refusal of large files, as safetensors and tokenizers report it."""
    arguments = []
    if command == "01_calibrate.py":
        arguments = ["--model", inputs["model"], "--text", inputs["text"], "--sequences", 8, "--length", 64]
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    words = [command, "--run", home, "--force", *arguments]
    for size in (2000, 5000):
        with_limit(size, lambda: expect_error("File too large", *words))
    whole = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".tmp"]
    assert {path: path.read_bytes() for path in whole} == before


def with_limit(size: int, action) -> None:
    """Call action while files of more than `size` bytes are refused, as all are on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        action()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_export_takes_only_the_chain_that_was_trained(finished_run, tmp_path):
    """Records and weights of train/ and aligned/, changed one after another; then a run directory with a glob
    in its name."""
    home = copy_run(finished_run, tmp_path / "run [1]*")
    step = max(path.name for path in (home / "train").glob("step-*"))
    not_recorded = "its content does not match its record"
    teacher = (home / "teacher/stage.json").read_bytes()
    another = replace('"seconds": ', '"seconds": 1')
    damages = (
        ("aligned/stage.json", another, "aligned: expected the artifact that"),
        ("merged/stage.json", another, "merged: expected the artifact that"),
        ("aligned/config.json", b"{}", not_recorded),
        ("train/stage.json", replace('"kv_heads": 2', '"kv_heads": 4'), "expected kv_heads 2 as in its"),
        ("train/stage.json", replace('"steps": 10', '"steps": 9'), "expected steps 10 as in its settings"),
        ("train/stage.json", teacher, "expected a trained student, found a teacher"),
        (f"train/{step}/shard-00001-model-00002-of-00004.safetensors", flip_last, not_recorded),
        ("train/stage.json", replace('"clip": 1.0', '"clip": 2.0'), "expected clip 1.0 as in its settings"),
        ("train/metrics.jsonl", None, "metrics.jsonl: expected the file written by 05_prune_train.py"),
    )
    refuse_each(home, [(file, damage, "06_export.py", message) for file, damage, message in damages])
    shutil.copy(home / "teacher" / "model.safetensors", home / "merged" / "other.safetensors")
    expect_error("found also other.safetensors; remove it", "07_eval.py", "--run", home, "--force")
    (home / "merged" / "other.safetensors").unlink()
    with_limit(5000, lambda: expect_error("File too large", "06_export.py", "--run", home, "--force"))
    run("06_export.py", "--run", home, "--force")
    for name in ("config.json", *(path.name for path in (finished_run / "gqa").glob("*.safetensors*"))):
        assert (home / "gqa" / name).read_bytes() == (finished_run / "gqa" / name).read_bytes()
    shutil.move(home / "gqa", home / "moved")
    (home / "gqa").symlink_to(home / "moved")
    expect_error("gqa: expected nothing or what 06_export.py wrote, found a symbolic link",
                 "06_export.py", "--run", home, "--force")
