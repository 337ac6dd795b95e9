"""L0 masks (Louizos et al.; Eq. 27-29): each head's own key/value projection fades into its group's shared one.

One mask z per layer and head, shared by its projections, drawn from a hard concrete distribution with parameter
log_alpha: s = sigmoid((logit(u) + log_alpha) / BETA), stretched to (GAMMA, ZETA) and clipped to [0, 1].
"""

import math
import re

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
    """A projection on its way from H heads of its own to the merged one: W_apply = z W + (1 - z) W~ (Eq. 27, 28).

    k_proj and v_proj: W~ has G heads, each shared by a group. q_proj and o_proj, where merging changes them too: W~ has H
    heads as W; a head's part of o_proj is a block of columns. Weights are blended, not activations: one matrix product per
    call whatever z is. `z`, one number per key/value head of the source, is set before each forward pass; a query head
    follows the one it reads.
    """

    def __init__(self, original: nn.Linear, merged: nn.Linear, head_dim: int, columns: bool = False):
        super().__init__()
        self.original, self.merged, self.head_dim, self.columns = original, merged, head_dim, columns
        self.z: torch.Tensor | None = None

    def blend(self, own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """own [H * d, ...] and shared [G * d, ...] -> [H * d, ...], mixed in float32, back to own's dtype."""
        if self.columns:
            z = self.z.repeat_interleave(own.shape[1] // len(self.z))
            return (z * own + (1 - z) * shared).to(own.dtype)
        own_heads = own.view(-1, self.head_dim, *own.shape[1:])
        shared_heads = shared.view(-1, self.head_dim, *shared.shape[1:])
        repeated = shared_heads.repeat_interleave(len(own_heads) // len(shared_heads), dim=0)
        z = self.z.repeat_interleave(len(own_heads) // len(self.z)).view(-1, *[1] * (own_heads.ndim - 1))
        return (z * own_heads + (1 - z) * repeated).to(own.dtype).view_as(own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own, shared = self.original, self.merged
        if self.columns or own.bias is None:
            bias = shared.bias  # o_proj's belongs to no head
        else:
            bias = self.blend(own.bias, shared.bias)
        return F.linear(x, self.blend(own.weight, shared.weight), bias)


KEY_VALUE, WHOLE_HEAD = ("k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")


def blended_projections(model):
    """(layer number, attention module, its BlendedProjections) of a patched model."""
    for index, layer in enumerate(model.model.layers):
        yield index, layer.self_attn, [module for module in layer.self_attn.children() if isinstance(module, BlendedProjection)]


def patch(model, kv_heads: int, names: tuple[str, ...] = KEY_VALUE) -> None:
    """Replace the named projections of a source model by BlendedProjections; the new weights are left uninitialised."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in names:
            own = getattr(attention, name)
            rows = kv_heads * attention.head_dim if name in KEY_VALUE else own.out_features
            shared = nn.Linear(own.in_features, rows, bias=own.bias is not None, device=own.weight.device, dtype=own.weight.dtype)
            setattr(attention, name, BlendedProjection(own, shared, attention.head_dim, columns=name == "o_proj"))


def set_masks(model, z: torch.Tensor) -> None:
    """Give every layer its masks; z: [layers, key/value heads of the source]."""
    for index, _, projections in blended_projections(model):
        for projection in projections:
            projection.z = z[index]


def blended_name(name: str, names: tuple[str, ...] = KEY_VALUE) -> str:
    """A GQA model's parameter name -> that of the merged part in the patched model."""
    return re.sub(rf"\.({'|'.join(names)})\.", r".\1.merged.", name)
