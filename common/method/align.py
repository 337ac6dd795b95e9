"""One layer from its Grams: similarities, rotations, and the cosine within groups before and after rotation.

Notation: G groups of D key/value heads, head size d. Q [G, D, d, d] float64 rotates values, u [G, D, d/2]
complex128 rotates keys; both in the order of `groups` [G, D] (head indices).
"""

import torch

from common.method.procrustes import align_keys, align_values, key_similarity, pair_mean, value_similarity
from common.method.stats import CRITERIA, LayerGrams, group_blocks


def layer_similarity(grams: LayerGrams) -> dict[str, torch.Tensor]:
    """One layer's similarities by name, before and after alignment, each [H, H]."""
    matrices = {}
    for criterion, kind in CRITERIA.items():
        pairs = {
            "key": key_similarity(grams.key(kind), grams.tokens, criterion, grams.free,
                                  grams.joint_norm),
            "value": value_similarity(grams.value(kind), grams.tokens, criterion),
        }
        for head, (before, after) in pairs.items():
            matrices[f"{head}.{criterion}.before"] = before
            matrices[f"{head}.{criterion}.after"] = after
    return matrices


def align_layer(grams: LayerGrams, groups: torch.Tensor, criterion: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and u by Procrustes on unit-norm vectors ("cos") or raw ones ("dist"); the identity for "none"."""
    if criterion == "none":
        pairs, device = len(grams.free), grams.free.device
        identity = torch.eye(2 * pairs, dtype=torch.float64, device=device)
        ones = torch.ones(*groups.shape, pairs, dtype=torch.complex128, device=device)
        return identity.expand(*groups.shape, 2 * pairs, 2 * pairs), ones
    kind = CRITERIA[criterion]
    value_rotation = align_values(group_blocks(grams.value(kind), groups))
    key_rotation = align_keys(group_blocks(grams.key(kind), groups), grams.free, grams.joint_norm)
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
) -> dict[str, float]:
    """Mean cosine (Eq. 2, 3) over pairs of heads within groups, before and after rotation by Q and u.

    Returns key_before, key_after, value_before and value_after.
    """
    value, key = group_blocks(grams.value("unit"), groups), group_blocks(grams.key("unit"), groups)
    overlaps = {
        "key_before": key.real.sum(-1),
        "key_after": key_overlap(key, key_rotation),
        "value_before": torch.einsum("gijaa->gij", value),
        "value_after": value_overlap(value, value_rotation),
    }
    return {name: float(pair_mean(overlap).mean()) / grams.tokens for name, overlap in overlaps.items()}
