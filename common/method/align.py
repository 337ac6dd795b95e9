"""The rotations of one layer's groups, from its Grams, and how alike the heads of a group are before and
after.

Notation: G groups of D key/value heads, head size d. Q [G, D, d, d] float64 rotates values, u [G, D, d/2]
complex128 keys; both in the order of `groups` [G, D], head numbers.
"""

import torch

from common.method.procrustes import align_keys, align_values, pair_mean
from common.method.stats import CRITERIA, LayerGrams, group_blocks


def no_rotation(grams: LayerGrams, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and u that leave every head as it is."""
    pairs, device = len(grams.free), grams.free.device
    identity = torch.eye(2 * pairs, dtype=torch.float64, device=device)
    ones = torch.ones(*groups.shape, pairs, dtype=torch.complex128, device=device)
    return identity.expand(*groups.shape, 2 * pairs, 2 * pairs), ones


def align_layer(grams: LayerGrams, groups: torch.Tensor, criterion: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and u by Algorithm 1: "cos" aligns unit-norm vectors (Eq. 7-9), "dist" raw ones (Eq. 20, 21)."""
    kind = CRITERIA[criterion]
    value_rotation = align_values(group_blocks(grams.value(kind), groups))
    key_rotation = align_keys(group_blocks(grams.key(kind), groups), free=grams.free)
    return value_rotation, key_rotation


def value_overlap(gram: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """sum_n <Q_i v_i, Q_j v_j> [..., D, D] from C [..., D, D, d, d] and Q [..., D, d, d]."""
    return torch.einsum("...iab,...ijbc,...jac->...ij", rotation, gram, rotation)


def key_overlap(gram: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """sum_n Re(conj(u_i z_i) u_j z_j) [..., D, D] from c [..., D, D, d/2] and u [..., D, d/2]."""
    return torch.einsum("...ip,...ijp,...jp->...ij", rotation.conj(), gram, rotation).real


def within_group_cosine(
    grams: LayerGrams,
    groups: torch.Tensor,
    value_rotation: torch.Tensor,
    key_rotation: torch.Tensor,
    tokens: int,
) -> dict[str, float]:
    """Mean cosine (Eq. 2, 3) over the pairs of heads within groups, "key" and "value", rotated by Q and u.

    tokens: N, what the Grams sum over.
    """
    value = value_overlap(group_blocks(grams.value("unit"), groups), value_rotation)
    key = key_overlap(group_blocks(grams.key("unit"), groups), key_rotation)
    return {"key": float(pair_mean(key).mean()) / tokens, "value": float(pair_mean(value).mean()) / tokens}
