"""Mistakes in flags, damaged or exchanged inputs, a full disk: one line, and nothing is lost."""

import json
import shutil
from pathlib import Path

import pytest

from runs import (
    SMALL_MODEL,
    STAGES,
    TRAINING,
    calibrate_arguments,
    copy_run,
    evaluate_arguments,
    expect_error,
    full_disk,
)

NOT_RECORDED = "is not as it was written (truncated or modified)"


@pytest.fixture(scope="module")
def home(finished_run, tmp_path_factory) -> Path:
    """A finished run, in a directory whose name is a pattern of glob. Tests leave it as it was."""
    return copy_run(finished_run, tmp_path_factory.mktemp("mistakes") / "run [1]*")


def times(home: Path) -> dict[Path, int]:
    """When each file was written."""
    return {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}


def words_of(command: str, home: Path, inputs: dict[str, str]) -> list:
    """The command line of a stage's number and flags, after the flags that it needs. RUN stands for home."""
    number, *flags = command.split()
    needed = {"01": calibrate_arguments(inputs), "05": ["--tasks", inputs["tasks"], *TRAINING],
              "07": evaluate_arguments(inputs)}
    flags = [flag.replace("RUN", str(home)) for flag in flags]
    return [STAGES[number], "--run", home, *needed.get(number, []), *flags]


@pytest.mark.parametrize(("command", "message"), [
    ("01 --force --model no/such-model", "neither a directory nor a hub repository"),
    ("01 --force --sequences 4000", "expected 4000 x 64 = 256000 tokens in its training part, found"),
    ("02 --run RUN/nowhere", "calibration not found; run 01_calibrate.py first"),
    ("03 --force --kv-heads 3", "kv heads: expected one of [1, 2, 4] for 8 key/value heads, found 3"),
    ("04 --force --key-context 20", "--key-context: expected --merge closed-form with it, found mean"),
    ("05 --lr 2e-3", "lr 0.001 -> 0.002"),
    ("05 --teacher-lr 2e-3", "/teacher was trained with other settings (lr 0.001 -> 0.002"),
    ("05 --teacher RUN/train", "--teacher: expected another directory than the student's"),
    ("07 --force --register no.such_module", "--register no.such_module: cannot be imported"),
])
def test_flags_that_do_not_fit_are_refused_before_anything_is_written(home, inputs, command, message):
    before = times(home)
    expect_error(message, *words_of(command, home, inputs))
    assert times(home) == before


def cut(content: bytes) -> bytes:
    return content[:-8]


def longer(content: bytes) -> bytes:
    return content + b"\n"


def edited(**fields):
    """A record with other fields."""
    return lambda content: json.dumps(json.loads(content) | fields).encode()


@pytest.mark.parametrize(("command", "file", "damage", "message"), [
    ("02 --force", "calibration/layer-00001.safetensors", cut, NOT_RECORDED),
    ("04 --force", "groups/stage.json", cut, "groups/stage.json: expected the record of 03_group.py"),
    ("04 --force", "groups/stage.json", edited(model=SMALL_MODEL), "expected an artifact of model"),
    ("04 --force", "groups/stage.json", edited(groups=[[[0, 1, 2, 3]] * 2] * 3),
     "groups[0]: expected 2 equal groups of heads, each of"),
    ("04 --force", "calibration/stage.json", longer, "groups: expected groups of heads in "),
    ("05", "aligned/model.safetensors", cut, NOT_RECORDED),
    ("05 --force", "aligned/stage.json", edited(seconds=1.5), "expected the artifact that 04_align.py read"),
    ("05 --print-every 2", "teacher/model.safetensors", cut, NOT_RECORDED),
    ("05", "train/metrics.jsonl", longer, NOT_RECORDED),
    ("05 --name b --student RUN/gqa --masks off", "gqa/model.safetensors", cut, NOT_RECORDED),
    ("06 --force", "aligned/stage.json", edited(seconds=1.5), "aligned: expected the artifact that"),
    ("06 --force", "train/step-00000010/shard-00001-model-00002-of-00004.safetensors", cut, NOT_RECORDED),
    ("07 --force", "merged/model.safetensors", cut, NOT_RECORDED),
])
def test_inputs_that_are_missing_damaged_or_exchanged_are_refused(
    home, inputs, tmp_path, command, file, damage, message
):
    """While the command runs, another file is in the place of one of the run."""
    path, aside = home / file, tmp_path / "aside"
    shutil.move(path, aside)
    path.write_bytes(damage(aside.read_bytes()))
    before = times(home)
    try:
        expect_error(message, *words_of(command, home, inputs))
        assert times(home) == before
    finally:
        shutil.move(aside, path)


def test_a_full_disk_is_one_line_and_keeps_what_there_was(home):
    before = times(home)
    with full_disk(5000):
        expect_error("File too large", "06_export.py", "--run", home, "--force")
    assert times(home) == before
