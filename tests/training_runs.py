"""Runs of stage 5: started, stopped, killed, and compared with each other."""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.training import engine
from common.training.checkpoints import saved_checkpoints, whole_weights
from helpers import ROOT, TRAINING, copy_run, run

STAGE = "05_prune_train.py"
# of metrics.jsonl, what depends on the machine, and the memory's peak, which starts anew with a process
MEASURED = {"seconds", "tokens_per_s", "heldout_seconds", "start_heldout_seconds", "memory_gib"}


def flags(*words) -> argparse.Namespace:
    """The parsed flags of a command line."""
    before, sys.argv = sys.argv, [STAGE, *words]
    try:
        return importlib.import_module("05_prune_train").parse()
    finally:
        sys.argv = before


def metrics(home) -> list[dict]:
    return [json.loads(line) for line in (home / "train" / "metrics.jsonl").read_text().splitlines()]


def final_weights(home) -> dict[str, torch.Tensor]:
    return whole_weights(saved_checkpoints(str(home / "train"))[-1])


def assert_same_training(home, other) -> None:
    # BiLD is not continuous: rounding may swap a student's 16th and 17th logits, of which it takes only one
    tolerances = {"loss": 1e-4, "bild": 1e-4, "kl": 1e-5, "mask_mean": 1e-5, "mask_expected": 1e-5}
    for ours, theirs in zip(metrics(home), metrics(other), strict=True):
        for name, tolerance in tolerances.items():
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=tolerance), (ours["step"], name)
    expected = final_weights(other)
    for name, tensor in final_weights(home).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


def assert_same_bits(home, other) -> None:
    ours, theirs = final_weights(home), final_weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    figures = []
    for lines in (metrics(home), metrics(other)):
        figures.append([{name: line[name] for name in line.keys() - MEASURED} for line in lines])
    assert figures[0] == figures[1]


def with_teacher(source, trained, home):
    """A copy of an aligned run with the teacher of a trained one."""
    copy_run(source, home)
    shutil.copytree(trained / "teacher", home / "teacher")
    return home


def train_arguments(home, inputs, *arguments) -> list:
    return ["--run", home, "--tasks", inputs["tasks"], *TRAINING, *arguments]


def interrupt(monkeypatch, step: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal during a training step."""
    rate = engine.Schedule.rate

    def interrupting(schedule, now):
        if now == step:
            signal.raise_signal(number)
        return rate(schedule, now)

    monkeypatch.setattr(engine.Schedule, "rate", interrupting)


def stop(step: int, *arguments, number: int = signal.SIGTERM) -> subprocess.CompletedProcess:
    """Stage 5 with a signal during a step (from 0), after which it must exit with 75."""
    with pytest.MonkeyPatch.context() as patched:
        interrupt(patched, step, number)
        return run(STAGE, *arguments, code=75)


def run_script(script: str, directory: Path, processes: int, *arguments, options=()) -> str:
    """What a script that imports the tests' modules prints, run under torchrun with these options."""
    path = directory / "script.py"
    path.write_text(script)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *options]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/tests/training"}
    done = subprocess.run([sys.executable, *launcher, str(path), *map(str, arguments)], cwd=ROOT,
                          env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def start(home, inputs, *arguments, processes: int = 2, options=(), **pipes) -> subprocess.Popen:
    """Stage 5, under torchrun with these options if there are processes. pipes: of subprocess.Popen."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = [*launcher, "--local-addr", "127.0.0.1", *options] if processes else []
    command = [sys.executable, *launcher, str(ROOT / STAGE), "--run-dir", str(home)]
    command += ["--tasks", inputs["tasks"], *(arguments or TRAINING)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=ROOT, **(quiet | pipes))


def train_on_two_nodes(home, inputs, *arguments, processes: int, visible=("", "")) -> None:
    """Stage 5 under two launchers of so many processes, each of which sees its own GPUs, or none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "127.0.0.1",
                "--master-port", port, "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)]
    command = [str(ROOT / STAGE), "--run-dir", str(home), "--tasks", inputs["tasks"], *arguments]
    nodes = []
    for node, gpus in enumerate(visible):
        nodes.append(subprocess.Popen([*launcher, "--node-rank", str(node), *command], cwd=ROOT,
                                      env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        for node in nodes:
            output, _ = node.communicate(timeout=200)
            assert node.returncode == 0, output
    finally:
        for node in nodes:
            if node.poll() is None:
                kill(node)


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of torchrun's ranks; of a single process its own."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return [int(pid) for pid in file.read().split()] or [process.pid]


def kill(process: subprocess.Popen) -> None:
    ranks = ranks_of(process)
    for pid in (process.pid, *ranks):  # the launcher first, so that it has no time to tidy up
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    limit = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):  # a dying rank's threads still hold the lock
        assert time.monotonic() < limit, f"ranks {ranks} do not end"
        time.sleep(0.01)


def wait_for_step(home, step: int) -> None:
    path, limit = home / "train" / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") >= step):
        assert time.monotonic() < limit, "the run did not get that far"
        time.sleep(0.01)


def saved_files(home) -> list[list[Path]]:
    """The tensor files of each checkpoint, oldest first."""
    return [sorted(Path(path).glob("shard-*")) for path in saved_checkpoints(str(home / "train"))]
