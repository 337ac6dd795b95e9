"""related/dha: search, fusion and continued training, and the inputs that they refuse."""

from types import SimpleNamespace

import pytest
import torch

from common.data.rows import Sample
from common.run.errors import UserError
from common.training.packing import build_row
from dha_models import GROUPS, WHOLE, example_records, fused_tiny, random_operators
from models import save_tiny, tiny_model
from reference import Gradients
from related.dha import fusion, records, search, training
from runs import save_record

pytestmark = pytest.mark.slow
DATA = {"batch": 4, "seed": 0, "tokens_per_microbatch": 128}
SETTINGS = {"lr": 1e-3, "operator_lr": 2e-2, "lambda_lr": 5.0}
FLAGS = SimpleNamespace(warmup=0.1, print_every=100, heldout_every=100)


def random_samples(count: int) -> list:
    rows = torch.randint(256, (count, 32), generator=torch.Generator().manual_seed(5)).tolist()
    return [Sample(row[:-1], row[-1:]) for row in rows]


def fusing(path: str, directory, ranks, count: int, margin_steps: int = 20):
    """Fusion of the model at `path`, begun in a directory or resumed there: its job and schedule."""
    job = training.begin(str(directory), SETTINGS | {"steps": count}, path, ranks, GROUPS)
    return job, training.make_schedule(DATA, count, FLAGS, margin_steps=margin_steps)


def gradients(job, schedule, number: int, rows: list) -> dict:
    """A step up to the optimizer; returns its figures."""
    job.step = number
    step = Gradients(job, schedule, rows, [])
    training.take_step(step, random_samples(4))
    return step.metrics


def text_loss(model, samples) -> torch.Tensor:
    """transformers' own loss."""
    batch = training.as_tokens(samples)
    return model(input_ids=batch, labels=batch, use_cache=False).loss


@pytest.mark.parametrize(("groups", "multiplier", "ranks", "number", "margin"), [
    (GROUPS, 3.0, 2, 100, 0.0), (GROUPS, 3.0, 1, 1, 0.999 * 0.95), (WHOLE, None, 1, 100, None)])
def test_operator_gradient_is_that_of_the_whole_objective(
        tmp_path, group_of_one, monkeypatch, groups, multiplier, ranks, number, margin):
    """Of L_lm it is summed over ranks that are all alike; fusion adds its loss once, search does not."""
    def sum_over_ranks(leaves) -> None:
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad.mul_(ranks)

    monkeypatch.setattr(training, "sum_over_ranks", sum_over_ranks)
    fusing = multiplier is not None
    settings = SETTINGS if fusing else {name: SETTINGS[name] for name in ("lr", "operator_lr")}
    model = save_tiny(tmp_path / "model")
    job = training.begin(str(tmp_path / "fusion"), settings, model, group_of_one, groups)
    samples, trained = random_samples(4), training.operators_in(job.trainee)
    assert (training.MULTIPLIER in job.trainee.replicated) == fusing
    with torch.no_grad():
        if fusing:
            job.trainee.replicated[training.MULTIPLIER].fill_(multiplier)
        for name, changes in random_operators(groups).items():
            trained[name].add_(0.1 * changes)
    operators = {name: operator.detach().clone().requires_grad_() for name, operator in trained.items()}
    schedule = training.make_schedule(DATA, 80, FLAGS, margin_steps=20)
    figures = gradients(job, schedule, number, [build_row(samples[:2], 4), build_row(samples[2:], 4)])

    loss = text_loss(fusion.with_operators(tiny_model(), operators, groups), samples)
    of_text = torch.autograd.grad(loss, list(operators.values()), retain_graph=True)
    assert all(gradient.any() for gradient in of_text)
    objective, of_fusion = ranks * loss, fusion.fusion_loss(operators)
    if fusing:
        excess = (of_fusion - margin).clamp(min=0)
        assert (excess == 0) == (number == 1)  # within the margin
        objective = objective + multiplier * excess
        assert (figures["lambda"], figures["margin"]) == (multiplier, pytest.approx(margin))
        ascent = job.trainee.replicated[training.MULTIPLIER].grad
        assert float(ascent) == pytest.approx(float(excess.detach()))
    objective.backward()
    for name, operator in operators.items():
        torch.testing.assert_close(trained[name].grad, operator.grad, rtol=1e-3, atol=1e-6)
    assert figures["fusion_loss"] == pytest.approx(float(of_fusion.detach()))


def test_weights_and_operators_descend_and_lambda_ascends_each_at_its_rate(tmp_path, group_of_one):
    job, _ = fusing(save_tiny(tmp_path / "model"), tmp_path / "fusion", group_of_one, 80)
    rates = {}
    for group in job.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
        for parameter in group["params"]:
            rates[parameter] = group["lr"]
            parameter.grad = torch.ones_like(parameter)
    weight, multiplier = job.trainee.net.model.norm.weight, job.trainee.replicated[training.MULTIPLIER]
    before = weight.detach().clone()
    job.optimizer.step()
    assert float(multiplier.detach()) == pytest.approx(5.0)  # the first step of Adam has the size of its rate
    for name, operator in fusion.starting_operators(GROUPS, 8).items():
        torch.testing.assert_close(job.trainee.replicated[name].detach(), operator - 2e-2)
    assert rates[weight] == 1e-3 and bool(((weight.detach() - before).full_tensor() < 0).all())


def test_a_resumed_fusion_ends_bit_identical(tmp_path, group_of_one):
    path, ends = save_tiny(tmp_path / "model"), []
    for name, stops in (("whole", (12,)), ("stopped", (5, 12))):
        for stop in stops:
            job, schedule = fusing(path, tmp_path / name, group_of_one, 12, margin_steps=4)
            assert job.step == (5 if name == "stopped" and stop == 12 else 0)
            for step in training.steps(job, schedule, random_samples(16), stop):
                training.take_step(step, random_samples(4))
        ends.append(training.last_weights(str(tmp_path / name)))
    for part in range(2):  # weights and operators
        assert ends[0][part].keys() == ends[1][part].keys()
        assert all(torch.equal(tensor, ends[1][part][key]) for key, tensor in ends[0][part].items())
    assert ends[0][2:] == ends[1][2:] and ends[0][2] > 0 and ends[0][3] == 12
    trained = training.operators_in(job.trainee)
    assert all(torch.equal(operator, trained[key]) for key, operator in ends[1][1].items())


def test_operators_that_change_something_are_refused(tmp_path, monkeypatch):
    path = save_tiny(tmp_path / "model")
    assert training.check_unchanged(path, GROUPS, random_samples(2)) <= training.LOGIT_TOLERANCE
    monkeypatch.setattr(training, "starting_operators", lambda groups, _: random_operators(groups))
    with pytest.raises(UserError, match="with operators"):
        training.check_unchanged(path, GROUPS, random_samples(2))


def test_fused_checkpoints_are_sources_and_other_shared_heads_are_not(tmp_path):
    assert search.source_record("model", tiny_model().config) is None
    with pytest.raises(UserError, match="model_type llama"):
        search.source_record("model", tiny_model(model_type="mistral").config)
    config, examples = fused_tiny()[1].config, example_records()
    path = save_record(tmp_path, examples[records.FUSE])
    assert search.source_record(path, config) == examples[records.FUSE]
    for stage in (records.START, records.PRETRAIN):
        save_record(tmp_path, examples[stage])
        with pytest.raises(UserError, match="or heads that related/dha/fuse.py fused, found 2 for 8"):
            search.source_record(path, config)
