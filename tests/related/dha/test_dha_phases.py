"""related/dha: search, fusion and continued training, and the inputs that they refuse."""

import itertools
import json
import os
from types import SimpleNamespace

import pytest
import torch

from common.cli import UserError
from common.families import Geometry
from common.training.engine import Step, steps
from conftest import byte_tokenizer, expect_error, save_tiny, tiny_model
from dha_models import (
    GROUPS,
    SMALL,
    WHOLE,
    example_records,
    fused_tiny,
    random_operators,
    save_record,
    tokens,
)
from related.dha import fusion, records, search, training

DATA = {"batch": 4, "seed": 0, "tokens_per_microbatch": 128}


def random_samples(count: int) -> list:
    rows = torch.randint(256, (count, 32), generator=torch.Generator().manual_seed(5)).tolist()
    return [training.Sample(row[:-1], row[-1:]) for row in rows]


def fusing(path: str, directory, ranks, count: int):
    """Fusion of the model at `path`, begun in a directory or resumed there: its job and schedule."""
    os.makedirs(directory, exist_ok=True)
    start, rates = fusion.starting_operators(GROUPS, 8), (1e-3, 2e-2, 5.0)
    job = training.begin(str(directory), {"steps": count}, path, ranks, rates, start)
    fusion.set_operators(job.trainee.net, training.operators_in(job.trainee), GROUPS)
    return job, training.make_schedule(DATA, count, 0.1, 100)


def heldout(every: int = 100) -> training.Heldout:
    return training.Heldout(random_samples(4), every, DATA["tokens_per_microbatch"], "cpu")


def fuse(job, schedule, margin_steps: int, until: int | None = None) -> None:
    for step in steps(job, schedule, random_samples(16), until):
        training.fuse_step(step, heldout(), margin_steps)


class Gradients(Step):
    """A step that leaves the gradients as they are."""

    def update(self, **figures) -> None:
        self.figures |= figures


def fused_gradients(job, schedule, number: int, rows: list) -> dict:
    """A step of fusion up to the optimizer, with t falling over 20 steps; returns its figures."""
    job.step = number
    step = Gradients(job, schedule, rows, [])
    training.fuse_step(step, heldout(), 20)
    return step.figures


def move_operators(job) -> None:
    """Random changes of all operators, and a multiplier of 3."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        job.trainee.replicated[training.MULTIPLIER].fill_(3.0)
        for operator in training.operators_in(job.trainee).values():
            operator.add_(0.1 * torch.randn(operator.shape, generator=generator))


def whole_parameters(trainee) -> list[torch.Tensor]:
    parameters = []
    for tensor in trainee.parameters():
        tensor = tensor.detach()
        parameters.append(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone())
    return parameters


@pytest.mark.slow
def test_lagrangian_drives_the_fusion_loss_down_and_lambda_only_rises_where_it_is_too_large(
    tmp_path, group_of_one
):
    job, schedule = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80)
    fuse(job, schedule, 20)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = fusion.fusion_loss(fusion.starting_operators(GROUPS, 8))
    assert lines[0]["fusion_loss"] == pytest.approx(float(first))
    assert lines[-1]["fusion_loss"] < 0.05 * lines[0]["fusion_loss"]
    allowed = True
    for before, after in itertools.pairwise(lines):
        assert after["lambda"] >= before["lambda"]
        allowed = allowed and before["fusion_loss"] <= before["margin"]
        assert not allowed or after["lambda"] == 0
    assert lines[-1]["lambda"] > 1
    rates = [line["lr"] / 1e-3 for line in lines]
    assert max(rates) == pytest.approx(1) and rates[-1] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_operator_gradient_is_that_of_the_whole_objective(tmp_path, group_of_one, monkeypatch, ranks):
    """Of L_lm it is summed over ranks that are all alike; the fusion loss is added once."""
    def sum_over_ranks(leaves) -> None:
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad.mul_(ranks)

    monkeypatch.setattr(training, "sum_over_ranks", sum_over_ranks)
    job, schedule = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80)
    samples = random_samples(4)
    move_operators(job)
    rows = [training.build_row(samples[:2], 4), training.build_row(samples[2:], 4)]
    fused_gradients(job, schedule, 40, rows)  # t is 0

    trained = training.operators_in(job.trainee)
    operators = {name: operator.detach().clone().requires_grad_() for name, operator in trained.items()}
    model = fusion.with_operators(tiny_model(), operators, GROUPS)
    batch = training.as_tokens(samples)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    of_text = torch.autograd.grad(loss, list(operators.values()), retain_graph=True)
    assert all(gradient.any() for gradient in of_text)
    (ranks * loss + 3.0 * fusion.fusion_loss(operators)).backward()
    for name, operator in operators.items():
        torch.testing.assert_close(trained[name].grad, operator.grad, rtol=1e-3, atol=1e-6)
    multiplier = job.trainee.replicated[training.MULTIPLIER]
    assert float(multiplier.grad) == pytest.approx(float(fusion.fusion_loss(operators).detach()))


def test_no_gradient_pulls_while_the_fusion_loss_is_within_its_margin(tmp_path, group_of_one):
    job, schedule = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80)
    with torch.no_grad():
        job.trainee.replicated[training.MULTIPLIER].fill_(3.0)
    figures = fused_gradients(job, schedule, 1, [])  # t is 0.95, the fusion loss of the start about 0.5
    assert figures["margin"] == pytest.approx(0.999 * 0.95) and figures["fusion_loss"] < figures["margin"]
    assert figures["lambda"] == 3.0
    assert float(job.trainee.replicated[training.MULTIPLIER].grad) == 0
    assert all(not operator.grad.any() for operator in training.operators_in(job.trainee).values())
    figures = fused_gradients(job, schedule, 19, [])
    excess = figures["fusion_loss"] - figures["margin"]
    assert float(job.trainee.replicated[training.MULTIPLIER].grad) == pytest.approx(excess) and excess > 0


def test_weights_and_operators_descend_and_lambda_ascends_each_at_its_rate(tmp_path, group_of_one):
    job, schedule = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80)
    multiplier = job.trainee.replicated[training.MULTIPLIER]
    rates = {}
    for group in job.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
        for parameter in group["params"]:
            rates[id(parameter)] = group["lr"]
            parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in training.operators_in(job.trainee).values()]
    weight = job.trainee.net.model.norm.weight
    weight_before = weight.detach().clone()
    job.optimizer.step()
    assert float(multiplier.detach()) == pytest.approx(5.0)  # the first step of Adam has the size of its rate
    for operator, start in zip(training.operators_in(job.trainee).values(), before, strict=True):
        torch.testing.assert_close(operator.detach(), start - 2e-2)
    assert rates[id(weight)] == 1e-3 and bool(((weight.detach() - weight_before).full_tensor() < 0).all())


def test_search_trains_operators_by_the_language_model_loss_alone(tmp_path, group_of_one):
    path = save_tiny(tmp_path / "model")
    schedule, samples = training.make_schedule(DATA, 10, 0.1, 100), random_samples(4)
    start = fusion.starting_operators(WHOLE, 8)
    job = training.begin(str(tmp_path), {}, path, group_of_one, (1e-3, 1e-2), start)
    assert training.MULTIPLIER not in job.trainee.replicated
    operators = training.operators_in(job.trainee)
    fusion.set_operators(job.trainee.net, operators, WHOLE)
    step = Gradients(job, schedule, [training.build_row(samples, 4)], [])
    training.search_step(step, heldout())
    figures, trained = step.figures, operators
    assert figures["fusion_loss"] == pytest.approx(float(fusion.fusion_loss(start)))

    operators = {name: operator.clone().requires_grad_() for name, operator in start.items()}
    batch = training.as_tokens(samples)
    model = fusion.with_operators(tiny_model(), operators, WHOLE)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    assert figures["heldout"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, operator in operators.items():
        torch.testing.assert_close(trained[name].grad, operator.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_fusion_ends_bit_identical(tmp_path, group_of_one):
    path, ends = save_tiny(tmp_path / "model"), []
    for stops in ((12,), (5, 12)):
        for stop in stops:
            job, schedule = fusing(path, tmp_path / str(len(stops)), group_of_one, 12)
            assert job.step == (5 if stops == (5, 12) and stop == 12 else 0)
            fuse(job, schedule, 4, stop)
        ends.append(whole_parameters(job.trainee))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert float(job.trainee.replicated[training.MULTIPLIER].detach()) > 0
    weights, operators, multiplier, step = training.last_weights(str(tmp_path / "2"))
    assert step == 12 and multiplier == float(job.trainee.replicated[training.MULTIPLIER].detach())
    trained = training.operators_in(job.trainee)
    assert all(torch.equal(operators[name], operator) for name, operator in trained.items())
    assert weights.keys() == tiny_model().state_dict().keys()


def test_learning_rates_end_at_a_tenth_of_their_peak():
    schedule = training.make_schedule(DATA, 40, 0.1, 100)
    rates = [schedule.rate(step) for step in range(41)]
    assert schedule.warmup == 4 and rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[22] == pytest.approx(0.55) and rates[40] == pytest.approx(0.1)  # half way, and the end


def test_training_stops_where_it_is_done_and_asks_every_so_many_steps(monkeypatch):
    def steps(job, schedule, samples, until):
        assert not job.stopped
        stops.append(until)
        while job.step < until and not job.stopped:
            yield job.step
            job.step += 1
            job.stopped = job.step == stopped_at

    stops, stopped_at, schedule = [], None, SimpleNamespace(steps=33)
    job = SimpleNamespace(step=7, stopped=False)
    monkeypatch.setattr(training, "steps", steps)
    assert list(training.steps_until(lambda: False, job, schedule, [], 10)) == list(range(7, 33))
    assert stops == [10, 20, 30, 33]
    job.step, stops[:] = 0, []
    assert len(list(training.steps_until(lambda: job.step >= 20, job, schedule, [], 10))) == 20
    assert stops == [10, 20]
    job.step, stops[:], stopped_at = 0, [], 15
    assert len(list(training.steps_until(lambda: False, job, schedule, [], 10))) == 15 and stops == [10, 20]


def test_text_that_changed_since_search_is_refused(tmp_path):
    ranks, tokenizer = SimpleNamespace(say=lambda text: None), byte_tokenizer()
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.txt").write_text(f"some text to {name} on, long enough")
    data = {"text": str(tmp_path / "train.txt"), "heldout": str(tmp_path / "heldout.txt")}
    data |= {"sequences": 3, "heldout_sequences": 2, "length": 8}
    samples, heldout = training.load_data(data, tokenizer, ranks)
    assert len(samples) == 3 and len(heldout) == 2 and training.as_tokens(samples).shape == (3, 8)
    training.load_data(data, tokenizer, ranks)
    (tmp_path / "heldout.txt").write_text("some text to judge on, long enough")
    with pytest.raises(UserError, match="expected the tokens that search read"):
        training.load_data(data, tokenizer, ranks)


def test_models_it_does_not_apply_to_are_refused_with_the_reason(group_of_one, tmp_path):
    for options, reason in (
        ({"num_key_value_heads": 4}, "MHA"),
        ({"model_type": "mistral"}, "model_type llama"),
    ):
        with pytest.raises(UserError, match=reason):
            search.source_record("model", tiny_model(**options).config)
    assert search.source_record("model", tiny_model().config) is None
    path = save_tiny(tmp_path / "model")
    fusing(path, tmp_path, group_of_one, 10)
    with pytest.raises(UserError, match="steps 10 -> 12"):
        fusing(path, tmp_path, group_of_one, 12)
    training.check_unchanged(path, fusion.starting_operators(GROUPS, 8), GROUPS, tokens())
    with pytest.raises(UserError, match="with operators"):
        training.check_unchanged(path, random_operators(), GROUPS, tokens())


def test_flags_of_the_budget():
    shape = Geometry(layers=4, heads=8, kv_heads=8, head_dim=8, hidden=64)

    def budget(kv_heads=None, ladder=None):
        args, heads = SimpleNamespace(kv_heads=kv_heads, ladder=ladder), {"key": [8] * 4, "value": [8] * 4}
        return search.head_budget(args, shape, heads)

    assert budget() == search.Budget(2, [1, 2, 4])
    assert budget(1) == search.Budget(1, [1, 2]) and budget(4, [8, 2, 4]) == search.Budget(4, [2, 4, 8])
    for kv_heads, ladder, reason in (
        (3, None, "kv-heads"),
        (2, [3, 2], "divisors of 8"),
        (2, [4, 8], "sum to 8"),
    ):
        with pytest.raises(UserError, match=reason):
            budget(kv_heads, ladder)
    shape = Geometry(layers=4, heads=8, kv_heads=4, head_dim=8, hidden=64)
    args, heads = SimpleNamespace(kv_heads=None, ladder=None), {"key": [8, 2, 2, 4], "value": [4] * 4}
    assert search.head_budget(args, shape, heads) == search.Budget(2, [1, 2, 4])
    args.ladder, heads["value"] = [2], [8, 4, 1, 2]  # one layer of value heads has no rung
    with pytest.raises(UserError, match=r"divisors of \[8, 4, 1, 2\]"):
        search.head_budget(args, shape, heads)
    args.kv_heads = 4
    with pytest.raises(UserError, match="for 4 key/value heads, found 4"):
        search.head_budget(args, shape, heads)


def test_fused_checkpoints_are_sources_and_other_shared_heads_are_not(tmp_path):
    config, examples = fused_tiny()[1].config, example_records()
    for stage in (records.FUSE, records.POOL, records.PRETRAIN):
        save_record(tmp_path, stage, examples[stage])
        if stage == records.FUSE:
            assert search.source_record(str(tmp_path / "artifact"), config) == examples[stage]
        else:
            with pytest.raises(UserError, match="or heads that related/dha/fuse.py fused, found 2 for 8"):
                search.source_record(str(tmp_path / "artifact"), config)


def test_a_gqa_llama_is_refused_before_anything_is_written(inputs, tmp_path):
    source, home = save_tiny(tmp_path / "gqa", num_key_value_heads=4), tmp_path / "run"
    texts = ["--text", inputs["text"], "--heldout", __file__, *SMALL]
    expect_error("(MHA)", "related/dha/search.py", "--run", home, "--model", source, *texts)
    assert [path for path in home.rglob("*") if path.suffix != ".lock"] == []


@pytest.mark.parametrize("text, heldout, length, accepted", [
    ("a.txt", "b.txt", 2, True), ("a.txt", "b.txt", 32, True),
    ("demo", "demo", 8, True), ("c4", "c4", 8, True),
    ("a.txt", "a.txt", 8, False), ("a.txt", "b.txt", 1, False), ("a.txt", "b.txt", 33, False),
])  # fmt: skip
def test_held_out_text_is_another_and_predicts_something(text, heldout, length, accepted):
    args = SimpleNamespace(text=text, heldout=heldout, length=length)
    if accepted:
        search.check_texts(args, 32)
    else:
        with pytest.raises(UserError):
            search.check_texts(args, 32)
