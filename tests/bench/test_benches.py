"""The benches run, compare like with like, and end with the JSON that bench/RESULTS.md is made of."""

import argparse
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from bench import (
    alignment,
    decode,
    loss,
    mask_order,
    mask_schedule,
    merging,
    plans,
    positions,
    recovery,
    step_plan,
    text_model,
    train_step,
)
from bench.machine import machine, timed
from common.cli import UserError
from common.data.samples import Sample
from common.data.text import load_tokens
from common.evaluate import perplexity
from common.method import masks
from common.models import load_model, load_tokenizer
from common.training import budget
from common.training.hardware import parse_hardware
from conftest import copy_run, expect_error, run, save_tiny, tiny_model
from pipelines import training_cost


def last_line(completed) -> dict:
    return json.loads(completed.stdout.splitlines()[-1])


def test_ratios_are_medians_of_paired_measurements():
    """Neither the ratio of the medians nor its inverse."""
    assert loss.median_ratio([1.0, 8.0, 6.0], [4.0, 4.0, 2.0]) == 2.0
    assert decode.speedup({"mha": [1.0, 8.0, 6.0], "gqa": [4.0, 4.0, 2.0]}) == 2.0


def test_ratios_of_a_step_are_per_sample():
    """Four of 16 samples took half of a packed step."""
    taken = {"floor": [1.0, 2.0], "masked": [1.1, 2.4], "gqa": [0.9, 1.6], "single": [0.55, 1.2]}
    assert train_step.ratios(taken, 4 / 16) == {"step_over_floor": 1.15, "gqa_step_over_floor": 0.85,
                                                "packed_over_single": 2.0}


def test_samples_that_run_alone_are_spread_over_all_lengths():
    samples = [Sample((1,) * length) for length in (5, 1, 3, 2, 4, 6)]
    assert [len(sample) for sample in train_step.evenly_spread(samples, 3)] == [2, 4, 6]
    assert [len(sample) for sample in train_step.evenly_spread(samples, 9)] == [1, 2, 3, 4, 5, 6]


def step_arguments(**changes) -> argparse.Namespace:
    arguments = {"shape": "demo", "layers": None, "device": "cpu", "loss_chunk": 64, "batch": 8,
                 "tokens_per_microbatch": 256, "recompute": False}
    return argparse.Namespace(**arguments | changes)


def test_the_layers_of_all_models_of_a_step_are_compiled(group_of_one):
    """On request. Nothing is compiled before a first pass."""
    for asked in (False, True):
        args = step_arguments(attention="packed", compile=asked)
        models = train_step.Models(args, group_of_one, train_step.model_config(args))
        for trainee in (models.teacher, models.masked, models.plain, models.gqa):
            layers = trainee.net.model.layers
            assert all((layer._compiled_call_impl is not None) == asked for layer in layers)


def test_the_plan_of_the_step_is_stage_5s(monkeypatch):
    """Memory and seconds of common/training/budget for the same model, samples and rows, on an H200."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    args = step_arguments(device="cuda", shape="1.3b", layers=2, tokens_per_microbatch=600)
    config, samples = train_step.model_config(args), train_step.random_samples(8, 1280)
    rows = train_step.lay_out(samples, 600, "cpu")
    work = budget.Workload.of(config, samples, 64, False)
    student, longest = budget.Student(4), max(row.input_ids.numel() for row in rows)
    figures = step_plan.expected(config, samples, rows, args, 1)
    need = budget.memory(work, student, 1, longest, len(rows) > 1)["total"] / 2**30
    assert figures["memory_gib"] == pytest.approx(need, abs=0.006)
    plan = argparse.Namespace(**vars(args), reduce="step")
    cost = training_cost.step_cost(work, student, plan, parse_hardware("1xH200-141GB"))
    assert figures["step_seconds"] == pytest.approx(cost.seconds, abs=1e-4)


def test_as_many_layers_as_a_gpu_holds():
    """The plan's memory of the masked step, and 12 bytes per parameter of the other two students."""
    args, samples = step_arguments(), train_step.random_samples(8, 1280)
    shape = train_step.model_config(step_arguments(layers=9))

    def need(layers: int) -> float:
        config = train_step.model_config(step_arguments(layers=layers))
        work = budget.Workload.of(config, samples, 64, False)
        others = budget.size(config).whole + budget.size(config, budget.Student(2, ())).whole
        row = max(256, *map(len, samples))
        return (budget.memory(work, budget.Student(2), 1, row)["total"] + 12 * others) / budget.USABLE

    for layers in (1, 5):
        for memory, held in ((need(layers) + 1e3, layers), (need(layers + 1) - 1e3, layers)):
            assert step_plan.fit_layers(shape, samples, args, memory).num_hidden_layers == held
    assert step_plan.fit_layers(shape, samples, args, 2**40).num_hidden_layers == 9
    with pytest.raises(ValueError, match="one layer needs 0 GiB, of 0"):
        step_plan.fit_layers(shape, samples, args, need(1) - 1e3)


def test_memory_of_a_step_is_without_the_other_students(monkeypatch):
    """Twelve bytes per parameter, and four for Adam's step; the peak is that of this step alone."""
    model = tiny_model()
    job = argparse.Namespace(trainee=model, optimizer=torch.optim.AdamW(model.parameters()))
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.sum().backward()
    job.optimizer.step()
    held = step_plan.resident(job)
    assert held == 12 * model.num_parameters() + 4 * len(list(model.parameters()))
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: calls.append("read") or 4 * 2**30)
    assert step_plan.peak_memory(lambda: calls.append("step"), 2**30) == 3
    assert calls == ["reset", "step", "read"]


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


def test_token_losses_are_next_token_losses_by_position(monkeypatch):
    monkeypatch.setattr(positions, "CHUNK", 7)
    model, row = tiny_model(), torch.arange(40) * 3
    with torch.no_grad():
        expected = F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="none")
    torch.testing.assert_close(positions.token_losses(model, row).float(), expected)


def test_buckets_end_where_the_sequence_does():
    assert positions.bucket_edges(4096) == [0, 256, 512, 1024, 2048, 4095]
    assert positions.bucket_edges(1000) == [0, 256, 512, 999]
    assert positions.bucket_edges(257) == [0, 256]
    assert positions.bucket_edges(100) == [0, 99]
    assert positions.bucket_means(torch.tensor([1.0, 3.0, 5.0, 6.0, 7.0]), [0, 2, 5]) == [2.0, 6.0]


def test_what_is_lost_is_the_difference_sequence_by_sequence():
    assert positions.lost([(3.0, 4.0), (5.0, 5.5)], [(2.5, 3.0), (5.0, 6.0)]) == [[0.5, 1.0], [0.0, -0.5]]


@pytest.mark.parametrize("model", ["runs/x", "=runs/x", "pairs="])
def test_a_model_needs_a_name_and_a_directory(model):
    assert positions.named_directories(["a=b/c=d"]) == {"a": "b/c=d"}
    with pytest.raises(UserError, match="expected NAME=DIR"):
        positions.named_directories([model])


def test_the_text_is_split_in_turns_at_ends_of_lines():
    texts = ["".join(f"{name}{number:03d} {'x' * (number % 7)}\n" for number in range(400)) for name in "ab"]
    train, heldout = text_model.split(texts)
    for name, text in zip("ab", texts, strict=True):
        kept = [[line for line in part.splitlines(True) if line[0] == name] for part in (train, heldout)]
        assert "".join(kept[0] + kept[1]) == text  # all of it, in order, the end held out
        assert 0.08 < sum(map(len, kept[1])) / len(text) < 0.12
    turns = [line[0] for line in heldout.splitlines()]
    assert sum(a != b for a, b in zip(turns, turns[1:], strict=False)) == 2 * text_model.HELD_OUT - 1


def test_rows_of_the_merging_table():
    """A row per start and kind of masks, in the order of STARTS; the mean and error of the seeds."""
    merged = {name: 4.0 + number for number, name in enumerate(merging.STARTS)}
    figures = {"settings": {"distil_kv_heads": 2}, "merged": {"4": dict.fromkeys(merged, 1.0), "2": merged},
               "distilled": {"paper, masks": {"150": {"0": 3.0}, "15": {"0": 3.5, "1": 3.7}},
                             "mean-pool, no masks": {"15": {"0": 2.0}}}}
    assert merging.rows(figures) == {"mean-pool, no masks": {0: [4.0], 15: [2.0]},
                                     "paper, masks": {0: [5.0], 15: [3.5, 3.7], 150: [3.0]}}
    lines = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in merging.tables(figures).splitlines()]
    assert ["paper", "1.000", "5.000"] in lines
    assert lines[-2:] == [["mean-pool, no masks", "4.000", "2.000", ""],
                          ["paper, masks", "5.000", "3.600 ± 0.100", "3.000"]]


def results(directory, **changes) -> merging.Results:
    args = argparse.Namespace(**{"out": str(directory), "lr": 1e-3, "seeds": 3} | changes)
    return merging.Results(args, 8, torch.zeros(1, 2, dtype=torch.int64))


def test_measured_losses_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "perplexity", lambda model, tokens: model)
    results(tmp_path).measure(lambda: 1.0, "merged", "2", "paper")
    again = results(tmp_path, seeds=5)
    again.measure(lambda: 4.0, "merged", "2", "paper")
    again.measure(lambda: math.e, "merged", "1", "paper")
    assert results(tmp_path).figures["merged"] == {"2": {"paper": 0.0}, "1": {"paper": 1.0}}
    with pytest.raises(UserError, match="pass another --out"):
        results(tmp_path, lr=2e-3)


def test_printed_masks_move_by_equation_29_alone():
    """All have the same log_alpha: a scalar AdamW, at 1e-2 after a warm-up of 32 steps, along a cosine."""
    steps, log_alpha, first, second = 60, 7.5, 0.0, 0.0
    means = mask_schedule.simulate("printed", steps, seed=3)
    assert len(means) == 48
    for step, mean in enumerate(means):
        drawn = masks.draw(torch.full((32, 32), log_alpha), 3, step)
        assert mean == pytest.approx(float(drawn.mean()), abs=1e-5)
        size = 1 / (1 + math.exp(2 / 3 * math.log(1 / 11) - log_alpha))
        gap = size - max(0, 1 - step / 18)
        slope = math.copysign(1 + 2 * abs(gap), gap) * size * (1 - size) / 1024
        first, second = 0.9 * first + 0.1 * slope, 0.9 * second + 0.1 * slope**2
        moved = first / math.sqrt(second) * math.sqrt(1 - 0.9 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        share = (step + 1) / 32 if step < 32 else (1 + math.cos(math.pi * (step - 32) / 28)) / 2
        log_alpha = min(7.5, log_alpha - 1e-2 * share * moved)


def test_released_masks_follow_their_target_in_a_short_run():
    """The pull alone leaves them behind T; Eq. 29's gradient moves them on."""
    pulled = mask_schedule.simulate("released, no gradient", 100, 0)
    both = mask_schedule.simulate("released", 100, 0)
    behind = [mean - masks.target(step, 100) for step, mean in enumerate(pulled)]
    assert max(behind) == pytest.approx(0.142, abs=0.005) and min(behind) > -1e-3
    assert pulled[29] - both[29] == pytest.approx(0.0033, abs=5e-4)


def test_the_table_of_mask_schedules():
    """The mean of the seeds at each tenth, the error where it shows; the last is before the switch."""
    assert [mask_schedule.step_at(tenth, 400) for tenth in (0, 3, 8)] == [0, 120, 319]
    assert [mask_schedule.cell(seeds) for seeds in ((0.5,), (0.5, 0.501), (0.4, 0.6))] == [
        "0.50", "0.50", "0.50 ± 0.10"]
    curves = {"printed": {20: [[step / 100 for step in range(16)], [step / 50 for step in range(16)]]}}
    lines = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in mask_schedule.table(curves).splitlines()]
    assert lines[2] == ["T", "", "1.00", "0.67", "0.33", *["0.00"] * 6]
    assert lines[3][:5] == ["printed", "20", "0.00", "0.03 ± 0.01", "0.06 ± 0.02"]
    assert lines[3][-1] == "0.22 ± 0.07"


@pytest.mark.slow
def test_mask_schedule_bench(tmp_path):
    run("bench/mask_schedule.py", "--steps", 20, 30, "--seeds", 2, "--out", tmp_path)
    mean_z = json.loads((tmp_path / "mask_schedule.json").read_text())["mean_z"]
    assert mean_z.keys() == set(mask_schedule.KINDS)
    for by_steps in mean_z.values():
        assert by_steps.keys() == {"20", "30"} and [len(seed) for seed in by_steps["30"]] == [9, 9]
    assert "no gradient" in (tmp_path / "mask_schedule.md").read_text()
    assert (tmp_path / "mask_schedule.png").exists()


@pytest.mark.slow
def test_text_model_bench(tmp_path):
    words = "".join(f"the {number % 13} of {number % 17} is {number % 5}\n" for number in range(4000))
    (tmp_path / "words.txt").write_text(words)
    figures = last_line(run("bench/text_model.py", "--text", tmp_path / "words.txt", "--out",
                            tmp_path / "model", "--steps", 3, "--length", 32))
    model, tokenizer = load_model(str(tmp_path / "model")), load_tokenizer(str(tmp_path / "model"))
    assert figures["parameters"] == model.num_parameters()
    assert 0 < figures["heldout_loss"] < math.log(len(tokenizer)) + 0.5
    assert (tmp_path / "model/train.txt").read_text() + (tmp_path / "model/heldout.txt").read_text() == words


@pytest.mark.slow
def test_positions_bench(inputs, tmp_path):
    """Against itself a model loses nothing; its loss is the logarithm of its perplexity."""
    save_tiny(tmp_path / "other", seed=1)
    out, length = tmp_path / "out", 64
    figures = last_line(run("bench/positions.py", "--source", inputs["model"], "--models",
                            f"same={inputs['model']}", f"other={tmp_path / 'other'}", "--text",
                            inputs["text"], "--length", length, "--sequences", 3, "--out", out))
    tokens, _ = load_tokens(inputs["text"], load_tokenizer(inputs["model"]), 3, length)
    expected = [math.log(perplexity(load_model(path), tokens))
                for path in (inputs["model"], str(tmp_path / "other"))]
    assert figures["source"] == {"0-64": pytest.approx(expected[0])}
    assert figures["lost"]["same"] == {"0-64": 0.0}
    assert figures["lost"]["other"] == {"0-64": pytest.approx(expected[1] - expected[0])}
    assert "other: lost" in (out / "positions.md").read_text() and (out / "positions.png").exists()


@pytest.mark.slow
def test_merging_bench(inputs, tmp_path):
    """A finished row is kept; a row with masks is added to it."""
    text = tmp_path / "text.txt"
    text.write_text(4 * Path(inputs["text"]).read_text())
    words = ["bench/merging.py", "--model", inputs["model"], "--text", text, "--heldout", text, "--out",
             tmp_path / "out", "--kv-heads", 2, "--starts", "mean-pool", "--length", 32, "--budgets", 2]
    run(*words, "--seeds", 2)
    first = json.loads((tmp_path / "out/merging.json").read_text())
    run(*words, "--seeds", 1, "--masks", "l0")
    both = json.loads((tmp_path / "out/merging.json").read_text())
    assert both["distilled"]["mean-pool, no masks"] == first["distilled"]["mean-pool, no masks"]
    assert len(set(first["distilled"]["mean-pool, no masks"]["2"].values())) == 2  # the seeds differ
    assert list(both["distilled"]["mean-pool, masks"]["2"]) == ["0"]
    assert "mean-pool, masks" in (tmp_path / "out/merging.md").read_text()
    run(*words, "--seeds", 1, "--masks", "follow")
    assert "mean-pool, masks at T" in (tmp_path / "out/merging.md").read_text()


def test_following_masks_are_the_target():
    """In every step, whatever log alpha is, and no gradient reaches it."""
    log_alpha = torch.randn(2, 3, requires_grad=True)
    following = merging.FollowingMasks({"log_alpha": log_alpha}, 20, seed=0)
    for step, expected in ((0, 1.0), (3, 0.5), (6, 0.0), (15, 0.0)):
        z = following.draw(step)
        assert z.shape == (2, 3) and z.tolist() == [[pytest.approx(expected)] * 3] * 2
        assert torch.equal(following.noiseless(), z)
    z.sum().backward()
    assert not log_alpha.grad.any()


def test_the_recovery_table():
    """Budgets in ascending order, starts in the order of make smollm2, with the distance to the source."""
    starts = {name: {"perplexity": 40.0 + row} for row, name in enumerate(recovery.STARTS.values())}
    figures = {"perplexity": 33.0, "agreement": 0.5}
    trained = {"attention-refit, masks off": {"1000": figures, "200": figures},
               "paper, masks l0": {"200": figures}}
    rows = recovery.by_tokens({"trained": trained}, starts)
    names = list(recovery.STARTS.values())
    assert list(rows) == [f"{names[1]}, masks", f"{names[4]}, no masks"]
    lines = recovery.table(rows, 30.0).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["tokens of training", "0", "200", "1,000"]
    assert cells[2][1:] == ["41.00 (+36.7%)", "33.00 (+10.0%, 50.0% agree)", ""]
    assert cells[3][1:] == ["44.00 (+46.7%)", *2 * ["33.00 (+10.0%, 50.0% agree)"]]


@pytest.mark.slow
def test_recovery_bench(aligned_run, inputs, tmp_path):
    """Its figures are those of the trained student; a finished row is kept, other settings are refused."""
    home, out = tmp_path / "run", tmp_path / "out"
    copy_run(aligned_run, home / "paper")
    (home / "text").mkdir()
    text = Path(inputs["text"]).read_text()
    for name, half in (("calibration", text[: len(text) // 2]), ("heldout", text[len(text) // 2 :])):
        (home / "text" / f"{name}.txt").write_text(half)
    starts = {"source": {"perplexity": 260.0}, recovery.STARTS["paper"]: {"perplexity": 270.0}}
    (home / "starts.json").write_text(json.dumps(starts))
    words = ["bench/recovery.py", "--run", home, "--out", out, "--starts", "paper", "--length", 32, "--batch",
             2, "--heldout-sequences", 3, "--dtype", "float32", "--lr", "1e-9"]
    run(*words, "--budgets", 200)
    first = json.loads((out / "recovery.json").read_text())["trained"]
    run(*words, "--budgets", 200, "--masks", "l0")
    both = json.loads((out / "recovery.json").read_text())["trained"]
    assert both["paper, masks off"] == first["paper, masks off"] and "200" in both["paper, masks l0"]
    figures = first["paper, masks off"]["200"]
    tokens, _ = load_tokens(str(home / "text/heldout.txt"), load_tokenizer(inputs["model"]), 6, 32)
    untrained = perplexity(load_model(str(home / "paper" / "merged")), tokens[::2])  # as with this rate
    assert figures["perplexity"] == pytest.approx(untrained, rel=1e-4) and 0 <= figures["agreement"] <= 1
    assert "the paper: rotations and mean, masks" in (out / "recovery.md").read_text()
    assert not (out / "training").exists() and (out / "recovery.png").exists()
    expect_error("pass another --out", *words, "--lr", "1e-3")


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
    assert figures["step_over_floor"] > 0 and figures["layers"] == 4
    assert sum(figures["profile"].values()) == pytest.approx(1, abs=0.05)
    assert all(figures["profile"][part] > 0 for part in ("matmul", "attention", "loss", "optimizer"))
    assert 0 < figures["planned"]["memory_gib"] < 1 and "step_seconds" not in figures["planned"]


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
    assert figures["align_speedup"] > 0 and figures["align_objective_gain"] > -1e-4
    steps = figures["stages_2_to_4_s"]
    assert figures["stages_2_to_4_s_per_7b_layer"] == pytest.approx(sum(steps.values())) and len(steps) == 5


def test_the_printed_alignment_runs_on_vectors_with_the_grams():
    """Of values and, for each RoPE pair, of keys; the gain is that of objectives."""
    heads = torch.randn(2, 50, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = torch.complex(heads[..., :3], heads[..., 3:])
    key_gram = torch.einsum("gnip,gnjp->gijp", pairs.conj(), pairs)
    grams = torch.einsum("gnia,gnjb->gijab", heads, heads), key_gram
    values, keys = (torch.stack(alignment.vectors_of(gram), dim=1) for gram in grams)
    torch.testing.assert_close(torch.einsum("gina,gjnb->gijab", values, values), grams[0])
    keys = torch.view_as_complex(keys)  # [groups, heads, pairs, n]
    torch.testing.assert_close(torch.einsum("gipn,gjpn->gijp", keys.conj(), keys), grams[1])
    identity = torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6)
    for gram, unrotated in zip(grams, (identity, torch.ones_like(key_gram[:, 0])), strict=True):
        reached = alignment.objective_gain(gram, unrotated, alignment.printed_alignment(gram))
        assert (reached < -0.1).all()  # what has not been aligned is behind
        itself = alignment.objective_gain(gram, unrotated, alignment.vectors_of(gram))
        torch.testing.assert_close(itself, torch.zeros_like(itself), rtol=0, atol=1e-12)


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


def test_plans_are_those_of_the_budget():
    """LLaMA2-7B with a quarter of its kv heads: 6.74e9 parameters less three quarters of W_K and W_V."""
    assert budget.size(plans.shape("7B")).whole == 6_738_415_616
    pruned = 6_738_415_616 - 32 * 2 * 4096 * 4096 * 3 // 4
    cells = dict(zip(plans.HEADER, plans.row("7B", "2x8xA100-80GB", "all"), strict=True))
    assert (cells["model"], cells["machine"], cells["--train"]) == ("7B", "2x8xA100-80GB", "all")
    assert float(cells["between nodes"]) == pytest.approx(4 * pruned / 8 / 2**30, rel=0.01)
    assert float(cells["GiB moved"]) == pytest.approx((8 * pruned + 2 * 6_738_415_616) / 2**30, rel=0.01)
    assert float(cells["hours"]) == pytest.approx(1e8 / 512 / 128 * float(cells["s a step"]) / 3600, rel=0.05)
    assert cells["usable"] == "72" and 16 * pruned / 8 < float(cells["GiB needed"]) * 2**30 < 72 * 2**30
    assert plans.row("70B", "8xA100-40GB", "attention")[3].endswith(", too much")
    cells = dict(zip(plans.HEADER, plans.row("70B", "8xA100-80GB", "attention"), strict=True))
    assert cells["GiB needed"].endswith(", recomputed") and cells["between nodes"] == "0"


def test_masks_close_when_their_sum_over_the_steps_says(tmp_path, monkeypatch, capsys):
    """Of ten steps, eight masked: layer 0 closes after six, layer 1 half after two and half after four."""
    lines = [{"step": step, "mask_mean_per_layer": [float(step <= 6), (step <= 2) / 2 + (step <= 4) / 2]}
             for step in range(1, 9)] + [{"step": 9}, {"step": 10}]
    for name, shift in (("a", 0), ("b", 1)):
        (tmp_path / name / "train").mkdir(parents=True)
        kept = [json.dumps(line) + "\n" for line in lines[shift:]]
        (tmp_path / name / "train" / "metrics.jsonl").write_text("".join(kept))
    assert mask_order.closing_times(lines) == pytest.approx([0.6, 0.3])
    with pytest.raises(UserError, match="expected a training with masks"):
        mask_order.closing_times(lines[8:])
    monkeypatch.setattr(sys, "argv", ["mask_order", str(tmp_path / "a"), str(tmp_path / "b")])
    mask_order.main()
    printed = capsys.readouterr().out
    times = json.loads(printed.splitlines()[-1])["closing_times"]
    assert times[str(tmp_path / "a")] == pytest.approx([0.6, 0.3])
    assert times[str(tmp_path / "b")] == pytest.approx([5 / 9, 2 / 9])
    assert f"{(0.6 + 5 / 9) / 2:.3f} ± " in printed
