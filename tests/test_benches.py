"""The benches run, compare like with like, and end with the JSON that bench/RESULTS.md is made of."""

import json

import pytest
import torch
from transformers import DynamicCache

from bench import decode, loss
from bench.machine import machine, timed
from conftest import run


def last_line(completed) -> dict:
    return json.loads(completed.stdout.splitlines()[-1])


def test_ratios_are_medians_of_paired_measurements():
    """Neither the ratio of the medians nor its inverse."""
    assert loss.median_ratio([1.0, 8.0, 6.0], [4.0, 4.0, 2.0]) == 2.0
    assert decode.speedup({"mha": [1.0, 8.0, 6.0], "gqa": [4.0, 4.0, 2.0]}) == 2.0


def test_relative_difference_is_of_the_largest_element():
    actual, expected = torch.tensor([1.0, -4.5]), torch.tensor([1.0, -5.0])
    assert loss.relative_difference(actual, expected) == pytest.approx(0.1)


def test_cache_bytes_count_keys_and_values_of_every_layer():
    cache = DynamicCache()
    for layer in range(3):
        cache.update(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8), layer)
    assert decode.cache_bytes(cache) == 3 * 2 * (2 * 4 * 5 * 8) * 4


def test_a_row_of_the_decode_table():
    figures = {"context": 512, "batch": 4, "kv_bytes": {"mha": 2**23, "gqa": 2**21},
               "prefill_tokens_per_s": {"mha": 100.4, "gqa": 200.6}, "prefill_speedup": 1.997,
               "decode_tokens_per_s": {"mha": 10.0, "gqa": 15.0}, "decode_speedup": 1.5}
    assert decode.row(figures) == [512, 4, "8.0 -> 2.0", "100 -> 201", "2.00", "10 -> 15", "1.50"]


def test_timed_returns_the_result_and_its_seconds():
    result, seconds = timed("cpu", sum, [1, 2, 3])
    assert result == 6 and 0 <= seconds < 10


def test_the_machine_is_named_with_its_threads_and_torch():
    assert f"{torch.get_num_threads()} threads, torch {torch.__version__}" in machine("cpu")


@pytest.mark.slow
def test_loss_bench():
    figures = last_line(run("bench/loss.py", "--tokens", 512, "--vocab", 4000, "--hidden", 32, "--chunk", 32,
                            "--pairs", 1, fresh=True))  # the high-water mark is the process's
    assert figures["loss_difference"] < 1e-5  # float32 sums in another order
    assert figures["gradient_difference"] < 1e-4
    assert figures["loss_time_ratio"] > 0 and figures["loss_memory_ratio"] < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_step_bench(attention):
    figures = last_line(run("bench/train_step.py", "--shape", "demo", "--batch", 4, "--pairs", 1,
                            "--attention", attention, fresh=True))
    assert {"step_over_floor", "packed_over_single", "samples_per_s"} <= figures.keys()
    assert figures["step_over_floor"] > 0


@pytest.mark.slow
def test_transform_bench():
    sizes = ["--heads", 4, "--head-dim", 8, "--kv-heads", 2, "--intermediate", 64]
    lengths = ["--tokens", 600, "--calibrate-tokens", 32, "--pairs", 1]
    search = ["--restarts", 3, "--iterations", 50, "--rounds", 5]
    figures = last_line(run("bench/transform.py", *sizes, *lengths, *search))
    assert figures["similarity_difference"] < 1e-5  # float32 vectors against float64 Grams
    assert figures["rotation_difference"] < 1e-4
    assert figures["score_difference"] < 1e-9
    assert figures["transform_speedup"] > figures["transform_speedup_with_grams"] > 0
    assert figures["calibrate_over_forward"] > 0


@pytest.mark.slow
def test_decode_bench_of_a_random_pair():
    figures = last_line(run("bench/decode.py", "--layers", 3, "--heads", 8, "--kv-heads", 2, "--head-dim", 16,
                            "--intermediate", 64, "--contexts", 16, 40, "--batches", 1, 3, "--steps", 2,
                            "--pairs", 1))
    assert figures["kv_bytes_ratio"] == 4
    assert figures["decode_speedup"].keys() == {"16x1", "16x3", "40x1", "40x3"}
    for cell in figures["cells"]:  # keys and values, 3 layers, 2 heads of 16, float32
        assert cell["kv_bytes"]["gqa"] == 2 * 3 * 2 * 16 * 4 * cell["context"] * cell["batch"]
        assert min(*cell["prefill_tokens_per_s"].values(), *cell["decode_tokens_per_s"].values()) > 0
