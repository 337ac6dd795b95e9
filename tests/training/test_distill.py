"""The phases of stage 5 against Eq. 29-31 written out."""


import pytest
import torch
from torch.nn.functional import cross_entropy

from common.method import masks
from common.method.losses import distillation_loss, next_token_loss
from common.training.engine import Job
from common.training.mask_state import SWITCH, Masks, switch_step
from common.training.packing import build_row
from students import (
    ALONE,
    SAMPLES,
    SCHEDULE,
    Gradients,
    distillation_terms,
    masked_student,
    run_masked_step,
    sample_logits,
    stage5,
    tiny_trainee,
)


def loss_of_all(student, teacher, kl_on: str = "prompt", temperature: float = 1.0, chunk: int = 512):
    """distillation_loss of all samples in one row."""
    row = build_row(SAMPLES, len(SAMPLES))
    with torch.no_grad():
        hidden = teacher(row)
    return distillation_loss(student, row, hidden, teacher.net.lm_head, kl_on, temperature, chunk)


@pytest.mark.parametrize("kl_on", ["prompt", "all"])
def test_distillation_is_equation_30(kl_on):
    student, teacher = tiny_trainee(0), tiny_trainee(1)
    loss, parts = loss_of_all(student, teacher, kl_on, chunk=2)
    terms = distillation_terms(student, teacher, kl_on)
    expected = {name: float(term.detach()) for name, term in terms.items()}
    assert {name: float(part) for name, part in parts.items()} == pytest.approx(expected, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(sum(expected.values()), rel=1e-4)


def test_the_temperature_of_the_kl():
    """KL of softened distributions, times T^2 so that gradients keep their size; BiLD has its own."""
    student, teacher = tiny_trainee(0), tiny_trainee(1)
    _, terms = loss_of_all(student, teacher, temperature=2.0)
    expected = 0.0
    for sample in SAMPLES:
        prompt = len(sample.prompt) - 1
        logits = (sample_logits(model, sample)[:prompt] for model in (student, teacher))
        ours, theirs = ((rows.detach() / 2).softmax(-1) for rows in logits)
        expected += 4 * float((theirs * (theirs / ours).log()).sum(-1).mean()) / len(SAMPLES)
    assert float(terms["kl"]) == pytest.approx(expected, rel=1e-4)
    bild_alone = float(distillation_terms(student, teacher)["bild"].detach())
    assert float(terms["bild"]) == pytest.approx(bild_alone, rel=1e-4)


@pytest.mark.parametrize("kl_on, temperature", [("all", 2.0), ("prompt", 1.0)])
def test_a_step_distils_as_the_flags_say(kl_on, temperature):
    student, teacher = tiny_trainee(0), tiny_trainee(1)
    rows = [build_row(SAMPLES[:2], len(SAMPLES)), build_row(SAMPLES[2:], len(SAMPLES))]
    step = Gradients(Job(student, None, "", ALONE), SCHEDULE, rows, SAMPLES)
    stage5.distill(step, teacher, stage5.Loss(kl_on, temperature, l0_weight=1.0))
    loss, terms = loss_of_all(student, teacher, kl_on, temperature)
    expected = {name: float(term.detach()) for name, term in (terms | {"loss": loss}).items()}
    assert {name: float(step.totals[name]) for name in expected} == pytest.approx(expected, rel=1e-4)


def test_fine_tuning_counts_answer_tokens_alone():
    trainee, expected = tiny_trainee(0), 0.0
    for sample in SAMPLES:
        answer_logits = sample_logits(trainee, sample)[len(sample.prompt) - 1 :]
        expected += float(cross_entropy(answer_logits, torch.tensor(sample.answer)).detach()) / len(SAMPLES)
    row = build_row(SAMPLES, len(SAMPLES))
    loss = next_token_loss(trainee, row, row.answer_at, row.answer_weight, chunk=2)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("step", [0, 40])
def test_mask_gradient_is_that_of_equation_31(group_of_one, step):
    """By one backward pass through draw, blend, Eq. 30 and Eq. 29, without the leaf and in one row."""
    start = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    student = masked_student(start)
    rows = [build_row(SAMPLES[:2], len(SAMPLES)), build_row(SAMPLES[2:], len(SAMPLES))]
    trained = Masks(student.replicated, 100, seed=5)
    figures = run_masked_step(trained, student, step, rows, l0_weight=0.3)

    reference, teacher = masked_student(start), tiny_trainee(2)
    log_alpha = reference.replicated["log_alpha"]
    masks.set_masks(reference.net, masks.draw(log_alpha, 5, step))
    gap = masks.expected(log_alpha).mean() - masks.target(step, 100)
    l0 = gap.abs() + gap**2
    (sum(distillation_terms(reference, teacher).values()) + 0.3 * l0).backward()
    torch.testing.assert_close(student.replicated["log_alpha"].grad, log_alpha.grad, rtol=1e-3, atol=1e-6)
    merged = "model.layers.1.self_attn.k_proj.merged.weight"
    gradients = [trainee.net.get_parameter(merged).grad for trainee in (student, reference)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert figures["l0"] == pytest.approx(float(l0.detach()), rel=1e-5)
    assert figures["mask_target"] == masks.target(step, 100)
    assert figures["mask_expected"] == pytest.approx(float(masks.expected(start).mean()), rel=1e-5)
    per_layer = {"mask_per_layer": masks.expected(start), "mask_mean_per_layer": masks.draw(start, 5, step)}
    for name, values in per_layer.items():
        torch.testing.assert_close(figures[name].float(), values.mean(1), rtol=0, atol=1e-5)


def test_the_gradient_of_the_masks_is_summed_over_ranks(monkeypatch):
    """That of Eq. 30, before it goes into log_alpha; Eq. 29 is the same on every rank."""
    monkeypatch.setattr(stage5, "sum_over_ranks", lambda leaves: [leaf.grad.mul_(2) for leaf in leaves])
    start, gradients = torch.randn(3, 8, generator=torch.Generator().manual_seed(4)), []
    rows = [build_row(SAMPLES, len(SAMPLES))]
    for weight in (0.0, 1.0):
        student = masked_student(start)
        trained = Masks(student.replicated, 100, seed=0)
        run_masked_step(trained, student, 50, rows, weight)
        gradients.append(trained.log_alpha.grad)
    reference, teacher = masked_student(start), tiny_trainee(2)
    log_alpha = reference.replicated["log_alpha"]
    masks.set_masks(reference.net, masks.draw(log_alpha, 0, 50))
    (2 * sum(distillation_terms(reference, teacher).values())).backward(retain_graph=True)
    torch.testing.assert_close(gradients[0], log_alpha.grad, rtol=1e-3, atol=1e-6)
    size = masks.expected(log_alpha).mean()
    (size + size**2).backward()  # the target is 0
    torch.testing.assert_close(gradients[1], log_alpha.grad, rtol=1e-3, atol=1e-6)


def test_masks_end_after_80_percent_of_the_steps():
    assert SWITCH == 0.8
    assert [switch_step(steps) for steps in (1, 2, 10, 350, 11530)] == [1, 1, 8, 280, 9224]
