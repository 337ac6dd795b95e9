"""The phases of stage 5 against Eq. 29-31 written out."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.method import masks
from common.training.distill import SWITCH, Distillation, MaskedDistillation, Settings, Sft, switch_step
from common.training.packing import build_row
from students import (
    SAMPLES,
    distillation_terms,
    masked_student,
    run_masked_step,
    sample_logits,
    tiny_trainee,
)


@pytest.mark.parametrize("kl_on", ["prompt", "all"])
def test_distillation_is_equation_30(kl_on):
    student, teacher = tiny_trainee(0), tiny_trainee(1)
    phase = Distillation(student, teacher, Settings(lr=1.0, kl_on=kl_on, loss_chunk=2))
    loss, parts = phase.row_loss(build_row(SAMPLES, len(SAMPLES)))
    terms = distillation_terms(student, teacher, kl_on)
    expected = {name: float(term.detach()) for name, term in terms.items()}
    assert {name: float(part) for name, part in parts.items()} == pytest.approx(expected, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(sum(expected.values()), rel=1e-4)


def test_the_temperature_of_the_kl():
    """KL of softened distributions, times T^2 so that gradients keep their size; BiLD has its own."""
    student, teacher = tiny_trainee(0), tiny_trainee(1)
    phase = Distillation(student, teacher, Settings(lr=1.0, temperature=2.0))
    _, parts = phase.row_loss(build_row(SAMPLES, len(SAMPLES)))
    expected = 0.0
    for sample in SAMPLES:
        prompt = len(sample.prompt) - 1
        logits = (sample_logits(model, sample)[:prompt] for model in (student, teacher))
        ours, theirs = ((rows.detach() / 2).softmax(-1) for rows in logits)
        expected += 4 * float((theirs * (theirs / ours).log()).sum(-1).mean()) / len(SAMPLES)
    assert float(parts["kl"]) == pytest.approx(expected, rel=1e-4)
    bild_alone = float(distillation_terms(student, teacher)["bild"].detach())
    assert float(parts["bild"]) == pytest.approx(bild_alone, rel=1e-4)


def test_fine_tuning_counts_answer_tokens_alone():
    trainee, expected = tiny_trainee(0), 0.0
    for sample in SAMPLES:
        answer_logits = sample_logits(trainee, sample)[len(sample.prompt) - 1 :]
        expected += float(cross_entropy(answer_logits, torch.tensor(sample.answer)).detach()) / len(SAMPLES)
    loss, _ = Sft(trainee, chunk=2).row_loss(build_row(SAMPLES, len(SAMPLES)))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("step", [0, 40])
def test_mask_gradient_is_that_of_equation_31(group_of_one, step):
    """By one backward pass through draw, blend, Eq. 30 and Eq. 29, without the leaf and in one row."""
    start = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    settings, student = Settings(lr=1.0, l0_weight=0.3, seed=5), masked_student(start)
    rows = [build_row(SAMPLES[:2], len(SAMPLES)), build_row(SAMPLES[2:], len(SAMPLES))]
    figures = run_masked_step(student, settings, step, rows)

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


def test_the_two_parts_of_the_mask_gradient_are_both_there(group_of_one):
    start = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    rows, gradients = [build_row(SAMPLES, len(SAMPLES))], {}
    for weight in (0.0, 1.0, 2.0):
        student = masked_student(start)
        run_masked_step(student, Settings(lr=1.0, l0_weight=weight), 50, rows)
        gradients[weight] = student.replicated["log_alpha"].grad
    assert gradients[0.0].abs().max() > 1e-6  # of Eq. 30
    l0_part = gradients[1.0] - gradients[0.0]
    assert (l0_part > 0).all()  # of Eq. 29 at a target of 0: descent closes every mask
    torch.testing.assert_close(gradients[2.0] - gradients[0.0], 2 * l0_part, rtol=1e-4, atol=1e-7)


def test_each_step_draws_masks_of_its_own_from_the_seed():
    start, drawn = torch.zeros(3, 8), {}
    for seed, step in ((0, 3), (0, 4), (1, 3)):
        phase = MaskedDistillation(masked_student(start), None, 10, Settings(lr=1.0, seed=seed))
        phase.begin_step(step)
        drawn[seed, step] = phase.z.detach()
        assert torch.equal(phase.z, masks.draw(start, seed, step))
        for index, _, projections in masks.blended_projections(phase.student.net):
            assert all(torch.equal(projection.z, phase.z[index]) for projection in projections)
    assert not torch.equal(drawn[0, 3], drawn[0, 4]) and not torch.equal(drawn[0, 3], drawn[1, 3])


def test_masks_are_clamped_after_an_update():
    phase = MaskedDistillation(masked_student(torch.full((3, 8), 99.0)), None, 10, Settings(lr=1.0))
    phase.after_update(0)
    assert (phase.log_alpha == masks.LIMIT).all()


def test_masks_end_after_80_percent_of_the_steps():
    assert SWITCH == 0.8
    assert [switch_step(steps) for steps in (2, 10, 350, 11530)] == [1, 8, 280, 9224]
