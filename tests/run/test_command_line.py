"""The command line that stages share: --help as a manual, and a mistake as one line that names what was
perhaps meant."""

import argparse
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from common.run import errors, flags, progress
from common.run.errors import UserError
from common.run.progress import Progress
from runs import run
from torchrun import ROOT, launcher

MANUAL = """Stage 0: count things.

    python 00_count.py   --kv-heads 2     # spaces   as they are
"""


def parser() -> flags.StageParser:
    made = flags.stage_parser(MANUAL)
    made.add_argument("--input", metavar="FILE", help="what is read")
    made.section("what is counted")
    made.add_argument("--kv-heads", type=flags.positive, default=2, help="groups")
    made.add_argument("--by", choices=("none", "value"), default="value", help="whose")
    made.add_argument("--only", nargs="+", choices=("a", "b"), metavar="TASK", help="tasks")
    made.section("how it runs")
    made.add_argument("--lr", type=flags.positive_float, help="rate")
    made.add_argument("--seed", type=flags.seed, default=0, help="of noise")
    made.add_argument("--device", type=flags.device, default="auto", help="auto, cpu or cuda")
    return made


COMMANDS = ["pipelines/smollm2", "pipelines/table6", "bench/answers", "bench/loss",
            "bench/retrieval", "bench/train_step", "bench/transform"]


@pytest.mark.parametrize("command", [
    "pipelines/report", "bench/decode", *(pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS)])
def test_every_command_says_a_mistake_on_one_line(command):
    done = run(f"{command}.py", "--bogus", "3", fails=True)
    assert "--bogus" in done.stderr or "required" in done.stderr or "part: invalid choice" in done.stderr


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
def test_an_error_of_a_library_is_one_line(capsys, error, line):
    def main():
        raise error

    assert ends(main, capsys) == (2, f"error: {line}\n")


def test_help_is_a_page_of_a_manual(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = parser().format_help()
    usage, _, rest = page.partition("\n")
    assert usage.startswith("usage: ") and usage.endswith(" [flags]") and MANUAL.strip() in rest
    flags = page.split(MANUAL.strip())[1]
    assert max(map(len, flags.splitlines())) <= 100
    titles = [section.partition(":\n")[0] for section in flags.strip().split("\n\n")]
    assert titles == ["every stage", "this stage", "what is counted", "how it runs"]
    text = " ".join(flags.split())
    for expected in ("(default: runs/demo)", "(default: value)", "--kv-heads N", "--only TASK [TASK ...]"):
        assert expected in text
    assert "None" not in flags and "False" not in flags


MISTAKES = {
    "--inptu=a.txt --zzz": "unknown flag --inptu; did you mean --input? (--help lists all)",
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


def test_a_gpu_of_this_machine_is_accepted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("auto", "cpu", "cuda", "cuda:1"):
        assert parser().parse_args(["--device", name]).device == name
    with pytest.raises(UserError, match="which has 2 GPUs, found cuda:2"):
        parser().parse_args(["--device", "cuda:2"])


BOUNDS = {  # type -> texts that it accepts, and texts that it refuses
    "positive": (f"1 7 {2**31 - 1}", f"0 -1 1.0 x 1e3 nan inf {2**31} {10**400}"),
    "non_negative": (f"0 7 {2**31 - 1}", f"-1 0.0 nan inf {2**31}"),
    "epochs": ("1e-3 2 1e6", "0 -1 1000001 1e300 inf nan"),
    "seed": (f"0 1 {2**63 - 1}", f"-1 {2**63} 0.5"),
    "positive_float": ("1e-300 0.5 7", "0 -0.5 x nan inf -inf 1e999"),
    "probability": ("0 0.5 1", "-1e-9 1.0000001 nan inf"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_are_finite_and_in_range(name):
    kind, (accepted, refused) = getattr(flags, name), BOUNDS[name]
    for text in accepted.split():
        assert kind(text) == float(text) if "." in text or "e" in text else kind(text) == int(text)
    for text in refused.split():
        with pytest.raises(argparse.ArgumentTypeError, match=f"found {re.escape(text)}$"):
            kind(text)


@pytest.fixture
def fail_as(monkeypatch, capsys):
    """fail_as(LOCAL_RANK, ERROR): the exit code of a rank of torchrun, what it prints, how long it waits."""
    waited = []
    monkeypatch.setattr(errors.os, "_exit", sys.exit)
    monkeypatch.setattr(errors.time, "sleep", waited.append)

    def fail(local: int, error: BaseException):
        monkeypatch.setenv("RANK", str(8 + local))
        monkeypatch.setenv("LOCAL_RANK", str(local))
        waited.clear()

        def main():
            raise error

        return *ends(main, capsys), sum(waited)

    fail.waited = waited
    return fail


def test_the_first_rank_of_a_node_speaks_and_the_others_wait_to_be_ended(fail_as):
    assert fail_as(0, UserError("x\ny")) == (2, "error: x y\n", 0)
    assert fail_as(1, UserError("x")) == (2, "error: rank 9: x\n", errors.PATIENCE)  # nobody ended it
    assert fail_as(0, KeyboardInterrupt())[:2] == (
        130, "interrupted: unfinished output was removed, checkpoints are kept\n")
    assert fail_as(1, KeyboardInterrupt()) == (130, "", 0)


def test_a_fault_that_may_follow_from_another_ranks_end_waits(fail_as):
    """What gloo raises where another rank has left: torchrun ends this one meanwhile."""
    for local in (0, 1):
        with pytest.raises(RuntimeError, match="Connection closed"):
            fail_as(local, RuntimeError("Connection closed by peer"))
        assert fail_as.waited == [errors.PATIENCE]


def test_ranks_alone_skip_the_interpreters_shutdown(monkeypatch):
    left = []
    monkeypatch.setattr(errors.os, "_exit", left.append)
    for names in ({}, {"RANK": "0"}):
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            errors.run_stage(lambda: 3)
        assert left == [3] * len(names)


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
    for _ in Progress(range(1200), desc="calibrating", unit="batch"):
        now += 0.25
    assert capsys.readouterr().err.splitlines() == [
        "calibrating:  20% 240/1200 [01:00<04:00,  4.00batch/s]",
        "calibrating:  40% 480/1200 [02:00<03:00,  4.00batch/s]",
        "calibrating:  60% 720/1200 [03:00<02:00,  4.00batch/s]",
        "calibrating:  80% 960/1200 [04:00<01:00,  4.00batch/s]",
        "calibrating: 100% 1200/1200 [05:00<00:00,  4.00batch/s]"]
    with Progress(desc="tokenizing", unit="tok", leave=False) as bar:
        for count in (500, 1500, 70):
            now += 50
            bar.update(count)
            bar.set_postfix(loss=1)
    assert capsys.readouterr().err == "tokenizing: 2000tok [01:40, 20.00tok/s]\n"


def test_the_name_that_is_nearest_or_begins_so_is_suggested():
    known = ("runs/demo", "meta-llama/Llama-2-7b-hf", "--tokens-per-microbatch")
    assert flags.suggest("meta-lama/llama2-7b-hf", known) == "; did you mean meta-llama/Llama-2-7b-hf?"
    assert flags.suggest("--tokens", known) == "; did you mean --tokens-per-microbatch?"
    assert flags.suggest("gpt2", known) == flags.suggest("", known) == flags.suggest("x", ()) == ""
