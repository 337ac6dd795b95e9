"""Edits of a layer's weights: fusing rotations (Eq. 11-17), and merging groups of heads into shared ones.

All in float64, stored in the original dtype. A weight [heads * d, hidden] consists of blocks of rows, one per
head; o_proj [hidden, heads * d] of blocks of columns. Rotations are per key/value head. In a GQA source, its
query heads go along: their rows of q_proj and columns of o_proj are moved and rotated with it. `fuse_layer`
leaves the heads of a group consecutive, as merging expects them. A `Merge` says how a layer is merged.
"""

import copy

import torch

from common.method.merge import Merge
from common.method.rope import rotate_pairs
from common.models.families import (
    as_stored,
    head_parameters,
    norm_kind,
    per_query_head,
    query_heads_per_kv_head,
)


@torch.no_grad()
def merged_state(attention, merge: Merge) -> dict[str, torch.Tensor]:
    """The merged q, k, v and o_proj parameters by name. attention: a module with heads in group order."""
    _, members, size, _ = merge.value_in.shape
    parameters, merged = head_parameters(attention), {}
    repeats, device = query_heads_per_kv_head(attention), parameters["o_proj.weight"].device
    maps = merge.value_in, merge.key_in, merge.value_out, merge.key_out.mT
    value_in, key_in, *outs = (part.flatten(0, 1).to(device) for part in maps)  # [G * D, d, d]
    value_out, key_out = (part.repeat_interleave(repeats, 0) for part in outs)  # [query heads, d, d]

    def group_sum(blocks):  # [G * D, d, n] -> [G, d, n]
        return blocks.unflatten(0, (-1, members)).sum(1)

    single = norm_kind(attention) == "head"  # one norm, which the heads share
    norms = {name[0]: head_rows(parameters[name], size) for name in parameters if "_norm." in name}
    if single:
        norms = {} if merge.key_variance is None else {"q": norms["q"]}
    for name, parameter in parameters.items():
        projection = name.partition(".")[0]
        if projection == "q_proj":
            merged[name] = key_out @ (norms.get("q", 1) * head_rows(parameter, size))
        elif projection == "k_proj":
            merged[name] = group_sum(key_in @ (norms.get("k", 1) * head_rows(parameter, size)))
        elif projection == "v_proj":
            merged[name] = group_sum(value_in @ head_rows(parameter, size))
        elif name == "o_proj.weight":
            merged[name] = torch.einsum("oia,iab->oib", head_columns(parameter, size), value_out)
    if norms:
        variance = (merge.key_variance[:, None].to(device) if single
                    else group_sum(key_in.square() @ norms["k"].square()))
        behind_norm(merged, "k", variance, merge.key_energy)
    if norms and merge.query_energy is not None:
        variance = (key_out.square() @ norms["q"].square()).unflatten(0, (-1, repeats)).mean(1)
        variance = variance.repeat_interleave(repeats, 0)
        energy = merge.query_energy.flatten(0, 1).to(device).repeat_interleave(repeats, 0) / repeats
        behind_norm(merged, "q", variance.mean(0) if single else variance, energy)
    elif norms:
        merged = {name: blocks for name, blocks in merged.items() if name[0] != "q"}
    stored = {name: blocks.reshape(-1, *parameters[name].shape[1:]).to(parameters[name].dtype)
              for name, blocks in merged.items()}
    return as_stored(attention, stored)


def behind_norm(merged: dict, letter: str, variance: torch.Tensor, energy: torch.Tensor | None) -> None:
    """Divide the blocks of q or k_proj by a scale per row, which becomes the weights of their norm, in place.

    The norm divides by a root mean square over rows that merging has changed: each token is off by a number.
    The scale is that of uncorrelated rows (variance: [heads, d, 1] its square), times what makes the mean
    square of that number 1 (energy: [heads, d]).
    """
    variance = variance.where(variance > 0, 1)  # pragma: no mutate: rows of zeros stay zero
    ratio = 1.0 if energy is None else (energy.to(variance.device)[..., None] / variance).mean()
    scale = merged[f"{letter}_norm.weight"] = (ratio * variance).sqrt()
    for name in [name for name in merged if name.startswith(f"{letter}_proj.")]:
        merged[name] = merged[name] / scale


@torch.no_grad()
def merge_layer(layer, index: int, config, merge: Merge):
    """A stock decoder layer with fewer key/value heads, from one whose groups are consecutive.

    config: the merged model's; index: the layer's. Parameters that merging does not change are shared.
    """
    with torch.device("meta"):
        merged = type(layer)(config, index)
    attention = {f"self_attn.{name}": tensor for name, tensor in merged_state(layer.self_attn, merge).items()}
    merged.load_state_dict(layer.state_dict() | attention, assign=True)
    merged.self_attn.rope_pairs = layer.self_attn.rope_pairs
    return merged.eval()


def merged_config(config, kv_heads: int):
    """A copy of a config with kv_heads key/value heads."""
    config = copy.deepcopy(config)
    config.num_key_value_heads = kv_heads
    return config


def head_rows(parameter: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A projection's weight [heads * d, hidden] or bias [heads * d] -> [heads, d, hidden or 1] float64."""
    return parameter.double().view(-1, head_dim, parameter[0].numel())


def head_columns(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """o_proj's weight [hidden, heads * d] -> [hidden, heads, d] float64."""
    return weight.double().view(len(weight), -1, head_dim)


@torch.no_grad()
def fuse_layer(attention, order: list[int], value_rotation: torch.Tensor, key_rotation: torch.Tensor) -> None:
    """Rotate and reorder the heads of one attention layer in place; its output is unchanged (Eq. 11-17).

    attention: a transformers attention module. order: its K key/value head indices, group
    after group. value_rotation: Q [K, d, d] orthogonal; key_rotation: u [K, d/2] unit complex; both in the
    *new* order. W_V <- Q W_V, W_O <- W_O Q^T (Eq. 12, 13), W_Q <- u W_Q, W_K <- u W_K (Eq. 14-16); biases
    with their weights. The weights of a norm over all heads change places as quarter turns make the rows.
    """
    size, repeats = value_rotation.shape[-1], query_heads_per_kv_head(attention)
    query_order = [head * repeats + query for head in order for query in range(repeats)]
    query_rotation = key_rotation.repeat_interleave(repeats, 0)
    output_rotation = value_rotation.repeat_interleave(repeats, 0)
    turns = {"q": (query_order, query_rotation), "k": (order, key_rotation)}
    rotated = head_parameters(attention)
    for name, parameter in rotated.items():
        if name == "o_proj.weight":
            columns = head_columns(parameter, size)[:, query_order]
            blocks = torch.einsum("ohb,hab->oha", columns, output_rotation)  # W_O Q^T
        elif name.startswith("v_proj."):
            blocks = value_rotation @ head_rows(parameter, size)[order]
        elif len(parameter) > size:  # norms of single heads are one for all of them
            heads, rotation = turns[name[0]]
            turn = exchange_pairs if "_norm." in name else rotate_pairs
            blocks = turn(head_rows(parameter, size)[heads], rotation)
        else:
            blocks = parameter
        rotated[name] = blocks.reshape(parameter.shape).to(parameter.dtype)
    for name, tensor in as_stored(attention, rotated).items():
        attention.get_parameter(name).copy_(tensor)
    for parameter in per_query_head(attention):
        parameter.copy_(parameter[query_order])


def fuse_groups(attention, groups: torch.Tensor, value_rotation: torch.Tensor,
                key_rotation: torch.Tensor) -> None:
    """fuse_layer, where groups are [G, D] head indices and rotations Q [G, D, d, d] and u [G, D, d/2]."""
    fuse_layer(attention, groups.flatten().tolist(), value_rotation.flatten(0, 1), key_rotation.flatten(0, 1))


def exchange_pairs(rows: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rows [H, d, n] with those of a pair exchanged where u [H, d/2] is a turn by a quarter."""
    first, second = rows.chunk(2, dim=1)
    stays = rotation.real.abs()[..., None] > 0.5
    return torch.cat((first.where(stays, second), second.where(stays, first)), dim=1)
