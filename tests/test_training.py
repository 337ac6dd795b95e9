"""Stage 5 under torchrun: two processes equal one, a killed run equals one that was not, signals and NaN are handled."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

from common import engine, plots
from common.checkpoints import steps_saved, whole_weights
from common.cli import UserError
from common.engine import cosine
from common.sharding import Ranks, Trainee
from common.tasks import Sample
from conftest import ROOT, TRAINING, copy_run, run, tiny_model


def metrics(home) -> list[dict]:
    return [json.loads(line) for line in (home / "train" / "metrics.jsonl").read_text().splitlines()]


def final_weights(home) -> dict[str, torch.Tensor]:
    return whole_weights(steps_saved(str(home / "train"))[-1])


def test_one_process_equals_two(finished_run, aligned_run, inputs, tmp_path):
    alone, together = (copy_run(aligned_run, tmp_path / name) for name in ("alone", "together"))
    # Students get the same teacher and few steps: BiLD's top 16 is a choice that rounding flips once in some ten steps
    # of a random model, and a flip is a jump of 1e-4.
    settings = ["--tasks", inputs["tasks"], *TRAINING, "--steps", 6, "--seed", 1, "--tokens-per-microbatch", 200]  # several rows, not as many on each rank
    run("05_prune_train.py", "--run", alone, *settings)
    trained = safetensors.torch.load_file(alone / "teacher" / "model.safetensors")
    shutil.copytree(alone / "teacher", together / "teacher")
    run("05_prune_train.py", "--run-dir", together, *settings, processes=2)
    for ours, theirs in zip(metrics(together), metrics(alone), strict=True):
        for name in ("loss", "kl", "bild", "mask_mean", "mask_expected"):
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=1e-5), (ours["step"], name)
    other = final_weights(alone)
    for name, tensor in final_weights(together).items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-4)
    run("05_prune_train.py", "--run-dir", together, *settings, "--force", processes=2)  # a teacher of its own this time
    for name, tensor in safetensors.torch.load_file(together / "teacher" / "model.safetensors").items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-5)


def start(home, inputs, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "05_prune_train.py")]
    return subprocess.Popen([*command, "--run-dir", str(home), "--tasks", inputs["tasks"], *TRAINING, *arguments], cwd=ROOT,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for_step(home, step: int) -> None:
    path, limit = home / "train" / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") >= step):
        assert time.monotonic() < limit, "the run did not get that far"
        time.sleep(0.01)


def test_killed_and_resumed_is_bit_identical(finished_run, aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(finished_run / "teacher", home / "teacher")
    step = random.randint(1, 8)
    print(f"killed at step {step}")
    process = start(home, inputs)
    wait_for_step(home, step)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        ranks = [int(pid) for pid in file.read().split()]
    for pid in (process.pid, *ranks):  # the launcher first, so that it has no time to tidy up
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert not (home / "train" / "stage.json").exists()
    run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2)
    ours, theirs = final_weights(home), final_weights(finished_run)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    timing = {"seconds", "tokens_per_s"}
    assert [{k: v for k, v in a.items() if k not in timing} for a in metrics(home)] == [{k: v for k, v in b.items() if k not in timing} for b in metrics(finished_run)]


def test_sigterm_saves_and_other_settings_are_refused(finished_run, aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(finished_run / "teacher", home / "teacher")
    command = [sys.executable, str(ROOT / "05_prune_train.py"), "--run", str(home), "--tasks", inputs["tasks"], *TRAINING, "--steps", "2000", "--save-steps", "5000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for_step(home, 2)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped by a signal" in output
    step = len(metrics(home))
    assert steps_saved(str(home / "train")) == [str(home / "train" / f"step-{step:08d}")]
    done = run("05_prune_train.py", "--run", home, "--tasks", inputs["tasks"], *TRAINING, fails=True)
    assert "was begun with other settings (steps 2000 -> 10" in done.stderr


def test_non_finite_loss_names_step_rank_and_samples(finished_run, aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(finished_run / "teacher", home / "teacher")
    done = run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, "--lr", "1e30", "--clip", "0", fails=True)
    assert "expected a finite loss, found rank 0: loss nan, samples [" in done.stderr and "the last checkpoint is kept" in done.stderr


def test_non_finite_gradient_stops_before_the_update(monkeypatch, tmp_path):
    """A loss can be finite where its gradient is not: sqrt at 0."""
    monkeypatch.setattr(engine.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(engine.dist, "all_gather_object", lambda found, own: found.__setitem__(0, own))

    class Faulty(engine.Phase):
        def row_loss(self, row):
            return (0 * trainee(row)).abs().sum().sqrt(), {}

    trainee = Trainee(tiny_model())
    before = [p.clone() for p in trainee.parameters()]
    optimizer = torch.optim.SGD([{"params": list(trainee.parameters()), "initial_lr": 1.0}])
    plan = engine.Plan(steps=3, batch=1, warmup=1, clip=1.0, seed=0, tokens_per_microbatch=64, save_steps=1, save_minutes=1, print_every=1)
    with pytest.raises(UserError, match=r"step 1: expected a finite loss, found a gradient of norm nan, samples \[0\]"):
        engine.train(trainee, optimizer, Faulty(), [Sample((1, 2), (3,))], plan, str(tmp_path), Ranks(0, 1, torch.device("cpu")))
    assert all(torch.equal(a, b) for a, b in zip(before, trainee.parameters(), strict=True))
    assert steps_saved(str(tmp_path)) == []


def test_cosine_schedule():
    factors = [cosine(step, 100, 10) for step in range(100)]
    assert factors[0] == 0.1 and factors[9] == factors[10] == 1 and factors[55] == pytest.approx(0.5) and factors[99] < 1e-3


def test_curves_of_a_run_too_short_for_masks(tmp_path):
    plots.curves(str(tmp_path / "curves.png"), [{"step": 1, "loss": 2.0, "kl": 1.0, "bild": 1.0}], "one step")
    assert (tmp_path / "curves.png").stat().st_size > 5_000
