"""The merge of one layer from its Grams: in closed form, and what that would lose for each pair of heads.

Notation: G groups of D heads of size d, P = d/2. common/closed_form/values.py merges values,
common/closed_form/keys.py keys.
"""

from dataclasses import replace

import torch

from common.closed_form.keys import (
    KeyFit,
    RopeAverages,
    alternate,
    damped_solve,
    log_uniform,
    merge_rope_keys,
    start_by_pairs,
)
from common.closed_form.values import merge_values, ratio, value_loss
from common.method.merge import Merge
from common.method.rope import to_matrix
from common.method.stats import LayerGrams, group_blocks, stack_heads

SCORING_ROUNDS = 2  # of the alternation: enough to rank pairs of heads
RIDGE = 0.1  # of before_norms, relative to the mean diagonal: 0.01 to 0.3 do as well


def closed_form_layer(grams: LayerGrams, groups: torch.Tensor, value_rotation: torch.Tensor,
                      key_rotation: torch.Tensor, context: int) -> Merge:
    """The best merge of one layer after rotating its heads, from the Grams of Q v, u k, u q and W_O Q^T.

    groups: [G, D] head indices; value_rotation: Q [G, D, d, d]; key_rotation: u [G, D, P] complex. context:
    tokens over which merged keys preserve scores.
    """
    values = rotated(group_blocks(grams.value("raw"), groups), value_rotation)
    outputs = value_rotation @ grams.output[groups] @ value_rotation.mT
    keys = key_fit(grams, groups, to_matrix(key_rotation), context)
    return Merge(*merge_values(values, outputs), *merge_rope_keys(keys))


def rotated(blocks: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Q_i C[i, j] Q_j^T from C [G, D, D, d, d] and Q [G, D, d, d]."""
    return torch.einsum("giab,gijbc,gjdc->gijad", rotation, blocks, rotation)


def with_energies(merge: Merge, grams: LayerGrams, groups: torch.Tensor, key_rotation: torch.Tensor,
                  queries: bool) -> Merge:
    """The merge with the energies that a norm over all heads needs; queries: whether W_Q changes.

    Other arguments: as for closed_form_layer.
    """
    rotation = to_matrix(key_rotation)
    encode, decode = (maps.to(rotation.device) for maps in (merge.key_in, merge.key_out))
    key = rotated(group_blocks(grams.full_key, groups), rotation) / grams.tokens
    query = rotation @ grams.query[groups] @ rotation.mT / grams.tokens
    key_energy = torch.einsum("giab,gijbc,gjac->ga", encode, key, encode)
    query_energy = torch.einsum("giba,gibc,gica->gia", decode, query, decode)
    return replace(merge, key_energy=key_energy, query_energy=query_energy if queries else None)


def before_norms(merge: Merge, grams: LayerGrams, groups: torch.Tensor, key_rotation: torch.Tensor) -> Merge:
    """The merge of keys before norms of single heads that is best for one of the keys behind them.

    Each shared key is regressed on its group's keys, which are over one number per token, the layer's level.
    Other arguments: as for closed_form_layer.
    """
    heads, rotation, gram = grams.source_kv_heads, to_matrix(key_rotation), grams.normed() / grams.tokens
    source, cross = (stack_heads(rotated(group_blocks(gram[rows, heads:], groups), rotation))
                     for rows in (slice(heads, None), slice(heads)))
    energies, products = (torch.diagonal(matrix, dim1=-2, dim2=-1) for matrix in (source, cross))
    target = merge.key_in.transpose(1, 2).flatten(2)
    encode = target * ratio(products, energies)[:, None]  # each coordinate by itself
    residual = (target @ cross - encode @ source).mT
    encode = encode + damped_solve(source, residual, damping=RIDGE).mT  # [G, d, D d]
    spread = energies.unflatten(1, (groups.shape[1], -1)).mean(-1)
    key_in = encode.unflatten(2, merge.key_in.shape[1:3]).transpose(1, 2)
    variance = (key_in.square().sum(-1) * spread[..., None]).sum(1).mean(0)  # the groups share the norm
    energy = (encode @ source * encode).sum(-1)
    merge = with_energies(merge, grams, groups, key_rotation, queries=True)
    return replace(merge, key_in=key_in, key_energy=energy, key_variance=variance)


def key_fit(grams: LayerGrams, groups: torch.Tensor, rotation: torch.Tensor | None, context: int) -> KeyFit:
    """The least squares for merging the keys of `groups` [G, D] after rotation by [G, D, d, d] or none."""
    key, mean = group_blocks(grams.rope_key, groups) / grams.tokens, grams.key_mean[groups]
    query = grams.query[groups] / grams.tokens
    if grams.head_norms:  # what is the same for all keys no longer is behind another norm: it counts, too
        mean = torch.zeros_like(mean)
    if rotation is not None:
        key, mean = rotated(key, rotation), torch.einsum("giab,gib->gia", rotation, mean)
        query = rotation @ query @ rotation.mT
    return KeyFit(key, mean, query, RopeAverages(grams.frequencies, log_uniform(context), grams.scale))


def merging_loss(grams: LayerGrams, context: int) -> torch.Tensor:
    """What merging heads i and j loses of their values and keys, each as a share of the layer's: [H, H].

    Keys are merged RoPE-aware, by SCORING_ROUNDS of the alternation.
    """
    kv_heads = grams.source_kv_heads
    every_head = key_fit(grams, torch.arange(kv_heads)[:, None], None, context)
    loss = torch.zeros(kv_heads, kv_heads, dtype=torch.float64, device=grams.query.device)
    for head in range(kv_heads - 1):
        others = torch.arange(head + 1, kv_heads)
        fit = key_fit(grams, torch.stack((torch.full_like(others, head), others), dim=1), None, context)
        lost = alternate(fit, *start_by_pairs(fit), SCORING_ROUNDS)[2]
        loss[head, head + 1 :] = lost.clamp(min=0)  # pragma: no mutate: negative only by rounding
    lost_keys = ratio(loss + loss.T, (every_head.query * every_head.variance).sum())
    return value_loss(grams.value("raw"), grams.output) + lost_keys
