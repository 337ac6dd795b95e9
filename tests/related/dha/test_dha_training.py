"""related/dha: a step's gradients, its optimizer, resumption, and the commands from search to the report."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.data.rows import Sample
from common.models.equivalence import max_difference
from common.models.load import load_model
from common.training.packing import build_row
from dha_models import GROUPS, WHOLE, random_operators, tokens
from models import save_tiny, tiny_model
from reference import Gradients, rates
from related.dha import fusion, start, training
from related.dha.training import all_logits
from runs import expect_error, read, run

pytestmark = pytest.mark.slow
BATCHES = {"batch": 4, "seed": 0, "tokens_per_microbatch": 64}  # two rows a step
RATES = {"lr": 1e-3, "operator_lr": 2e-2, "lambda_lr": 5.0}
FLAGS = SimpleNamespace(warmup=0.1, print_every=100, heldout_every=100)
SMALL = "--sequences 24 --heldout-sequences 4 --length 32 --batch 4 --steps 4 --heldout-every 2".split()
FAST = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]


def random_samples(count: int) -> list:
    rows = torch.randint(256, (count, 32), generator=torch.Generator().manual_seed(5)).tolist()
    return [Sample(row[:-1], row[-1:]) for row in rows]


def fusing(path: str, directory, ranks, count: int, margin_steps: int = 20):
    """Fusion of the model at `path`, begun in a directory or resumed there: its job and schedule."""
    job = training.begin(str(directory), RATES | {"steps": count}, path, ranks, GROUPS)
    return job, training.make_schedule(BATCHES, count, FLAGS, margin_steps=margin_steps)


@pytest.mark.parametrize(("groups", "multiplier", "number", "margin"), [
    (GROUPS, 3.0, 100, 0.0), (GROUPS, 3.0, 1, 0.999 * 0.95), (WHOLE, None, 100, None)])
def test_operator_gradient_is_that_of_the_whole_objective(
        tmp_path, group_of_one, monkeypatch, groups, multiplier, number, margin):
    """That of L_lm is summed over ranks, here two that are alike; that of fusion counts once."""
    monkeypatch.setattr(training, "sum_over_ranks", lambda leaves: [
        leaf.grad.mul_(2) for leaf in leaves if leaf.grad is not None])
    chosen = {name: rate for name, rate in RATES.items() if multiplier or name != "lambda_lr"}
    job = training.begin(str(tmp_path / "run"), chosen, save_tiny(tmp_path / "model"), group_of_one, groups)
    samples, trained, job.step = random_samples(4), training.operators_in(job.trainee), number
    with torch.no_grad():
        if multiplier:
            job.trainee.replicated[training.MULTIPLIER].fill_(multiplier)
        for name, changes in random_operators(groups).items():
            trained[name].add_(0.1 * changes)
    operators = {name: operator.detach().clone().requires_grad_() for name, operator in trained.items()}
    schedule = training.make_schedule(BATCHES, 80, FLAGS, margin_steps=20)
    step = Gradients(job, schedule, [build_row(samples[:2], 4), build_row(samples[2:], 4)], [])
    training.take_step(step, samples)

    model, batch = fusion.with_operators(tiny_model(), operators, groups), training.as_tokens(samples)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    if number == 100:
        assert step.metrics["heldout"] == pytest.approx(float(loss.detach()))
    objective, of_fusion = 2 * loss, fusion.fusion_loss(operators)
    if multiplier:
        excess = (of_fusion - margin).clamp(min=0)
        assert (excess == 0) == (number == 1)  # within the margin
        objective = objective + multiplier * excess
        ascent = job.trainee.replicated[training.MULTIPLIER].grad
        assert float(ascent) == pytest.approx(float(excess.detach()))
    objective.backward()
    for name, operator in operators.items():
        torch.testing.assert_close(trained[name].grad, operator.grad, rtol=1e-3, atol=1e-6)
    assert step.metrics["fusion_loss"] == pytest.approx(float(of_fusion.detach()))


def test_weights_and_operators_descend_and_lambda_ascends_each_at_its_rate(tmp_path, group_of_one):
    job, _ = fusing(save_tiny(tmp_path / "model"), tmp_path / "run", group_of_one, 80)
    multiplier = job.trainee.replicated[training.MULTIPLIER]
    for name, rate in rates(job.optimizer, job.trainee).items():
        expected = 2e-2 if name.startswith("replicated.") else 1e-3
        assert rate == (5.0 if name.endswith(training.MULTIPLIER) else expected)
    for group in job.optimizer.param_groups:
        assert group["maximize"] == (group["params"][0] is multiplier)


def test_a_resumed_fusion_ends_bit_identical(tmp_path, group_of_one):
    path, ends = save_tiny(tmp_path / "model"), []
    for name, stops in (("whole", (12,)), ("stopped", (5, 12))):
        for stop in stops:
            job, schedule = fusing(path, tmp_path / name, group_of_one, 12, margin_steps=4)
            assert job.step == (5 if name == "stopped" and stop == 12 else 0)
            for step in training.steps(job, schedule, random_samples(16), stop):
                training.take_step(step, random_samples(4))
        ends.append(training.last_weights(str(tmp_path / name)))
    torch.testing.assert_close(*ends, rtol=0, atol=0)  # weights, operators, lambda and step


def dha(command: str, *arguments, **options):
    return run(f"related/dha/{command}.py", *arguments, **options)


def summary_of(path: Path) -> dict:
    return read(path / "stage.json")["summary"]


@pytest.fixture(scope="module")
def halved(inputs, tmp_path_factory) -> Path:
    """A directory with the runs half/ and quarter/ of search and fusion."""
    home = tmp_path_factory.mktemp("halved")
    (home / "heldout.txt").write_text(Path(json.__file__).read_text())
    flags = ["--text", inputs["text"], "--heldout", home / "heldout.txt", *SMALL]
    for name, source, kv_heads, processes in (("half", inputs["model"], 4, 2),
                                              ("quarter", home / "half" / "fused", 2, 0)):
        dha("search", "--run-dir", home / name, "--model", source, "--kv-heads", kv_heads, *flags,
            processes=processes)
        dha("fuse", "--run-dir", home / name, *FAST, processes=processes)
    return home


def test_two_halvings_each_search_and_fuse_and_all_their_steps_count(halved):
    steps, heads_before = 0, {kind: [8] * 3 for kind in fusion.PROJECTIONS}
    for name, kv_heads in (("half", 4), ("quarter", 2)):
        search, fused = read(halved / name / "searched" / "stage.json"), summary_of(halved / name / "fused")
        searched = search["summary"]
        heads = {kind: searched[kind]["heads"] for kind in fusion.PROJECTIONS}
        for kind, groups in search["groups"].items():
            assert [len(layer_groups) for layer_groups in groups] == heads[kind]
            assert sum(heads[kind]) == kv_heads * 3 and searched[kind]["source_heads"] == heads_before[kind]
        assert searched["steps_so_far"] == steps + 4 and fused["steps_so_far"] == steps + 4 + fused["steps"]
        assert fused["fusion_loss"] < 1e-3 and fused["steps"] % 10 == 0 and fused["cache_heads"] == heads
        steps, heads_before = fused["steps_so_far"], heads


def test_sources_are_whole_llamas_or_fused_on_the_same_data(halved, tmp_path):
    shared = save_tiny(tmp_path / "shared", num_key_value_heads=4)
    for source, message in ((shared, "or heads that related/dha/fuse.py fused, found 4 for 8"),
                            (halved / "half" / "fused", "as in the search before, found demo")):
        expect_error(message, "related/dha/search.py", "--run", tmp_path / "run", "--model", source,
                     "--kv-heads", 2, "--sequences", 24, "--length", 32)


def test_rows_of_the_same_cache_and_tokens_are_reported_and_others_refused(inputs, halved):
    home = halved / "quarter"
    steps, searched = (summary_of(home / name)["steps_so_far"] for name in ("fused", "searched"))
    total, checkpoints = steps + 4, {"source": inputs["model"]}
    for weights, name in start.NAMES.items():
        dha("start", "--run", home, "--weights", weights)
        checkpoints[name] = home / f"start-{name}"
    checkpoints["dha"] = home / "fused"
    for name, checkpoint in checkpoints.items():
        dha("pretrain", "--run", home, "--steps", total, "--name", name, "--checkpoint", checkpoint)
    dha("pretrain", "--run", home, "--steps", total, "--name", "larger", "--batch", 8)
    assert summary_of(home / "larger")["steps"] == 4 * 4 / 8  # for the same tokens
    expect_error("larger: expected the batch of dha", "related/dha/report.py", "--run", home,
                 "--names", "larger", "dha")
    dha("report", "--run", home, "--names", *checkpoints)
    assert (home / "cka-fused.png").exists()
    rows = summary_of(home / "compare")["rows"]
    cached = {name: row["cache_bytes_per_token"] for name, row in rows.items()}
    assert cached.pop("source") == 4 * 2 * 3 * 2 * 8 * 4 and {*cached.values()} == {2 * 3 * 2 * 8 * 4}
    first = {name: row["heldout"][0][0] // (4 * 32) for name, row in rows.items()}
    assert first == {"source": 0, "cold": searched, "unfused": searched, "dha": steps}
    assert rows["cold"]["heldout"][0] != rows["unfused"]["heldout"][0]
    assert {row["heldout"][-1][0] for row in rows.values()} == {total * 4 * 32}
    cold = read(home / "cold" / "stage.json")
    for field in ("tokens", "data", "cache_bytes_per_token"):
        (home / "cold/stage.json").write_text(json.dumps(cold | {"summary": cold["summary"] | {field: 0}}))
        expect_error(f"cold: expected the {field} of dha", "related/dha/report.py", "--run", home,
                     "--force", "--names", "cold", "dha")


def test_closed_forms_and_aligned_heads_as_commands(inputs, halved):
    """From one search: what its groups cost in steps, refits, and heads that are aligned for fusion."""
    home, rotated = halved / "half", halved / "half" / "rotated"
    for place, model in ((home, inputs["model"]), (rotated, home / "searched")):
        run("01_calibrate.py", "--run", place, "--model", model, "--text", inputs["text"], "--length", 32,
            "--sequences", 8)
    kl = {}
    for name, steps, flags in (
        ("uniform", 0, ["--counts", "uniform"]), ("measured", 0, []),
        ("output", 0, ["--counts", "uniform", "--refit", "output", "--name", "output"]),
        ("search", 4, ["--counts", "search", "--groups", "search"]),
    ):
        dha("start", "--run", home, "--merge", "closed-form", "--sequences", 8, *flags)
        summary = summary_of(home / f"start-{name}")
        assert summary["steps_so_far"] == steps
        kl[name] = summary["kl"]
    assert kl["output"] < kl["uniform"] > kl["measured"]

    dha("start", "--run", home, "--merge", "none")
    logits = [all_logits(load_model(str(place / "searched")), tokens()) for place in (home, rotated)]
    assert max_difference(*logits) < 1e-4
    dha("start", "--run", rotated, "--weights", "searched")
    dha("report", "--run", home, "--models", f"measured={home / 'start-measured'}",
        f"pooled={rotated / 'start-unfused'}")
    rows = summary_of(home / "starts")["rows"]
    assert rows["source"]["kl"] == 0 < rows["measured"]["kl"] < rows["pooled"]["kl"]
