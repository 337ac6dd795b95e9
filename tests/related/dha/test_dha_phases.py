"""related/dha: the gradients of a step, their optimizer, and a fusion that is stopped and resumed."""

from types import SimpleNamespace

import pytest
import torch

from common.data.rows import Sample
from common.training.packing import build_row
from dha_models import GROUPS, WHOLE, random_operators
from models import save_tiny, tiny_model
from reference import Gradients
from related.dha import fusion, training

pytestmark = pytest.mark.slow
BATCHES = {"batch": 4, "seed": 0, "tokens_per_microbatch": 64}  # two rows a step
RATES = {"lr": 1e-3, "operator_lr": 2e-2, "lambda_lr": 5.0}
FLAGS = SimpleNamespace(warmup=0.1, print_every=100, heldout_every=100)


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
    rates = {name: rate for name, rate in RATES.items() if multiplier or name != "lambda_lr"}
    job = training.begin(str(tmp_path / "run"), rates, save_tiny(tmp_path / "model"), group_of_one, groups)
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
        assert (step.metrics["lambda"], step.metrics["margin"]) == (multiplier, pytest.approx(margin))
        ascent = job.trainee.replicated[training.MULTIPLIER].grad
        assert float(ascent) == pytest.approx(float(excess.detach()))
    objective.backward()
    for name, operator in operators.items():
        torch.testing.assert_close(trained[name].grad, operator.grad, rtol=1e-3, atol=1e-6)
    assert step.metrics["fusion_loss"] == pytest.approx(float(of_fusion.detach()))


def test_weights_and_operators_descend_and_lambda_ascends_each_at_its_rate(tmp_path, group_of_one):
    """The first step of Adam has the size of its learning rate."""
    job, _ = fusing(save_tiny(tmp_path / "model"), tmp_path / "run", group_of_one, 80)
    before = {name: parameter.detach().clone() for name, parameter in job.trainee.named_parameters()}
    for group in job.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    for parameter in job.trainee.parameters():
        parameter.grad = torch.ones_like(parameter)
    job.optimizer.step()
    for name, parameter in job.trainee.named_parameters():
        expected = -2e-2 if name.startswith("replicated.") else -1e-3
        expected = 5.0 if name.endswith(training.MULTIPLIER) else expected
        change = parameter.detach() - before[name]
        torch.testing.assert_close(change, torch.full_like(change, expected), rtol=1e-3, atol=0)


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
    assert ends[0][2] > 0
    torch.testing.assert_close(training.operators_in(job.trainee), ends[1][1], rtol=0, atol=0)
