"""The masks of the authors' code: against transcriptions of it, their rules number by number."""

import math

import torch

from audit.training import pulled, released, released_size
from common.method import masks, released_masks
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


def test_a_gradient_at_the_copy_is_log_alphas():
    log_alpha = torch.tensor([[2.0, -1.0, 0.3]], requires_grad=True)
    for progress in (0.0, 0.5):
        copy = released_masks.pulled(log_alpha, torch.tensor(0.9), 0.4, progress)
        assert torch.equal(copy, log_alpha) == (progress == 0)  # before the first step there is no size
        (gradient,) = torch.autograd.grad((copy**3).sum(), log_alpha)
        torch.testing.assert_close(gradient, 3 * copy.detach() ** 2)


STEPS, WARMUP, MASKED = 100, 30, 80
UNIT = 1e-3  # the released code trains log alpha times this, at 1e-5


def transcription(start: list[float], slopes: list[float]) -> list[list[float]]:
    """log_alpha after each step of the released code, a number at a time: module, master and AdamW.

    slopes: dL/dz of each mask. The pull before a step changes the module alone, by the size one step before.
    """
    count, temperature = len(start), 1 / 3
    master, first, second = [UNIT * value for value in start], [0.0] * count, [0.0] * count
    size, passed = 1.0, []
    for step in range(MASKED):
        goal, module = max(0, 1 - step / WARMUP), list(master)
        if step:  # before the first there is no size
            values = pulled([value / UNIT for value in module], size, goal, step / MASKED)
            module = [UNIT * value for value in values]
        shares = [1 / (1 + math.exp(-math.log(199) / 3 - value / UNIT / temperature)) for value in module]
        shares = [min(1 - 1e-6, max(1e-6, share)) for share in shares]
        size = sum(shares) / count
        l0_slope = math.copysign(1 + 2 * (abs(size - goal) + 1e-6), size - goal)  # of Eq. 29
        noise = torch.rand(count, generator=torch.Generator().manual_seed(9 * 1_000_003 + step)).tolist()
        for at in range(count):
            u = 0.4 + 0.2 * noise[at]
            gate = 1 / (1 + math.exp(-math.log(u / (1 - u)) - module[at] / UNIT / temperature))
            gradient = max(-1, min(1, slopes[at])) * 1.005 * gate * (1 - gate) / temperature / UNIT
            if 1e-6 < shares[at] < 1 - 1e-6:
                gradient += l0_slope * shares[at] * (1 - shares[at]) / temperature / UNIT / count
            first[at] = 0.9 * first[at] + 0.1 * gradient
            second[at] = 0.95 * second[at] + 0.05 * gradient**2
            momentum, scale = first[at] / (1 - 0.9 ** (step + 1)), second[at] / (1 - 0.95 ** (step + 1))
            master[at] -= 1e-5 * momentum / (math.sqrt(scale) + 1e-8)
        distance = abs(max(0, 1 - (step + 1) / WARMUP) - size)
        weight = min(1, max(0.002, ((step + 1) / MASKED) ** 5 / 2, distance))
        master = [weight * k + (1 - weight) * m for k, m in zip(module, master, strict=True)]
        passed.append([value / UNIT for value in master])
    return passed


def trained(start: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """log_alpha after each step, by ReleasedMasks, in float64."""
    log_alpha, size = start.clone().requires_grad_(), torch.ones((), dtype=torch.float64)
    held, passed = ReleasedMasks({"log_alpha": log_alpha, "mask_size": size}, STEPS, seed=9), []
    optimizer = torch.optim.AdamW([log_alpha], lr=1e-2, **ReleasedMasks.ADAM)
    for step in range(MASKED):
        loss = (held.draw(step) * slopes).sum()
        (loss + masks.l0_loss(held.expected().mean(), held.target(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        held.after_update(step)
        passed.append(log_alpha.detach().clone())
    return torch.stack(passed)


def test_training_is_a_transcription_of_the_released_code():
    generator = torch.Generator().manual_seed(7)
    start = 2 + 0.1 * torch.randn(16, generator=generator, dtype=torch.float64)
    slopes = torch.randn(16, generator=generator, dtype=torch.float64) / 8
    slopes[3] = 3.0  # clamped
    ours, released = trained(start, slopes), torch.tensor(transcription(start.tolist(), slopes.tolist()))
    torch.testing.assert_close(ours.float(), released, rtol=0, atol=1e-5)  # the noise is in float32
