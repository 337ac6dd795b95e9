"""The masks of the authors' code: against transcriptions of it, their rules number by number."""

import math

import pytest
import torch

from audit.training import pulled, released, released_size
from common.method import released_masks
from common.training import students
from common.training.mask_state import ReleasedMasks
from common.training.students import Rates
from reference import masked_student, rates


def test_masks_their_sizes_and_their_gradients_as_released():
    """Samples with a step's noise, masks without noise, and sizes; the clip of masks is straight-through."""
    log_alpha = torch.linspace(-9, 9, 91, dtype=torch.float64, requires_grad=True)
    u = torch.rand(91, generator=torch.Generator().manual_seed(3 * 1_000_003 + 7))
    slopes = 2 * torch.randn(91, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ours, theirs in (
        (released_masks.draw(log_alpha, seed=3, step=7), released(u, log_alpha)),
        (released_masks.deterministic(log_alpha), released(torch.full_like(u, 0.5), log_alpha)),
        (released_masks.expected(log_alpha), released_size(log_alpha)),
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-7)  # the noise is in float32
        gradients = (torch.autograd.grad(side, log_alpha, slopes)[0] for side in (ours, theirs))
        torch.testing.assert_close(*gradients, rtol=0, atol=5e-6)


def test_masks_start_at_one_in_a_random_order():
    start = released_masks.start((500, 40), seed=1)
    assert 1 - released_masks.draw(start, 0, 0).mean() < 2e-3
    normal = torch.randn(500, 40, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(start, 2 + 0.1 * normal)
    state = ReleasedMasks.start((500, 40), seed=1)
    assert torch.equal(state["log_alpha"], start)
    assert torch.equal(ReleasedMasks(state, 10, 0).noiseless(), released_masks.deterministic(start))


def test_their_adam():
    """Betas 0.9, 0.95 and eps 1e-8 on a thousandth of log alpha: its gradients are a thousand times ours."""
    student = masked_student(torch.zeros(3, 8))
    optimizer = students.masked_optimizer(student, Rates(1.0, 0.999, 0.0), "l0-released", mask_lr=7.0)
    assert rates(optimizer, student)["replicated.log_alpha"] == 7.0
    group = optimizer.param_groups[-1]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-11, 0)


@pytest.mark.parametrize("goal", [1.0, 0.75, 0.5, 0.4999, 0.3, 0.0])
@pytest.mark.parametrize("size", [0.05, 0.5, 0.98])
@pytest.mark.parametrize("center", [-5.0, 2.0])
def test_masks_are_pulled_as_released(goal, size, center):
    log_alpha = center + torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
    before = log_alpha.clone()
    copy = released_masks.pulled(log_alpha, torch.tensor(size), goal, 0.3)
    expected = pulled(before.flatten().tolist(), size, goal, 0.3)
    torch.testing.assert_close(copy.flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert torch.equal(log_alpha, before)  # the pull is the copy's alone


def test_a_gradient_at_the_copy_is_log_alphas():
    log_alpha = torch.tensor([[2.0, -1.0, 0.3]], requires_grad=True)
    for progress in (0.0, 0.5):
        copy = released_masks.pulled(log_alpha, torch.tensor(0.9), 0.4, progress)
        assert torch.equal(copy, log_alpha) == (progress == 0)  # before the first step there is no size
        (gradient,) = torch.autograd.grad((copy**3).sum(), log_alpha)
        torch.testing.assert_close(gradient, 3 * copy.detach() ** 2)


def test_masks_settle_as_released():
    """The weight of the copy: |size - T|, but at least 0.002 and progress^5 / 2."""
    copy, after = torch.tensor([[0.5, -0.5]]), torch.tensor([[1.5, -9.0]])
    size = (1 / (1 + math.exp(-1.5 - math.log(199) / 3)) + 1 / (1 + math.exp(1.5 - math.log(199) / 3))) / 2
    for goal, progress, weight in ((size, 0.1, 0.002), (size, 0.8, 0.8**5 / 2), (size, 1.0, 0.5),
                                   (size - 0.25, 0.1, 0.25), (size + 0.25, 0.1, 0.25)):
        log_alpha = after.clone()
        assert float(released_masks.after_update(log_alpha, copy, goal, progress)) == pytest.approx(size)
        expected = (weight * copy + (1 - weight) * after).clamp(-8, 8)
        torch.testing.assert_close(log_alpha, expected, rtol=1e-5, atol=1e-6)
