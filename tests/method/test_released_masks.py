"""The masks of the authors' code: their distribution by integration, their rules number by number."""

import math

import pytest
import torch
from scipy.integrate import quad

from common.method import masks, released_masks
from common.training import distill, students
from common.training.distill import ReleasedMasks
from common.training.packing import build_row
from common.training.students import Rates
from students import SAMPLES, distillation_terms, masked_student, rates, run_masked_step, tiny_trainee


def mask(log_alpha: float, u: float) -> float:
    """z as the released code computes it: 1/3 divides log alpha alone."""
    gate = 1 / (1 + math.exp(-(math.log(u / (1 - u)) + log_alpha / (1 / 3))))
    return min(1.0, max(0.0, (gate - 0.5) * 1.005 + 0.5))


@pytest.mark.parametrize("log_alpha", [-2.5, -0.6, 0.0, 0.2, 1.9, 2.5])
def test_moments_of_a_mask(log_alpha):
    """u is uniform in (0.4, 0.6): mean and variance by numerical integration over it."""
    mean = quad(lambda u: mask(log_alpha, u) / 0.2, 0.4, 0.6)[0]
    variance = quad(lambda u: (mask(log_alpha, u) - mean) ** 2 / 0.2, 0.4, 0.6)[0]
    drawn = released_masks.draw(torch.full((200_000,), log_alpha), seed=0, step=0)
    assert float(drawn.mean()) == pytest.approx(mean, abs=6e-4)  # 200,000 draws: 4 sigma
    assert float(drawn.std()) == pytest.approx(math.sqrt(variance), rel=0.01, abs=1e-6)
    if log_alpha == 0:
        assert math.sqrt(variance) == pytest.approx(0.058, abs=1e-3)  # the printed masks: 0.38


def test_masks_for_given_noise():
    log_alpha = torch.linspace(-3, 3, 50)
    u = 0.4 + 0.2 * torch.rand(50, generator=torch.Generator().manual_seed(3 * 1_000_003 + 7))
    expected = [mask(*pair) for pair in zip(log_alpha.tolist(), u.tolist(), strict=True)]
    torch.testing.assert_close(released_masks.draw(log_alpha, seed=3, step=7), torch.tensor(expected))
    without_noise = [mask(value, 0.5) for value in log_alpha.tolist()]
    torch.testing.assert_close(released_masks.deterministic(log_alpha), torch.tensor(without_noise))


def test_masks_start_at_one_in_a_random_order():
    start = released_masks.start((500, 40), seed=1)
    assert 1 - released_masks.draw(start, 0, 0).mean() < 2e-3
    assert (float(start.mean()), float(start.std())) == pytest.approx((2.0, 0.1), abs=5e-3)
    assert torch.equal(start, released_masks.start((500, 40), seed=1))
    assert not torch.equal(start, released_masks.start((500, 40), seed=2))


def test_the_clip_is_straight_through():
    """Masks at 0 and 1 have the gradient of the stretched sigmoid; dL/dz is clamped to +-1."""
    for value, log_alpha in ((1.0, 2.5), (0.0, -2.5), (0.5, 0.0)):
        leaf = torch.tensor([log_alpha], requires_grad=True)
        z = released_masks.deterministic(leaf)
        assert float(z.detach()) == value
        gate = 1 / (1 + math.exp(-3 * log_alpha))
        for gradient, clamped in ((0.5, 0.5), (-0.25, -0.25), (7.0, 1.0), (-7.0, -1.0)):
            (slope,) = torch.autograd.grad(z, leaf, torch.tensor([gradient]), retain_graph=True)
            assert float(slope) == pytest.approx(clamped * 1.005 * 3 * gate * (1 - gate), rel=1e-4)


def test_expected_size():
    """sigmoid(log alpha / T + T logit(0.995)), T = 1/3."""
    log_alpha = torch.linspace(-4, 4, 9)
    expected = [1 / (1 + math.exp(-3 * value - math.log(199) / 3)) for value in log_alpha.tolist()]
    torch.testing.assert_close(released_masks.expected(log_alpha), torch.tensor(expected))
    assert float(released_masks.expected(torch.zeros(()))) == pytest.approx(0.8538, abs=1e-4)


def constrained(values: list[float], goal: float, progress: float) -> list[float]:
    """The rule of the released code in numbers; values in ascending order."""
    size = sum(1 / (1 + math.exp(-3 * value - math.log(199) / 3)) for value in values) / len(values)
    scale, closing = math.exp(math.sqrt(progress)), min(int(len(values) * (1 - goal) + 1), len(values))
    after = list(values)
    if size > goal and values[closing - 1] > -10 / 3:
        left = max(0.6, min(0.999, 1 - (size - goal) * scale))
        after[:closing] = [max(-10 / 3, -10 / 3 + (value + 10 / 3) * left) for value in values[:closing]]
    after.sort()
    if closing + 1 < len(values) and after[closing] < 10 / 3:
        left = min(0.999, 1 + (size - goal) * scale)
        after[closing:] = [min(10 / 3, 10 / 3 + (value - 10 / 3) * left) for value in after[closing:]]
    return after


@pytest.mark.parametrize("goal", [1.0, 0.75, 0.3, 0.0])
@pytest.mark.parametrize("center", [-5.0, -1.0, 0.0, 2.0, 5.0])
def test_masks_are_pulled_as_released(goal, center):
    values = (center + torch.randn(12, generator=torch.Generator().manual_seed(5))).sort().values
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(6))
    log_alpha = values[shuffled].view(3, 4).clone()
    released_masks.constrain(log_alpha, goal, 0.3)
    expected = torch.tensor(constrained(values.tolist(), goal, 0.3))[shuffled].view(3, 4)
    torch.testing.assert_close(log_alpha, expected, rtol=1e-5, atol=1e-5)


def test_masks_settle_as_released():
    """The weight of the masks before: |size - T|, but at least 0.002 and progress^5 / 2."""
    before, after = torch.tensor([[0.5, -0.5]]), torch.tensor([[1.5, -9.0]])
    size = (1 / (1 + math.exp(-1.5 - math.log(199) / 3)) + 1 / (1 + math.exp(1.5 - math.log(199) / 3))) / 2
    for goal, progress, weight in ((size, 0.1, 0.002), (size, 0.8, 0.8**5 / 2), (size, 1.0, 0.5),
                                   (size - 0.25, 0.1, 0.25), (size + 0.25, 0.1, 0.25)):
        log_alpha = after.clone()
        released_masks.settle(log_alpha, before, goal, progress)
        expected = (weight * before + (1 - weight) * after).clamp(-8, 8)
        torch.testing.assert_close(log_alpha, expected, rtol=1e-5, atol=1e-6)


def follow(steps: int, start: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
    """T and the masks without noise at each step, if no loss has a gradient."""
    log_alpha, passed, masked = start.clone(), [], distill.switch_step(steps)
    for step in range(masked):
        released_masks.constrain(log_alpha, masks.target(step, steps), step / masked)
        before = log_alpha.clone()
        passed.append((masks.target(step, steps), released_masks.deterministic(log_alpha)))
        released_masks.settle(log_alpha, before, masks.target(step + 1, steps), (step + 1) / masked)
    return passed


def test_masks_follow_the_target_without_any_gradient():
    """0.53 at T = 0.5; those with the least log alpha are the closed ones; in the end all are."""
    start = released_masks.start((8, 32), seed=0)
    passed = follow(400, start)
    assert max(abs(float(z.mean()) - goal) for goal, z in passed) < 0.06
    goal, halfway = passed[60]
    assert goal == pytest.approx(0.5) and float(halfway.mean()) == pytest.approx(0.53, abs=0.02)
    first, last = start.flatten().argsort().chunk(2)
    assert float(halfway.flatten()[first].mean()) < 0.1 and float(halfway.flatten()[last].mean()) > 0.95
    assert float(passed[-1][1].max()) < 1e-3
    assert float(follow(15, start)[-1][1].mean()) < 2e-3  # also in a short run


def test_a_step_pulls_draws_and_settles(group_of_one):
    """The gradient is Eq. 31's at the masks that were pulled; the update is averaged with them."""
    start = released_masks.start((3, 8), seed=4) - 2  # about 0, between open and closed
    student = masked_student(start)
    rows, step = [build_row(SAMPLES[:2], len(SAMPLES)), build_row(SAMPLES[2:], len(SAMPLES))], 20
    trained = ReleasedMasks(student.replicated["log_alpha"], 100, seed=5)
    figures = run_masked_step(trained, student, step, rows, l0_weight=0.3)

    pulled, goal = start.clone(), 1 - 20 / 30
    released_masks.constrain(pulled, goal, 20 / 80)
    assert torch.equal(trained.before, pulled) and not torch.equal(pulled, start)
    reference, teacher = masked_student(pulled.clone()), tiny_trainee(2)
    log_alpha = reference.replicated["log_alpha"]
    drawn = released_masks.draw(log_alpha, 5, step)
    masks.set_masks(reference.net, drawn)
    gap = released_masks.expected(log_alpha).mean() - goal
    (sum(distillation_terms(reference, teacher).values()) + 0.3 * (gap.abs() + gap**2)).backward()
    torch.testing.assert_close(trained.log_alpha.grad, log_alpha.grad, rtol=1e-3, atol=1e-6)
    assert figures["mask_mean"] == pytest.approx(float(drawn.detach().mean()), rel=1e-5)
    torch.testing.assert_close(figures["mask_mean_per_layer"].float(), drawn.detach().mean(1),
                               rtol=0, atol=1e-5)

    with torch.no_grad():
        trained.log_alpha.copy_(pulled + 1)
    moved = pulled + 1
    released_masks.settle(moved, pulled, 1 - 21 / 30, 21 / 80)
    trained.settle(step)
    torch.testing.assert_close(trained.log_alpha.detach(), moved)


def test_their_start_and_their_adam():
    """Betas 0.9, 0.95 and eps 1e-8 on a thousandth of log alpha: its gradients are a thousand times ours."""
    start = torch.linspace(-2, 2, 24).view(3, 8)
    assert torch.equal(ReleasedMasks(start, 10, 0).noiseless(), released_masks.deterministic(start))
    student = masked_student(torch.zeros(3, 8))
    optimizer = students.masked_optimizer(student, Rates(1.0, 0.999, 0.0), "l0-released", mask_lr=7.0)
    assert rates(optimizer, student)["replicated.log_alpha"] == 7.0
    group = optimizer.param_groups[-1]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-11, 0)
