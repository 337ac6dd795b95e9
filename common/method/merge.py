"""Merging groups of key/value heads into shared ones: in float64, stored in the original dtype.

A `Merge` says how, for one layer: by the means (Eq. 25, 26), by the first heads, or in closed form
(common/method/closed_form.py). The heads of a group are consecutive, as common/method/fuse.py puts them.
"""

import copy
from dataclasses import dataclass

import torch

from common.method.fuse import head_columns, head_rows


@dataclass
class Merge:
    """How to merge one layer's G groups of D heads into shared heads, and read those in their place.

    v~ = sum_j value_in_j v_j, and v_i is replaced by value_out_i v~ (value_out_i is folded into W_O,i).
    k~ = sum_j key_in_j k_j before RoPE, and query i reads it by key_out_i (key_out_i^T is folded into W_Q,i).
    All [G, D, d, d] float64.
    """

    value_in: torch.Tensor
    value_out: torch.Tensor
    key_in: torch.Tensor
    key_out: torch.Tensor


def mean_merge(source_kv_heads: int, kv_heads: int, head_dim: int) -> Merge:
    """Eq. 25, 26: shared heads are the means of their groups; W_Q and W_O do not change."""
    shape = kv_heads, source_kv_heads // kv_heads
    eye = torch.eye(head_dim, dtype=torch.float64).expand(*shape, head_dim, head_dim)
    return Merge(eye / shape[1], eye, eye / shape[1], eye)


def first_merge(source_kv_heads: int, kv_heads: int, head_dim: int) -> Merge:
    """Shared heads are the first of their groups, retained; W_Q and W_O do not change."""
    mean = mean_merge(source_kv_heads, kv_heads, head_dim)
    first = torch.zeros_like(mean.value_in)
    first[:, 0] = torch.eye(head_dim)
    return Merge(first, mean.value_out, first, mean.key_out)


@torch.no_grad()
def merged_state(attention, merge: Merge) -> dict[str, torch.Tensor]:
    """The merged q, k, v and o_proj parameters by name. attention: a module with heads in group order."""
    groups, members, size, _ = merge.value_in.shape
    repeats, device = attention.num_key_value_groups, attention.q_proj.weight.device

    def per_kv_head(parts):  # [G, D, ...] -> [G * D, ...]
        return parts.flatten(0, 1).to(device)

    def per_query_head(parts):  # [G, D, ...] -> [query heads, ...]
        return per_kv_head(parts).repeat_interleave(repeats, 0)

    def group_sum(blocks):  # [G * D, d, n] -> [G, d, n]
        return blocks.view(groups, members, *blocks.shape[1:]).sum(1)

    merged = {}
    for name, parameter in attention.named_parameters():
        projection = name.partition(".")[0]
        if projection == "q_proj":
            merged[name] = per_query_head(merge.key_out.mT) @ head_rows(parameter, size)
        elif projection == "k_proj":
            merged[name] = group_sum(per_kv_head(merge.key_in) @ head_rows(parameter, size))
        elif projection == "v_proj":
            merged[name] = group_sum(per_kv_head(merge.value_in) @ head_rows(parameter, size))
        elif name == "o_proj.weight":
            columns = head_columns(parameter, size)
            merged[name] = torch.einsum("oia,iab->oib", columns, per_query_head(merge.value_out))
    for name, blocks in merged.items():
        parameter = attention.get_parameter(name)
        rows = (len(parameter),) if name == "o_proj.weight" else (-1,)
        merged[name] = blocks.reshape(*rows, *parameter.shape[1:]).to(parameter.dtype)
    return merged


@torch.no_grad()
def merge_layer(layer, index: int, config, merge: Merge):
    """A stock decoder layer with fewer key/value heads, from one whose groups are consecutive.

    config: the merged model's; index: the layer's. Parameters that merging does not change are shared.
    """
    with torch.device("meta"):
        merged = type(layer)(config, index)
    attention = {f"self_attn.{name}": tensor for name, tensor in merged_state(layer.self_attn, merge).items()}
    merged.load_state_dict(layer.state_dict() | attention, assign=True)
    return merged.eval()


def merged_config(config, kv_heads: int):
    """A copy of a config with kv_heads key/value heads."""
    config = copy.deepcopy(config)
    config.num_key_value_heads = kv_heads
    return config
