"""The benches run, compare like with like, and end with the JSON that bench/RESULTS.md is made of."""

import json

import pytest

from conftest import run


def last_line(done) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


def test_loss_bench():
    figures = last_line(run("bench/loss.py", "--tokens", 512, "--vocab", 4000, "--hidden", 32, "--chunk", 32, "--pairs", 1))
    assert figures["loss_difference"] < 1e-5 and figures["gradient_difference"] < 1e-4  # float32 sums in another order
    assert figures["loss_time_ratio"] > 0 and figures["loss_memory_ratio"] < 0.7


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_step_bench(attention):
    figures = last_line(run("bench/train_step.py", "--shape", "demo", "--batch", 4, "--pairs", 1, "--attention", attention))
    assert {"step_over_floor", "packed_over_single", "samples_per_s"} <= figures.keys() and figures["step_over_floor"] > 0
