"""Fusing rotations into weights, reordering heads, merging groups: in float64, stored in the original dtype.

A weight [heads * d, hidden] consists of blocks of rows, one per head; o_proj [hidden, heads * d] of blocks of
columns. Rotations and merges are per key/value head. In a GQA source, its query heads go along: their rows of
q_proj and columns of o_proj are moved and rotated with it.
"""

import copy
from dataclasses import dataclass

import torch

from common.method.rope import rotate_pairs


def head_rows(parameter: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A projection's weight [heads * d, hidden] or bias [heads * d] -> [heads, d, hidden or 1] float64."""
    return parameter.double().view(-1, head_dim, parameter[0].numel())


def head_columns(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """o_proj's weight [hidden, heads * d] -> [hidden, heads, d] float64."""
    return weight.double().view(len(weight), -1, head_dim)


def queries_per_kv_head(attention) -> int:
    """Query heads per key/value head of an attention module."""
    return attention.q_proj.out_features // attention.k_proj.out_features


@torch.no_grad()
def fuse_layer(attention, order: list[int], value_rotation: torch.Tensor, key_rotation: torch.Tensor) -> None:
    """Rotate and reorder the heads of one attention layer in place; its output is unchanged (Eq. 11-17).

    attention: a transformers attention module with q/k/v/o_proj. order: its K key/value head indices, group
    after group. value_rotation: Q [K, d, d] orthogonal; key_rotation: u [K, d/2] unit complex; both in the
    *new* order. W_V <- Q W_V, W_O <- W_O Q^T (Eq. 12, 13), W_Q <- u W_Q, W_K <- u W_K (Eq. 14-16); biases
    with their weights.
    """
    size, repeats = value_rotation.shape[-1], queries_per_kv_head(attention)
    query_order = [head * repeats + query for head in order for query in range(repeats)]
    query_rotation = key_rotation.repeat_interleave(repeats, 0)
    output_rotation = value_rotation.repeat_interleave(repeats, 0)

    def store(parameter, blocks):
        parameter.copy_(blocks.reshape(parameter.shape).to(parameter.dtype))

    for parameter in attention.q_proj.parameters():
        store(parameter, rotate_pairs(head_rows(parameter, size)[query_order], query_rotation))
    for parameter in attention.k_proj.parameters():
        store(parameter, rotate_pairs(head_rows(parameter, size)[order], key_rotation))
    for parameter in attention.v_proj.parameters():
        store(parameter, value_rotation @ head_rows(parameter, size)[order])
    weight = attention.o_proj.weight  # its bias belongs to no head
    columns = head_columns(weight, size)[:, query_order]
    store(weight, torch.einsum("ohb,hab->oha", columns, output_rotation))  # W_O Q^T


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
    repeats, device = queries_per_kv_head(attention), attention.q_proj.weight.device

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


@torch.no_grad()
def merge_model(model, kv_heads: int, merges: list[Merge] | None = None):
    """A stock GQA model from a model whose groups are consecutive; the two share no tensors.

    merges: one per layer; default: the paper's means.
    """
    config = merged_config(model.config, kv_heads)
    merged = type(model)(config).to(dtype=model.dtype, device=model.device).eval()
    state = model.state_dict()
    for index, layer in enumerate(model.model.layers):
        head_dim = layer.self_attn.head_dim
        source_kv_heads = layer.self_attn.k_proj.out_features // head_dim
        merge = merges[index] if merges else mean_merge(source_kv_heads, kv_heads, head_dim)
        merged_layer = merge_layer(layer, index, config, merge).state_dict()
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in merged_layer.items()}
    merged.load_state_dict(state)
    return merged
