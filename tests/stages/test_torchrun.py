"""Stage 5 under torchrun: several processes equal one, a killed run one left alone; Slurm."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.training import checkpoints
from common.training.checkpoints import saved_checkpoints
from models import FAMILIES, save_tiny
from runs import (
    align,
    assert_same_bits,
    assert_same_training,
    copy_run,
    metrics,
    saved_files,
    start,
    stop,
    train,
    train_arguments,
    train_on_two_nodes,
    wait_for_step,
    with_teacher,
)
from torchrun import ROOT, kill, launcher, ranks_of

SHARED = ["--steps", "6", "--seed", "1", "--tokens-per-microbatch", "200"]  # several rows


@pytest.fixture(scope="module")
def alone(aligned_run, inputs, tmp_path_factory):
    """A run on one process. Others are compared with it under the same teacher and for few steps: BiLD's
    top 16 is a choice that rounding flips once in some ten steps of a random model, and a flip is a jump of
    1e-4.
    """
    home = copy_run(aligned_run, tmp_path_factory.mktemp("alone") / "run")
    train(home, inputs, *SHARED)
    return home


@pytest.fixture(scope="module")
def distributed_run(aligned_run, finished_run, inputs, tmp_path_factory):
    """A run on two processes."""
    home = with_teacher(aligned_run, finished_run, tmp_path_factory.mktemp("distributed") / "run")
    train(home, inputs, processes=2)
    return home


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), [
    ("llama", ["--masks", "l0-released", "--mask-lr", "0.3"]), ("olmoe", []), ("glm4_moe", []),
    ("stablelm", [])])
def test_a_run_resumes_to_the_same_bits_and_two_processes_equal_one(name, flags, inputs, tmp_path):
    """Experts are rows that ranks share; what a router adds is in their checkpoints."""
    model, words = save_tiny(tmp_path / "model", **FAMILIES.get(name, {})), [*SHARED, *flags]
    aligned = align(tmp_path / "aligned", inputs | {"model": model})
    alone = copy_run(aligned, tmp_path / "alone")
    train(alone, inputs, *words)
    stopped, together = (with_teacher(aligned, alone, tmp_path / name) for name in ("stopped", "together"))
    stop(2, *train_arguments(stopped, inputs, *words))
    assert "after step 3\n" in train(stopped, inputs, *words).stdout
    assert_same_bits(stopped, alone)
    train(together, inputs, *words, processes=2)
    assert_same_training(together, alone)


@pytest.mark.slow
def test_resumed_at_another_world_size(alone, aligned_run, inputs, tmp_path):
    """Three steps on two processes, the rest, over the switch to GQA, on one; and the other way round."""
    for name, first, then in (("fewer", 2, 0), ("more", 0, 2)):
        home = with_teacher(aligned_run, alone, tmp_path / name)
        process = start(home, inputs, *SHARED, processes=first)
        wait_for_step(home, 4)  # after the checkpoint of step 3
        kill(process)
        assert "resumes" in train(home, inputs, *SHARED, processes=then).stdout
        assert_same_training(home, alone)


@pytest.mark.slow
def test_two_nodes_of_two_equal_one_process(alone, aligned_run, inputs, tmp_path):
    """HSDP: weights sharded within a node, replicated over nodes, and gradients reduced after every row."""
    home = with_teacher(aligned_run, alone, tmp_path / "run")
    train_on_two_nodes(home, inputs, *SHARED, "--reduce", "row", processes=2)
    assert_same_training(home, alone)
    shards = {path.name.split("-")[1] for path in saved_files(home)[-1]}
    assert len(shards) >= 2  # more than one rank wrote


@pytest.mark.parametrize("count", [
    pytest.param(4, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.release)
])  # fmt: skip
def test_kills_in_one_run(distributed_run, aligned_run, inputs, tmp_path, count):
    """One rank or all of them, killed at random moments; the run ends as one that was left alone."""
    settings = ["--steps", "40", "--save-steps", "1"]
    quiet = with_teacher(aligned_run, distributed_run, tmp_path / "quiet")
    home = with_teacher(aligned_run, distributed_run, tmp_path / "killed")
    train(quiet, inputs, *settings, processes=2)
    kills, draw = 0, random.Random(0)
    while kills < count:
        done = len(metrics(home)) if (home / "train" / "metrics.jsonl").exists() else 0
        process = start(home, inputs, *settings)
        wait_for_step(home, min(done + draw.randint(0, 2), 39))
        time.sleep(draw.uniform(0, 0.3))
        if process.poll() is not None:
            break  # finished before the last kills
        if draw.random() < 0.5:
            kill(process)
        else:
            os.kill(draw.choice(ranks_of(process)), signal.SIGKILL)
            assert process.wait() != 0
        kills += 1
    train(home, inputs, *settings, processes=2)
    assert kills == count
    assert_same_bits(home, quiet)


RESTARTED = """
import os, signal, sys, time
from common.training.sharding import joined_ranks

again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if again and os.environ["RANK"] == "0":
    time.sleep(4)  # to hash a model
with joined_ranks() as ranks:
    if ranks.rank == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.say(f"joined in attempt {again + 1}")
"""


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_join_each_other_and_not_the_dead(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    words = [*launcher(2, "--max-restarts", "1"), str(script)]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=200, check=False)
    assert done.returncode == 0 and "joined in attempt 2\n" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_torchrun_saves(distributed_run, aligned_run, inputs, tmp_path, number):
    home = with_teacher(aligned_run, distributed_run, tmp_path / "run")
    process = start(home, inputs, "--steps", "2000", "--save-steps", "5000",
                    options=["--signals-to-handle", "SIGTERM,SIGUSR1"])
    wait_for_step(home, 2)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0  # so that a command after && does not run
    steps = [checkpoints.step_of(path) for path in saved_checkpoints(str(home / "train"))]
    assert steps == [len(metrics(home))]


# what Slurm's commands do for pipelines/slurm.sh: a process a node, which get srun's signals
STAND_INS = {
    "scontrol": """if [ "$1" = requeue ]; then echo "$2" >> "$REQUEUED"; exit; fi
echo 127.0.0.1
sleep 0.2  # by then a reader of the first line alone is gone
echo node-1
""",
    "srun": """while [[ $1 = -* ]]; do shift; done
pids=()
trap 'kill -USR1 "${pids[@]}"' USR1
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2> /dev/null; do wait "$pid" || code=$?; done
done
exit "$code"
""",
}


def slurm_job(home, inputs, directory, *flags) -> subprocess.Popen:
    """pipelines/slurm.sh as a job of two nodes of one process each, with stand-ins for Slurm's commands."""
    directory.mkdir(exist_ok=True)
    for name, script in STAND_INS.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{script}")
        (directory / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_JOB_NUM_NODES": "2",
           "SLURM_SUBMIT_DIR": str(ROOT), "NPROC": "1", "PORT": port, "PYTHON": sys.executable,
           "REQUEUED": str(directory / "requeued"), "PET_LOCAL_ADDR": "127.0.0.1",
           "PATH": f"{directory}:{os.environ['PATH']}"}
    command = ["bash", ROOT / "pipelines" / "slurm.sh", *train_arguments(home, inputs, *flags)]
    with open(directory / "log", "a") as log:
        return subprocess.Popen(command, cwd="/", env=os.environ | job, stdout=log, stderr=log)


@pytest.mark.slow
def test_a_slurm_job_is_stopped_before_its_time_is_over_requeued_and_resumed(
    alone, aligned_run, inputs, tmp_path
):
    """To the bits of a job with time enough, which is not requeued, nor is one that fails."""
    settings, requeued = [*SHARED, "--steps", "40", "--save-steps", "500"], tmp_path / "slurm" / "requeued"
    whole, home = (with_teacher(aligned_run, alone, tmp_path / name) for name in ("whole", "stopped"))
    job = slurm_job(whole, inputs, tmp_path / "slurm", *settings)
    assert job.wait(timeout=300) == 0 and not requeued.exists()
    job = slurm_job(home, inputs, tmp_path / "slurm", *settings)
    wait_for_step(home, 3)
    for _ in range(2):  # the second one while it saves
        job.send_signal(signal.SIGUSR1)  # to the script alone, as --signal=B:USR1@600
        time.sleep(0.1)
    log = Path(tmp_path / "slurm" / "log")
    assert job.wait(timeout=120) == 0 and requeued.read_text() == "42\n", log.read_text()
    done, saved = len(metrics(home)), saved_checkpoints(str(home / "train"))
    assert 3 <= done < 40 and [checkpoints.step_of(path) for path in saved] == [done]
    job = slurm_job(home, inputs, tmp_path / "slurm", *settings)
    assert job.wait(timeout=300) == 0 and requeued.read_text() == "42\n"
    assert f"resumes {home}/train after step {done}\n" in log.read_text()
    assert_same_bits(home, whole)
    for flags in (["--force"], ["--epochs", "0"]):
        job = slurm_job(home, inputs, tmp_path / "slurm", *flags)
        assert job.wait(timeout=120) != 0 and requeued.read_text() == "42\n"
        assert f"error: {flags[0]}: expected" in log.read_text(), log.read_text()
