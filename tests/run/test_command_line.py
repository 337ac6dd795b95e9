"""The command line that stages share: a mistake is one line that names what was perhaps meant."""

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError

from common.run import errors, flags, progress
from common.run.progress import Progress
from torchrun import ROOT, launcher


def parser() -> flags.StageParser:
    made = flags.stage_parser("Count things.")
    made.add_argument("--input", metavar="FILE", help="what is read")
    made.add_argument("--kv-heads", type=flags.positive, default=2, help="groups")
    made.add_argument("--by", choices=("none", "value"), default="value", help="whose")
    made.add_argument("--lr", type=flags.positive_float, help="rate")
    made.add_argument("--seed", type=flags.seed, default=0, help="of noise")
    made.add_argument("--device", type=flags.device, default="auto", help="auto, cpu or cuda")
    return made


@pytest.mark.slow
def test_a_command_imports_nothing_from_the_working_directory(tmp_path):
    for name in ("common", "torch", "report"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')")
    command = [sys.executable, ROOT / "pipelines/report.py", "--run", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: .: expected ")


def ends(main, capsys) -> tuple[int, str]:
    """Exit code and standard error of a stage whose main is this."""
    with pytest.raises(SystemExit) as end:
        errors.run_stage(main)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("error, line", [
    (SafetensorError("I/O error: File too large"), "I/O error: File too large"),
    (MemoryError("too little"), "too little"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of"),
     f"CUDA out of memory. Tried to allocate 2.00 GiB. {errors.LESS_MEMORY}"),
    (RuntimeError("enforce fail at alloc_cpu.cpp. DefaultCPUAllocator: can't allocate 8 bytes"),
     f"out of memory: can't allocate 8 bytes. {errors.LESS_MEMORY}"),
], ids=lambda value: type(value).__name__)
def test_an_error_of_a_library_is_one_line_and_an_interrupt_exits_with_130(capsys, error, line):
    assert ends(mock.Mock(side_effect=error), capsys) == (2, f"error: {line}\n")
    assert ends(mock.Mock(side_effect=KeyboardInterrupt), capsys) == (
        130, "interrupted: unfinished output was removed, checkpoints are kept\n")


MISTAKES = {
    "--inptu=a.txt --zzz": "unknown flag --inptu; did you mean --input? (--help lists all)",
    "--d": "unknown flag --d; did you mean --device? (--help lists all)",
    "here there": "unknown flag here (--help lists all)",
    "--by vlaue": "--by: expected one of none, value, found vlaue; did you mean value?",
    "--kv-heads -1": "--kv-heads: expected a whole number from 1 to 2^31 - 1, found -1",
    "--lr=-inf": "--lr: expected a finite number above 0, found -inf",
    "--seed": "--seed: expected one argument",
    "--device cuda": "--device: expected a device of this machine, which has 0 GPUs, found cuda",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(command, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ends(lambda: parser().parse_args(command.split()), capsys) == (2, f"error: {MISTAKES[command]}\n")


RANKS = """
import sys, time
import torch.distributed as dist
from common.run.errors import UserError, run_stage
from common.training.sharding import joined_ranks

def main():
    kind = sys.argv[1]
    with joined_ranks() as ranks:
        if kind == "all":
            time.sleep(0 if ranks.rank else 2)
        if kind == "all" or kind == str(ranks.rank):
            raise UserError("the error")
        dist.barrier()

run_stage(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lines"), [
    ("all", ["error: the error"]),  # last on the first
    ("1", ["error: rank 1: the error"]),  # others wait for it
])
def test_torchrun_shows_the_error(tmp_path, kind, lines):
    script = tmp_path / "stage.py"
    script.write_text(RANKS)
    done = subprocess.run([*launcher(2), script, kind], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60, check=False)
    assert done.returncode == 1 and "interrupted" not in done.stderr, done.stderr
    assert [text for text in done.stderr.splitlines() if text.startswith("error: ")] == lines, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr  # torchrun's own


def test_off_a_terminal_progress_is_a_line_a_minute(monkeypatch, capsys):
    now = 0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in Progress(range(480), desc="calibrating", unit="batch"):
        now += 0.25
    assert capsys.readouterr().err.splitlines() == [
        "calibrating:  50% 240/480 [01:00<01:00,  4.00batch/s]",
        "calibrating: 100% 480/480 [02:00<00:00,  4.00batch/s]"]
    with Progress(desc="tokenizing", unit="tok", leave=False) as bar:
        for count in (500, 1500, 70):
            now += 50
            bar.update(count)
            bar.set_postfix(loss=1)
    assert capsys.readouterr().err == "tokenizing: 2000tok [01:40, 20.00tok/s]\n"
