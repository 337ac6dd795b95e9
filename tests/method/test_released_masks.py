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
    ends = torch.tensor([-9.0, 9.0], requires_grad=True)
    released_masks.expected(ends).sum().backward()
    closed, opened = released_masks.expected(ends).tolist()
    assert (closed, 1 - opened) == pytest.approx((1e-6, 1e-6), rel=0.1)
    assert not ends.grad.any()
    assert float(released_masks.expected(torch.zeros(()))) == pytest.approx(0.8538, abs=1e-4)


def constrained(values: list[float], size: float, goal: float, progress: float) -> list[float]:
    """The rule of the released code in numbers; values in ascending order."""
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
@pytest.mark.parametrize("size", [0.05, 0.5, 0.98])
@pytest.mark.parametrize("center", [-5.0, 0.0, 2.0, 5.0])
def test_masks_are_pulled_as_released(goal, size, center):
    values = (center + torch.randn(12, generator=torch.Generator().manual_seed(5))).sort().values
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(6))
    log_alpha = values[shuffled].view(3, 4)
    copy = released_masks.pulled(log_alpha, torch.tensor(size), goal, 0.3)
    expected = torch.tensor(constrained(values.tolist(), size, goal, 0.3))[shuffled].view(3, 4)
    torch.testing.assert_close(copy, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(log_alpha, values[shuffled].view(3, 4))  # the pull is the copy's alone


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
        assert float(released_masks.settle(log_alpha, copy, goal, progress)) == pytest.approx(size)
        expected = (weight * copy + (1 - weight) * after).clamp(-8, 8)
        torch.testing.assert_close(log_alpha, expected, rtol=1e-5, atol=1e-6)


STEPS, WARMUP, MASKED = 100, 30, 80
UNIT = 1e-3  # the released code trains log alpha times this, at 1e-5


def transcription(start: list[float], slopes: list[float], reading: str) -> list[list[float]]:
    """log_alpha after each step of the released code, a number at a time: module, master and AdamW.

    slopes: dL/dz of each mask. reading: what the pull before a step changes, "the module" alone or "both" the
    module and its master; "the module now" is by the size at this step, not at the one before.
    """
    count, temperature, bound = len(start), 1 / 3, 10 / 3 * UNIT
    master, first, second = [UNIT * value for value in start], [0.0] * count, [0.0] * count
    sparsity, passed = None, []

    def open_share(value: float) -> float:
        closed = 1 / (1 + math.exp(math.log(0.995 / 0.005) * temperature + value / UNIT / temperature))
        return 1 - min(1 - 1e-6, max(1e-6, closed))

    for step in range(MASKED):
        module, target = list(master), min(1, step / WARMUP)
        if reading == "the module now":
            sparsity = 1 - sum(map(open_share, module)) / count
        if step:  # before the first there is no sparsity
            lead = (target - sparsity) * math.exp(math.sqrt(step / MASKED))
            closing = min(int(count * target + 1), count)
            limit = sorted(module)[closing - 1]
            if target > sparsity and limit > -bound:
                ratio = max(0.6, min(0.999, 1 - lead))
                module = [max(-bound, -bound + (v + bound) * ratio) if v <= limit else v for v in module]
            limit = sorted(module)[min(closing, count - 1)]
            if closing + 1 < count and limit < bound:
                ratio = min(0.999, 1 + lead)
                module = [min(bound, bound + (v - bound) * ratio) if v >= limit else v for v in module]
        kept = list(module)
        if reading == "both":
            master = list(module)
        shares = [open_share(value) for value in module]
        sparsity = 1 - sum(shares) / count
        gap = sparsity - target
        l0_slope = math.copysign(1 + 2 * (abs(gap) + 1e-6), gap)  # of Eq. 29 by the sparsity
        noise = torch.rand(count, generator=torch.Generator().manual_seed(9 * 1_000_003 + step)).tolist()
        for mask in range(count):
            u = 0.4 + 0.2 * noise[mask]
            gate = 1 / (1 + math.exp(-math.log(u / (1 - u)) - module[mask] / UNIT / temperature))
            gradient = max(-1, min(1, slopes[mask])) * 1.005 * gate * (1 - gate) / temperature / UNIT
            if 1e-6 < shares[mask] < 1 - 1e-6:
                gradient -= l0_slope * shares[mask] * (1 - shares[mask]) / temperature / UNIT / count
            first[mask] = 0.9 * first[mask] + 0.1 * gradient
            second[mask] = 0.95 * second[mask] + 0.05 * gradient**2
            momentum, scale = first[mask] / (1 - 0.9 ** (step + 1)), second[mask] / (1 - 0.95 ** (step + 1))
            master[mask] -= 1e-5 * momentum / (math.sqrt(scale) + 1e-8)
        distance = abs(min(1, (step + 1) / WARMUP) - sparsity)
        weight = min(1, max(0.002, ((step + 1) / MASKED) ** 5 / 2, distance))
        master = [weight * k + (1 - weight) * m for k, m in zip(kept, master, strict=True)]
        passed.append([value / UNIT for value in master])
    return passed


def trained(start: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """log_alpha after each step, by common/method/released_masks.py, in float64."""
    log_alpha, size, passed = start.clone().requires_grad_(), torch.ones((), dtype=torch.float64), []
    optimizer = torch.optim.AdamW([log_alpha], lr=1e-2, **ReleasedMasks.ADAM)
    for step in range(MASKED):
        goal, next_goal = masks.target(step, STEPS), masks.target(step + 1, STEPS)
        copy = released_masks.pulled(log_alpha, size, goal, step / MASKED)
        l0 = masks.l0_loss(released_masks.expected(copy).mean(), goal)
        ((released_masks.draw(copy, 9, step) * slopes).sum() + l0).backward()
        optimizer.step()
        optimizer.zero_grad()
        size = released_masks.settle(log_alpha, copy, next_goal, (step + 1) / MASKED)
        passed.append(log_alpha.detach().clone())
    return torch.stack(passed)


def test_training_is_a_transcription_of_the_released_code():
    """80 steps; reading the pull otherwise, or its size at another time, gives other masks."""
    generator = torch.Generator().manual_seed(7)
    start = 2 + 0.1 * torch.randn(16, generator=generator, dtype=torch.float64)
    slopes = torch.randn(16, generator=generator, dtype=torch.float64) / 8
    slopes[3] = 3.0  # clamped
    ours = trained(start, slopes)
    released = {reading: torch.tensor(transcription(start.tolist(), slopes.tolist(), reading))
                for reading in ("the module", "both", "the module now")}
    noise_in_float32 = 1e-5
    torch.testing.assert_close(ours.float(), released.pop("the module"), rtol=0, atol=noise_in_float32)
    for reading, other in released.items():
        assert (ours - other).abs().max() > 0.1, reading


def follow(steps: int, start: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
    """T and the masks without noise at each step, if no loss has a gradient."""
    log_alpha, size, passed, masked = start.clone(), torch.ones(()), [], distill.switch_step(steps)
    for step in range(masked):
        copy = released_masks.pulled(log_alpha, size, masks.target(step, steps), step / masked)
        passed.append((masks.target(step, steps), released_masks.deterministic(copy)))
        size = released_masks.settle(log_alpha, copy, masks.target(step + 1, steps), (step + 1) / masked)
    return passed


def test_masks_follow_the_target_without_any_gradient():
    """Behind it by 0.12 at most over 400 steps; those with the least log alpha close first; in the end all
    are closed.
    """
    start = released_masks.start((8, 32), seed=0)
    passed = follow(400, start)
    assert max(abs(float(z.mean()) - goal) for goal, z in passed) == pytest.approx(0.117, abs=0.005)
    goal, halfway = passed[60]
    assert goal == pytest.approx(0.5) and float(halfway.mean()) == pytest.approx(0.57, abs=0.02)
    first, last = start.flatten().argsort().chunk(2)
    assert float(halfway.flatten()[first].mean()) < 0.2 and float(halfway.flatten()[last].mean()) > 0.95
    assert float(passed[-1][1].max()) < 0.01
    assert float(follow(15, start)[-1][1].mean()) < 0.05  # also in a short run, nearly


def released_student(log_alpha: torch.Tensor, size: float = 1.0):
    return masked_student(log_alpha, {"mask_size": torch.tensor(size)})


def test_a_step_pulls_draws_and_settles(group_of_one):
    """The gradient is Eq. 31's at the pulled copy; the update is of log_alpha, and averaged with the copy."""
    start = released_masks.start((3, 8), seed=4) - 2  # about 0, between open and closed
    student, teacher = released_student(start, 0.5), tiny_trainee(2)
    rows, step = [build_row(SAMPLES[:2], len(SAMPLES)), build_row(SAMPLES[2:], len(SAMPLES))], 20
    trained_masks = ReleasedMasks(student.replicated, 100, seed=5)
    figures = run_masked_step(trained_masks, student, step, rows, l0_weight=0.3)

    goal = 1 - 20 / 30
    copy = released_masks.pulled(start, torch.tensor(0.5), goal, 20 / 80)
    assert torch.equal(trained_masks.current.detach(), copy) and not torch.equal(copy, start)
    reference = masked_student(copy)
    log_alpha = reference.replicated["log_alpha"]
    drawn = released_masks.draw(log_alpha, 5, step)
    masks.set_masks(reference.net, drawn)
    gap = released_masks.expected(log_alpha).mean() - goal
    (sum(distillation_terms(reference, teacher).values()) + 0.3 * (gap.abs() + gap**2)).backward()
    torch.testing.assert_close(trained_masks.log_alpha.grad, log_alpha.grad, rtol=1e-3, atol=1e-6)
    assert figures["mask_mean"] == pytest.approx(float(drawn.detach().mean()), rel=1e-5)
    torch.testing.assert_close(figures["mask_mean_per_layer"].float(), drawn.detach().mean(1),
                               rtol=0, atol=1e-5)

    moved = start.clone()  # the step has settled it, after an update of zero
    size = released_masks.settle(moved, copy, 1 - 21 / 30, 21 / 80)
    torch.testing.assert_close(trained_masks.log_alpha.detach(), moved)
    torch.testing.assert_close(student.replicated["mask_size"].detach(), size)
    settled = released_masks.deterministic(moved)
    for index, _, projections in masks.blended_projections(student.net):
        for projection in projections:  # as a held-out measurement finds them
            torch.testing.assert_close(projection.z, settled[index])


def test_their_start_and_their_adam():
    """Betas 0.9, 0.95 and eps 1e-8 on a thousandth of log alpha: its gradients are a thousand times ours."""
    start = ReleasedMasks.start((3, 8), 6)
    assert torch.equal(start["log_alpha"], released_masks.start((3, 8), 6)) and "mask_size" in start
    assert torch.equal(ReleasedMasks(start, 10, 0).noiseless(),
                       released_masks.deterministic(start["log_alpha"]))
    student = masked_student(torch.zeros(3, 8))
    optimizer = students.masked_optimizer(student, Rates(1.0, 0.999, 0.0), "l0-released", mask_lr=7.0)
    assert rates(optimizer, student)["replicated.log_alpha"] == 7.0
    group = optimizer.param_groups[-1]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-11, 0)
