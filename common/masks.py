"""L0 masks (Louizos et al.; Eq. 27-29): each head's own key/value projection fades into its group's shared one.

One mask z per layer and head, shared by key and value, drawn from a hard concrete distribution with parameter
log_alpha: s = sigmoid((logit(u) + log_alpha) / BETA), stretched to (GAMMA, ZETA) and clipped to [0, 1].
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1  # temperature and stretch of Louizos et al.
START = 7.5  # log_alpha at which E[1 - z] is 7e-4: every mask starts at 1 to within 1e-3
LIMIT = START  # log_alpha is kept within +-LIMIT: beyond it sigmoid is flat and a mask would never come back


def draw(log_alpha: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Hard concrete samples z in [0, 1], float32, same shape as log_alpha; differentiable.

    The noise is a function of (seed, step) alone: the same on every rank, and after a resume.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    noise = torch.rand(log_alpha.shape, generator=generator).clamp(1e-6, 1 - 1e-6).to(log_alpha.device)
    stretched = torch.sigmoid((noise.logit() + log_alpha) / BETA) * (ZETA - GAMMA) + GAMMA
    return stretched.clamp(0, 1)


def expected(log_alpha: torch.Tensor) -> torch.Tensor:
    """P(z > 0), the expected L0 norm of each mask: the differentiable size that Eq. 29 constrains."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def target(step: int, steps: int, warmup: float = 0.3) -> float:
    """T of Eq. 29: falls linearly from 1 to 0 over the first `warmup` share of the steps, then stays 0."""
    return max(0.0, 1 - step / (warmup * steps))


def l0_loss(log_alpha: torch.Tensor, goal: float) -> torch.Tensor:
    """Eq. 29 on the mean expected mask: |s - T| + (s - T)^2. (Version 1 of the paper prints it without |.|.)"""
    gap = expected(log_alpha).mean() - goal
    return gap.abs() + gap.square()


@torch.no_grad()
def clamp(log_alpha: torch.Tensor) -> None:
    """Keep log_alpha within +-LIMIT, in place, after an optimizer step."""
    log_alpha.clamp_(-LIMIT, LIMIT)


class BlendedProjection(nn.Module):
    """A k_proj or v_proj on its way from H heads to G: W_apply = z W + (1 - z) W~[group] (Eq. 27, 28).

    Weights are blended, not activations: one matrix product per call whatever z is. `z` is set before each forward
    pass, one number per head.
    """

    def __init__(self, original: nn.Linear, merged: nn.Linear, head_dim: int):
        super().__init__()
        self.original, self.merged, self.head_dim = original, merged, head_dim
        self.z: torch.Tensor | None = None

    def blend(self, own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """own [H * d, ...] and shared [G * d, ...] -> [H * d, ...], mixed in float32, back to own's dtype."""
        own_heads = own.view(-1, self.head_dim, *own.shape[1:])
        shared_heads = shared.view(-1, self.head_dim, *shared.shape[1:])
        repeated = shared_heads.repeat_interleave(len(own_heads) // len(shared_heads), dim=0)
        z = self.z.view(-1, *[1] * (own_heads.ndim - 1))
        return (z * own_heads + (1 - z) * repeated).to(own.dtype).view_as(own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own, shared = self.original, self.merged
        bias = None if own.bias is None else self.blend(own.bias, shared.bias)
        return F.linear(x, self.blend(own.weight, shared.weight), bias)


def blended_projections(model):
    """(layer number, attention module, its two BlendedProjections) of a patched model."""
    for index, layer in enumerate(model.model.layers):
        yield index, layer.self_attn, (layer.self_attn.k_proj, layer.self_attn.v_proj)


def patch(model, kv_heads: int) -> None:
    """Replace every k_proj and v_proj of an MHA model by a BlendedProjection; the new weights are left uninitialised."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in ("k_proj", "v_proj"):
            own = getattr(attention, name)
            shared = nn.Linear(own.in_features, kv_heads * attention.head_dim, bias=own.bias is not None,
                               device=own.weight.device, dtype=own.weight.dtype)
            setattr(attention, name, BlendedProjection(own, shared, attention.head_dim))


def set_masks(model, z: torch.Tensor) -> None:
    """Give every layer its masks; z: [layers, H]."""
    for index, _, projections in blended_projections(model):
        for projection in projections:
            projection.z = z[index]
