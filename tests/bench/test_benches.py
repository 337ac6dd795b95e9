"""The benches run, compare like with like, and end with the JSON that bench/RESULTS.md is made of."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench import draft, train_step, transform
from common.data.text import EVALUATION, load_tokens
from common.evaluation.evaluate import perplexity
from common.models.load import load_model, load_tokenizer
from common.run.errors import UserError
from common.training.memory import USABLE, StepMemory, Student, Workload
from models import save_tiny
from pipelines.cost import parse_hardware, step_cost
from runs import copy_run, expect_error, last_line, run

pytestmark = pytest.mark.slow


def test_ratios_of_a_step_are_per_sample():
    """Four of 16 samples took half of a packed step. Medians of ratios, not ratios of medians."""
    taken = {"floor": [1.0, 2.0], "masked": [1.1, 2.4], "gqa": [0.9, 1.6], "single": [0.55, 1.2]}
    assert train_step.ratios(taken, 4 / 16) == {"step_over_floor": 1.15, "gqa_step_over_floor": 0.85,
                                                "packed_over_single": 2.0}


def step_arguments(**changes) -> argparse.Namespace:
    arguments = {"shape": "demo", "layers": None, "device": "cpu", "loss_chunk": 64, "batch": 8,
                 "tokens_per_microbatch": 256, "recompute": False, "by_layer": False}
    return argparse.Namespace(**arguments | changes)


@pytest.mark.parametrize("tokens, world, count, whole", [
    (600, 1, 3, True), (1024, 2, 2, True), (16384, 1, 1, False)])
def test_the_plan_of_the_step_is_stage_5s(monkeypatch, tokens, world, count, whole):
    """Memory and seconds of the plan for the same model, samples and rows, on H200s.

    On a CPU, in float32, there are no seconds.
    """
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    args = step_arguments(
        device="cuda", shape="7b", layers=2, tokens_per_microbatch=tokens, batch=8, by_layer=not whole)
    config, samples = train_step.model_config(args), train_step.random_samples(8, 1280)
    rows = train_step.lay_out(samples, tokens, "cpu")
    assert len(rows) == count
    student, longest = Student(8), max(row.input_ids.numel() for row in rows)
    plan = argparse.Namespace(batch=8 * world, tokens_per_microbatch=tokens, reduce="step")
    for device, itemsize in (("cuda", 2), ("cpu", 4)):
        work = Workload.of(config, samples, 64, False, itemsize, whole)
        need = StepMemory(work, student, world, longest, count > 1, world > 1).fullest()["total"] / 2**30
        expected = {"memory_gib": round(need, 2)}
        if device == "cuda":
            cost = step_cost(work, student, plan, parse_hardware(f"{world}xH200-141GB"))
            expected["step_seconds"] = round(cost.seconds, 4)
        args.device = device
        assert train_step.planned(config, samples, rows, args, world) == expected


def test_the_memory_of_a_step_is_its_own_peak(monkeypatch):
    """Torch's statistics begin anew with the step, and what other models hold is left out."""
    calls, peaks = [], (7 * 2**30 + 2**25, 9 * 2**30 + 2**25)
    for name, value in (("empty_cache", None), ("reset_peak_memory_stats", None),
                        ("max_memory_allocated", peaks[0]), ("max_memory_reserved", peaks[1])):
        monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: calls.append(name) or value)
    figures = train_step.peak_memory(lambda: calls.append("step"), 2.5 * 2**30)
    assert figures == {"memory_gib": 4.53, "reserved_gib": 6.53}
    assert calls[:3] == ["empty_cache", "reset_peak_memory_stats", "step"]


@pytest.mark.parametrize("whole", [False, True])
def test_as_many_layers_as_a_gpu_holds(whole):
    """The plan's memory of the masked step, and what the other two students hold."""
    args, samples = step_arguments(by_layer=not whole), train_step.random_samples(8, 1280)
    shape = train_step.model_config(step_arguments(shape="1.3b", layers=4))

    def need(layers: int) -> float:
        config = train_step.model_config(step_arguments(shape="1.3b", layers=layers))
        work = Workload.of(config, samples, 64, False, 2, whole)
        row = max(256, *map(len, samples))
        masked = StepMemory(work, Student(4), 1, row, reduced=False).fullest()["total"]
        return (masked + train_step.others_bytes(config, whole)) / USABLE

    for memory, held in ((need(1) + 1e3, 1), (need(3) + 1e3, 3), (need(4) - 1e3, 3), (2**40, 4)):
        assert train_step.fit_layers(shape, samples, args, memory).num_hidden_layers == held
    with pytest.raises(UserError, match="--device cuda: expected memory for one layer"):
        train_step.fit_layers(shape, samples, args, need(1) - 2**28)


def test_the_other_students_hold_twelve_bytes_a_parameter(group_of_one):
    """On a CPU, where they compute in the weights' dtype."""
    args = step_arguments(compile=False)
    config = train_step.model_config(args)
    models, samples = train_step.Models(args, group_of_one, config), train_step.random_samples(2, 1280)
    rows = train_step.lay_out(samples, 600, "cpu")
    models.floor(rows)
    models.gqa_step(rows, samples)
    held = 0
    for trainee in (models.plain, models.gqa):
        tensors = [*trainee.net.parameters()]
        for state in models.jobs[trainee].optimizer.state.values():
            tensors += [tensor for tensor in state.values() if tensor.dim()]  # without Adam's count of steps
        held += sum(tensor.nbytes for tensor in tensors)
    assert held == train_step.others_bytes(config, whole=False)
    assert train_step.others_bytes(config, whole=True) == pytest.approx(held * 14 / 12)


@pytest.mark.parametrize(("command", "positive"), [
    (["loss", "--tokens", 512, "--vocab", 4000, "--hidden", 32, "--chunk", 32, "--pairs", 1],
     ["loss_time_ratio", "loss_memory_ratio"]),
    (["train_step", "--shape", "demo", "--batch", 4, "--pairs", 1], ["step_over_floor"]),
    (["train_step", "--shape", "host", "--layers", 3, "--pairs", 1], ["teacher_over_plain"]),
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
    expected = [float(ours.measured[f"{kind}.{name}"][0, 3]) for kind in ("key", "value")
                for name in ("cos.before", "cos.after", "dist.after")]
    assert direct.similarities(0, 3) == pytest.approx(expected, rel=1e-4)


def test_recovery_bench(inputs, aligned_run, tmp_path):
    """A student at no learning rate is its merged model."""
    home, out, text = tmp_path / "merged", tmp_path / "out", Path(inputs["text"]).read_text()
    train, heldout = tmp_path / "train.txt", tmp_path / "heldout.txt"
    train.write_text(4 * text[: len(text) // 2])
    heldout.write_text(text[len(text) // 2 :])
    texts = "--text", train, "--heldout", heldout, "--length", 32
    start = copy_run(aligned_run, home / "paper")
    tokens, _ = load_tokens(str(heldout), load_tokenizer(inputs["model"]), 32, 32, EVALUATION)
    paths = {"source": inputs["model"], "paper": str(start / "merged")}
    untrained = {name: {"perplexity": perplexity(load_model(path), tokens)} for name, path in paths.items()}
    (home / "starts.json").write_text(json.dumps(untrained))

    words = ["bench/recovery.py", "--run", home, "--out", out, "--starts", "paper", *texts,
             "--heldout-sequences", 32, "--batch", 2, "--dtype", "float32", "--budgets", 200, "--lr", "1e-9"]
    run(*words)
    trained = json.loads((out / "recovery.json").read_text())["trained"]["paper, masks off"]["200"]
    assert trained["0"]["perplexity"] == pytest.approx(untrained["paper"]["perplexity"], rel=1e-4)
    assert 0 <= trained["0"]["agreement"] <= 1 and not (out / "training").exists()
    assert trained["0"]["open_masks"] is None
    assert "paper, no masks" in (out / "recovery.md").read_text()
    expect_error("expected the merged models of make smollm2", "bench/recovery.py", "--run", tmp_path)


def test_the_tokens_expected_of_a_pass():
    """(1 - a^(g + 1)) / (1 - a), and g + 1 of a draft that always agrees."""
    assert draft.expected_tokens(0.6, 3) == pytest.approx((1 - 0.6**4) / 0.4)
    assert draft.expected_tokens(1.0, 4) == 5 and draft.expected_tokens(0.0, 4) == 1


def test_a_source_is_a_draft_of_itself_that_always_agrees(inputs, tmp_path):
    other = save_tiny(tmp_path / "other", seed=1)
    for model, agrees in ((inputs["model"], True), (other, False)):
        printed = run("bench/draft.py", inputs["model"], model, "--tokens", 12, "--draft-tokens", 2, 3).stdout
        agreement, *lines = printed.splitlines()
        assert agreement.startswith("agreement 1.000 on 144 tokens; ") == agrees
        for line, count in zip(lines, (3, 4), strict=True):  # 12 tokens are 4 passes, or 3
            assert line.startswith(f"drafts of {count - 1}: {count}.00 tokens per pass, predicted "
                                   f"{count}.00; 12 of 12 texts equal; ") == agrees
            assert "; 12 of 12 texts equal; " in line
