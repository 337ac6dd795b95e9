"""L0 masks, z of Eq. 27 and 28: hard concrete, with the size that Eq. 29 constrains.

A mask is sampled from a hard concrete distribution (Louizos et al.) with parameter log_alpha: s =
sigmoid((logit(u) + log_alpha) / BETA), stretched to (GAMMA, ZETA) and clipped to [0, 1].
"""

import math

import torch

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1  # temperature and stretch of Louizos et al.
START = 7.5  # initial log_alpha: E[1 - z] is 7e-4; three draws in a thousand are below 1
LIMIT = START  # bound on |log_alpha|: beyond it the sigmoid is flat and a mask never recovers
WARMUP_SHARE = 0.3  # share of the training steps over which the target T of Eq. 29 falls


def start(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Initial log_alpha, float32; the seed is for masks that start at random."""
    return torch.full(shape, START)


def uniform(log_alpha: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Noise u in (0, 1), float32, of log_alpha's shape and on its device.

    It depends only on (seed, step): it is the same on every rank and after a resume.
    """
    number = (seed * 1_000_003 + step) % 2**63  # pragma: no mutate: 2**64 will do, too
    generator = torch.Generator().manual_seed(number)
    noise = torch.rand(log_alpha.shape, generator=generator)
    noise = noise.clamp(1e-6, 1 - 1e-6)  # pragma: no mutate: beyond, z is 0 or 1
    return noise.to(log_alpha.device, non_blocking=True)


def draw(log_alpha: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Hard concrete samples z in [0, 1], float32, of log_alpha's shape; differentiable."""
    noise = uniform(log_alpha, seed, step)
    stretched = torch.sigmoid((noise.logit() + log_alpha) / BETA) * (ZETA - GAMMA) + GAMMA
    return stretched.clamp(0, 1)


def deterministic(log_alpha: torch.Tensor) -> torch.Tensor:
    """Masks without noise, in [0, 1], of log_alpha's shape: what Louizos et al. use after training (Eq. 13).

    The stretched sigmoid(log_alpha), clipped: exactly 0 or 1 where log_alpha is beyond +-log(-ZETA / GAMMA).
    """
    return (torch.sigmoid(log_alpha) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def expected(log_alpha: torch.Tensor) -> torch.Tensor:
    """P(z > 0), the expected L0 norm of each mask: the differentiable size that Eq. 29 constrains."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def target(step: int, steps: int) -> float:
    """T of Eq. 29: falls linearly from 1 to 0 over the first WARMUP_SHARE of the steps, then stays 0."""
    return max(0.0, 1 - step / (WARMUP_SHARE * steps))


def l0_loss(size: torch.Tensor, goal: float) -> torch.Tensor:
    """Eq. 29 for the mean expected mask s (`size`) and target T (`goal`): |s - T| + (s - T)^2, a scalar.

    Version 1 of the paper lacks the absolute value.
    """
    gap = size - goal
    return gap.abs() + gap.square()
