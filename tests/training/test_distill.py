"""The phases of stage 5 against Eq. 29-31 written out."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import paper
from common.data.rows import Sample
from common.method import masks
from common.models import blending
from common.models.forward import attending
from common.training.attention import Trainee
from common.training.chunked import next_token_loss
from common.training.engine import Job
from common.training.mask_state import SWITCH, Masks, switch_step
from common.training.packing import build_row
from models import tiny_model
from reference import ALONE, SAMPLES, SCHEDULE, Gradients, masked_student, stage5

TWO_ROWS = [build_row(part, len(SAMPLES)) for part in (SAMPLES[:2], SAMPLES[2:])]


def tiny_trainee(seed: int) -> Trainee:
    return Trainee(tiny_model(seed=seed, attn_implementation="packed"))


def sample_logits(trainee, sample: Sample) -> torch.Tensor:
    """Logits [T - 1, V] of the predicted tokens of a sample by itself."""
    tokens = torch.tensor([[*sample.prompt, *sample.answer]])
    with attending(trainee.net, "sdpa"):
        return trainee.net(input_ids=tokens, use_cache=False).logits[0, :-1]


def distillation_terms(student, teacher, kl_on="prompt") -> dict[str, torch.Tensor]:
    """Eq. 30's two terms from whole logits: means over a sample's tokens, then over the samples."""
    terms = {"kl": 0.0, "bild": 0.0}
    for sample in SAMPLES:
        prompt = len(sample.prompt) - 1
        ours, theirs = sample_logits(student, sample), sample_logits(teacher, sample).detach()
        last = prompt if kl_on == "prompt" else None
        answer = [paper.bild(*logits) for logits in zip(ours[prompt:], theirs[prompt:], strict=True)]
        terms["kl"] = terms["kl"] + paper.kl(ours[:last], theirs[:last]).mean() / len(SAMPLES)
        terms["bild"] = terms["bild"] + sum(answer) / len(answer) / len(SAMPLES)
    return terms


def run_masked_step(trained: Masks, student, step: int, l0_weight: float = 1.0) -> dict:
    """Stage 5's step with masks up to the optimizer; returns its metrics."""
    taken = Gradients(Job(student, None, "", ALONE, step=step), SCHEDULE, TWO_ROWS, SAMPLES)
    stage5.masked_step(taken, trained, tiny_trainee(2), stage5.Loss("prompt", l0_weight))
    return taken.metrics


@pytest.mark.parametrize("kl_on", ["prompt", "all"])
def test_distillation_is_equation_30(kl_on):
    """By a step of two rows."""
    student, teacher = tiny_trainee(0), tiny_trainee(1)
    step = Gradients(Job(student, None, "", ALONE), replace(SCHEDULE, loss_chunk=2), TWO_ROWS, SAMPLES)
    stage5.distill(step, teacher, stage5.Loss(kl_on, l0_weight=1.0))
    terms = distillation_terms(student, teacher, kl_on)
    expected = {name: float(term.detach()) for name, term in (terms | {"loss": sum(terms.values())}).items()}
    assert {name: float(step.totals[name]) for name in expected} == pytest.approx(expected, rel=1e-4)


def test_fine_tuning_counts_answer_tokens_alone():
    trainee, expected = tiny_trainee(0), 0.0
    for sample in SAMPLES:
        answer_logits = sample_logits(trainee, sample)[len(sample.prompt) - 1 :]
        expected += float(cross_entropy(answer_logits, torch.tensor(sample.answer)).detach()) / len(SAMPLES)
    row = build_row(SAMPLES, len(SAMPLES))
    loss = next_token_loss(trainee, row, row.answer_at, row.answer_weight, chunk=2)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


def test_masks_that_are_open_when_they_are_removed_are_counted(monkeypatch):
    """Those whose stretched sigmoid is above 0: log_alpha above log(0.1 / 1.1), which is -2.398."""
    monkeypatch.setattr(stage5, "sum_over_ranks", lambda leaves: None)
    log_alpha = torch.full((3, 8), -2.5)
    log_alpha[0, :5] = -2.3
    student = masked_student(log_alpha)
    for step, expected in enumerate((None, None, None, 5)):  # of five steps, four have masks
        metrics = run_masked_step(Masks(student.replicated, SCHEDULE.steps, seed=5), student, step)
        assert metrics.get("open_masks") == expected


@pytest.mark.parametrize("step, ranks", [(0, 1), (40, 1), (40, 2)])
def test_mask_gradient_is_that_of_equation_31(monkeypatch, step, ranks):
    """By one backward pass through draw, blend, Eq. 30 and Eq. 29, without the leaf and in one row.

    Of Eq. 30 it is summed over ranks, which here have the same samples; Eq. 29 is the same on every rank.
    """
    monkeypatch.setattr(stage5, "sum_over_ranks", lambda leaves: [leaf.grad.mul_(ranks) for leaf in leaves])
    start = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    student = masked_student(start)
    trained = Masks(student.replicated, 100, seed=5)
    figures = run_masked_step(trained, student, step, l0_weight=0.3)

    reference, teacher = masked_student(start), tiny_trainee(2)
    log_alpha = reference.replicated["log_alpha"]
    blending.set_masks(reference.net, masks.draw(log_alpha, 5, step))
    gap = masks.expected(log_alpha).mean() - masks.target(step, 100)
    l0 = gap.abs() + gap**2
    (ranks * sum(distillation_terms(reference, teacher).values()) + 0.3 * l0).backward()
    torch.testing.assert_close(student.replicated["log_alpha"].grad, log_alpha.grad, rtol=1e-3, atol=1e-6)
    merged = "model.layers.1.self_attn.k_proj.merged.weight"
    ours, theirs = (trainee.net.get_parameter(merged).grad for trainee in (student, reference))
    torch.testing.assert_close(ours, theirs / ranks, rtol=1e-3, atol=1e-6)
    assert figures["l0"] == pytest.approx(float(l0.detach()), rel=1e-5)
    assert figures["mask_target"] == masks.target(step, 100)
    assert figures["mask_expected"] == pytest.approx(float(masks.expected(start).mean()), rel=1e-5)
    per_layer = {"mask_per_layer": masks.expected(start), "mask_mean_per_layer": masks.draw(start, 5, step)}
    for name, values in per_layer.items():
        torch.testing.assert_close(figures[name].float(), values.mean(1), rtol=0, atol=1e-5)


def test_masks_end_after_80_percent_of_the_steps():
    assert SWITCH == 0.8
    assert [switch_step(steps) for steps in (1, 2, 10, 350, 11530)] == [1, 1, 8, 280, 9224]
