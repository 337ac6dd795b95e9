"""The masks of the authors' released code, which differ from the paper's hard concrete ones (Eq. 29).

A mask is nearly deterministic: z = (sigmoid(logit(u) + log_alpha / TEMPERATURE) - 1/2) STRETCH + 1/2, clipped
to [0, 1], with u uniform in (0.4, 0.6). The clip is straight-through: masks at 0 and 1 have gradients, too.

Masks are also moved towards the target T of Eq. 29 directly. Before a step, `pulled` copies log_alpha and
pulls the copy: those with the least log_alpha towards 0 and the others towards 1, as many as T asks for. The
step draws its masks from the copy and its gradient is taken there, but AdamW applies it to log_alpha, which
is not pulled: in the released code the copy is the module's parameter, log_alpha DeepSpeed's float32 master.
After the step `after_update` averages the two, with weight w = max(0.002, progress^5 / 2, |size - T|) on the
copy. So the pull reaches log_alpha damped by w. Alone it leads z along T, somewhat behind; over thousands of
steps Eq. 29's gradient is the stronger: it brings `expected` to T, and z, which is below it, far ahead
(bench/RESULTS.md). ReleasedMasks of common/training/mask_state.py calls them in this order.

`size` is state, which a resumed run has to restore with log_alpha. Three things are simplified: the copy is
not rounded to bfloat16; log_alpha itself is kept within +-LIMIT, not its copy alone; and the gradient of a
mask is clamped to +-1 for the whole batch at once, not for each microbatch.
"""

import math

import torch

from common.method import masks

NOISE = 0.1  # u is uniform within this of 1/2
TEMPERATURE = 1 / 3  # of log_alpha; the noise has none
STRETCH = 1.005  # without noise z is exactly 0 or 1 where |log_alpha| > 2
OPEN = 0.995  # sets the offset of `expected`
START, START_SPREAD = 2.0, 0.1  # mean and standard deviation of the initial log_alpha
LEAST_SIZE = 1e-6  # `expected` stays this far from 0 and 1, where it has no gradient
PULL = 10 / 3  # `pulled` pulls towards +-this
LIMIT = 8.0  # bound on |log_alpha|
LEAST_RATIO, MOST_RATIO = 0.6, 0.999  # of a pull: what may be left of the distance to +-PULL
LEAST_WEIGHT = 0.002  # of the copy in its average with log_alpha


def start(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Initial log_alpha, float32: the mean z is 1 to within 2e-3; the spread decides which close first."""
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
    """The differentiable size of each mask in Eq. 29: a sigmoid, 0.85 where z is 1/2."""
    size = torch.sigmoid(log_alpha / TEMPERATURE + TEMPERATURE * math.log(OPEN / (1 - OPEN)))
    return size.clamp(LEAST_SIZE, 1 - LEAST_SIZE)


def pulled(log_alpha: torch.Tensor, size: torch.Tensor, goal: float, progress: float) -> torch.Tensor:
    """A copy of log_alpha, pulled towards the target T (`goal`); its gradient is log_alpha's.

    size: what `after_update` returned after the step before, a scalar; unused before the first. progress:
    share of the masked steps done. The N (1 - T) masks with the least log_alpha are pulled towards 0, the
    more the further size is above T, and not at all where it is below; then the others are pulled towards 1,
    slightly, or by as much as size is below T.
    """
    if progress == 0:
        return log_alpha.clone()
    values = log_alpha.detach().flatten()
    closing = min(int(len(values) * (1 - goal) + 1), len(values))
    excess = (size - goal) * math.exp(math.sqrt(progress))
    ordered = values.sort().values
    chosen = (values <= ordered[closing - 1]) & (ordered[closing - 1] > -PULL) & (excess > 0)
    ratio = (1 - excess).clamp(LEAST_RATIO, MOST_RATIO)
    values = torch.where(chosen, ((values + PULL) * ratio - PULL).clamp(min=-PULL), values)
    if closing + 1 < len(values):
        ordered = values.sort().values
        chosen = (values >= ordered[closing]) & (ordered[closing] < PULL)
        ratio = (1 + excess).clamp(max=MOST_RATIO)
        values = torch.where(chosen, ((values - PULL) * ratio + PULL).clamp(max=PULL), values)
    return values.view_as(log_alpha) + (log_alpha - log_alpha.detach())  # + 0, which carries the gradient


@torch.no_grad()
def after_update(log_alpha: torch.Tensor, copy: torch.Tensor, goal: float, progress: float) -> torch.Tensor:
    """After AdamW's step: average log_alpha in place with the copy that the masks were drawn from.

    goal, progress: T and the share of the masked steps done, both of the next step. The weight of the copy is
    the distance of its mean expected size from T, at least progress^5 / 2. Returns that size, a scalar.
    """
    size = expected(copy).mean()
    weight = (size - goal).abs().clamp(max(LEAST_WEIGHT, min(1.0, progress) ** 5 / 2), 1.0)
    log_alpha.copy_(torch.lerp(log_alpha, copy, weight).clamp(-LIMIT, LIMIT))
    return size
