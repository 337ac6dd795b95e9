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


def test_transform_bench():
    figures = last_line(run("bench/transform.py", "--heads", 4, "--head-dim", 8, "--kv-heads", 2, "--restarts", 3, "--iterations", 50, "--rounds", 5, "--tokens", 600,
                            "--intermediate", 64, "--calibrate-tokens", 32, "--pairs", 1))
    assert figures["similarity_difference"] < 1e-5 and figures["rotation_difference"] < 1e-4  # float32 vectors against float64 Grams
    assert figures["score_difference"] < 1e-9
    assert figures["transform_speedup"] > figures["transform_speedup_with_grams"] > 0 and figures["calibrate_over_forward"] > 0


def test_decode_bench_of_a_random_pair():
    figures = last_line(run("bench/decode.py", "--layers", 3, "--heads", 8, "--kv-heads", 2, "--head-dim", 16, "--intermediate", 64, "--contexts", 16, 40,
                            "--batches", 1, 3, "--steps", 2, "--pairs", 1))
    assert figures["kv_bytes_ratio"] == 4 and figures["decode_speedup"].keys() == {"16x1", "16x3", "40x1", "40x3"}
    for cell in figures["cells"]:  # keys and values, 3 layers, 2 heads of 16, float32
        assert cell["kv_bytes"]["gqa"] == 2 * 3 * 2 * 16 * 4 * cell["context"] * cell["batch"]
        assert min(*cell["prefill_tokens_per_s"].values(), *cell["decode_tokens_per_s"].values()) > 0


def test_decode_bench_of_two_checkpoints(aligned_run):
    figures = last_line(run("bench/decode.py", "--model", aligned_run / "aligned", aligned_run / "merged", "--contexts", 16, "--batches", 2, "--steps", 2, "--pairs", 1))
    assert figures["kv_bytes_ratio"] == 4
