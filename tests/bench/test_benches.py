"""The benches run, compare like with like, and end with the JSON that bench/RESULTS.md is made of."""

import argparse

import pytest

from bench import train_step, transform
from runs import last_line, run

pytestmark = pytest.mark.slow


def test_ratios_of_a_step_are_per_sample():
    """Four of 16 samples took half of a packed step. Medians of ratios, not ratios of medians."""
    taken = {"floor": [1.0, 2.0], "masked": [1.1, 2.4], "gqa": [0.9, 1.6], "single": [0.55, 1.2]}
    assert train_step.ratios(taken, 4 / 16) == {"step_over_floor": 1.15, "gqa_step_over_floor": 0.85,
                                                "packed_over_single": 2.0}


@pytest.mark.parametrize(("command", "positive"), [
    (["loss", "--tokens", 4096, "--vocab", 8000, "--hidden", 32, "--chunk", 256, "--pairs", 1],
     ["loss_time_ratio", "plain_mib"]),  # of chunks so small the heap may have kept all
    (["train_step", "--shape", "demo", "--batch", 4, "--pairs", 1], ["step_over_floor"]),
    (["decode", "--layers", 3, "--heads", 8, "--kv-heads", 2, "--head-dim", 16, "--intermediate", 64,
      "--contexts", 16, "--batches", 3, "--steps", 2, "--pairs", 1], ["kv_bytes_ratio"]),
    (["transform", "--heads", 4, "--head-dim", 8, "--kv-heads", 2, "--intermediate", 64, "--tokens", 600,
      "--calibrate-tokens", 32, "--pairs", 1, "--restarts", 3, "--iterations", 50, "--rounds", 5],
     ["transform_speedup", "calibrate_over_forward", "stages_2_to_4_s_per_7b_layer"]),
    (["generating", "--length", 70, "--rows", 2], ["tokens_per_s", "last_step_ms"]),
])
def test_benches_end_with_what_they_measured(command, positive):
    """In processes of their own: the high-water mark of memory is the process's."""
    name, *options = command
    figures = last_line(run(f"bench/{name}.py", *options, fresh=True))
    assert all(figures[figure] > 0 for figure in positive)
    if name == "loss":
        assert figures["loss_difference"] < 1e-5 and figures["gradient_difference"] < 1e-4
    if name == "decode":  # keys and values, 3 layers, 2 heads of 16, float32
        (cell,) = figures["cells"]
        assert cell["kv_bytes"]["gqa"] == 2 * 3 * 2 * 16 * 4 * 16 * 3


def test_both_ways_of_the_transform_agree():
    """Similarities and rotations from Grams are those of paper.py on the vectors, and scale to a layer."""
    args = argparse.Namespace(heads=4, head_dim=8, kv_heads=2, tokens=600, device="cpu", restarts=3, rounds=5,
                              iterations=50, head_pairs=2)
    raw = {kind: transform.random_cache(600, 4, 8, seed, "cpu") for seed, kind in enumerate(("key", "value"))}
    ours = transform.Ours(args, transform.grams_of(args, raw))
    direct = transform.Direct(args, raw)
    direct.scale_to_unit()
    expected = [float(ours.measured[f"{kind}.{name}"][0, 3]) for kind in ("key", "value")
                for name in ("cos.before", "cos.after", "dist.after")]
    assert direct.similarities(0, 3) == pytest.approx(expected, rel=1e-4)
