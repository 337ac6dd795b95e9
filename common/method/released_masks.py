"""The masks of the authors' released code, which differ from the paper's hard concrete ones (Eq. 29).

A mask is nearly deterministic: z = (sigmoid(logit(u) + log_alpha / TEMPERATURE) - 1/2) STRETCH + 1/2, clipped
to [0, 1], with u uniform in (0.4, 0.6). The clip is straight-through: masks at 0 and 1 have gradients, too.

Masks are also moved to the target T of Eq. 29 directly. Before a step, `constrain` pulls those with the least
log_alpha towards 0 and the others towards 1, as many as T asks for; after it, `settle` averages log_alpha
with what it was before. So masks follow T without any gradient: the losses only decide their order.

Two things are simplified. `constrain` and `settle` read the masks' current size, the released code that of
the step before, because here log_alpha is all that a resumed run restores. And the gradient of a mask is
clamped to +-1 for the whole batch at once, not for each microbatch.
"""

import math

import torch

from common.method import masks

NOISE = 0.1  # u is uniform within this of 1/2
TEMPERATURE = 1 / 3  # of log_alpha; the noise has none
STRETCH = 1.005  # without noise z is exactly 0 or 1 where |log_alpha| > 2
OPEN = 0.995  # sets the offset of `expected`
START, START_SPREAD = 2.0, 0.1  # mean and standard deviation of the initial log_alpha
PULL = 10 / 3  # `constrain` pulls log_alpha towards +-this
LIMIT = 8.0  # bound on |log_alpha|
LEAST_RATIO, MOST_RATIO = 0.6, 0.999  # of a pull: what may be left of the distance to +-PULL
LEAST_WEIGHT = 0.002  # of the masks before a step in their average with those after it


def start(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Initial log_alpha, float32: z is 1 to within 2e-3 in the mean. Its spread decides which masks close
    first.
    """
    return START + START_SPREAD * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class StraightThrough(torch.autograd.Function):
    """Clip to [0, 1]; the gradient passes as it is, but for a clamp to +-1."""

    @staticmethod
    def forward(ctx, values):
        return values.clamp(0, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


def with_noise(log_alpha: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Masks z in [0, 1] for this noise u in (0, 1), of log_alpha's shape."""
    gate = torch.sigmoid(noise.logit() + log_alpha / TEMPERATURE)
    return StraightThrough.apply((gate - 0.5) * STRETCH + 0.5)


def draw(log_alpha: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Masks z in [0, 1], float32, of log_alpha's shape; differentiable. See masks.uniform for the noise."""
    noise = masks.uniform(log_alpha, seed, step)
    return with_noise(log_alpha, 0.5 + NOISE * (2 * noise - 1))


def deterministic(log_alpha: torch.Tensor) -> torch.Tensor:
    """Masks without noise, u = 1/2, in [0, 1], of log_alpha's shape."""
    return with_noise(log_alpha, torch.full_like(log_alpha, 0.5))


def expected(log_alpha: torch.Tensor) -> torch.Tensor:
    """The differentiable size of each mask in Eq. 29, a sigmoid that stays above z: 0.85 where z is 1/2."""
    return torch.sigmoid(log_alpha / TEMPERATURE + TEMPERATURE * math.log(OPEN / (1 - OPEN)))


@torch.no_grad()
def constrain(log_alpha: torch.Tensor, goal: float, progress: float) -> None:
    """Pull masks towards the target T (`goal`) in place, before a step. progress: share of the masked steps.

    The N (1 - T) masks with the least log_alpha are pulled towards 0, the more the further the mean size is
    above T, and not at all where it is below; then the others are pulled towards 1, slightly, or by as much
    as the mean size is below T.
    """
    values = log_alpha.flatten()
    closing = min(int(len(values) * (1 - goal) + 1), len(values))
    excess = (expected(values).mean() - goal) * math.exp(math.sqrt(progress))
    ordered = values.sort().values
    chosen = (values <= ordered[closing - 1]) & (ordered[closing - 1] > -PULL) & (excess > 0)
    ratio = (1 - excess).clamp(LEAST_RATIO, MOST_RATIO)
    values = torch.where(chosen, ((values + PULL) * ratio - PULL).clamp(min=-PULL), values)
    if closing + 1 < len(values):
        ordered = values.sort().values
        chosen = (values >= ordered[closing]) & (ordered[closing] < PULL)
        ratio = (1 + excess).clamp(max=MOST_RATIO)
        values = torch.where(chosen, ((values - PULL) * ratio + PULL).clamp(max=PULL), values)
    log_alpha.copy_(values.view_as(log_alpha))


@torch.no_grad()
def settle(log_alpha: torch.Tensor, before: torch.Tensor, goal: float, progress: float) -> None:
    """Average log_alpha in place with what it was before the step, then clamp it to +-LIMIT.

    The weight of `before` is its mean size's distance from the new target, at least progress^5 / 2.
    """
    weight = (expected(before).mean() - goal).abs().clamp(max(LEAST_WEIGHT, min(1.0, progress) ** 5 / 2), 1.0)
    log_alpha.copy_(torch.lerp(log_alpha, before, weight).clamp(-LIMIT, LIMIT))
