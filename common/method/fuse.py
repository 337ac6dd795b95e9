"""Rotations fused into weights, heads reordered, groups merged: float64 inside, back to the parameter's dtype.

A weight of shape [H * d, hidden] is read as H blocks of rows; o_proj [hidden, H * d] as H blocks of columns. Rotations and merges
belong to key/value heads; where a source has fewer of those than query heads, each takes all its query heads with it: their
rows of q_proj and columns of o_proj move and turn as it does.
"""

import copy
from dataclasses import dataclass

import torch

from common.method.rope import rotate_pairs


@torch.no_grad()
def fuse_layer(attention, order: list[int], value_rotation: torch.Tensor, key_rotation: torch.Tensor) -> None:
    """Rotate and reorder one attention layer in place; its function does not change (Eq. 12-17).

    attention: a transformers attention module with q/k/v/o_proj. order: K key/value head numbers, group after group.
    value_rotation: Q [K, d, d] orthogonal; key_rotation: u [K, d/2] unit complex; both in the *new* order.
    W_V <- Q W_V, W_O <- W_O Q^T, W_Q <- u W_Q, W_K <- u W_K; biases turn with their weights.
    """
    size = value_rotation.shape[-1]
    readers = attention.q_proj.out_features // attention.k_proj.out_features  # query heads of a key/value head
    query_order = [head * readers + reader for head in order for reader in range(readers)]
    query_rotation, output_rotation = (rotation.repeat_interleave(readers, 0) for rotation in (key_rotation, value_rotation))

    def turned(parameter, order, turn):  # [heads * d, ...] -> float64 blocks in the new order -> turned -> the same shape and dtype
        blocks = parameter.double().view(len(order), size, -1)[order]
        return turn(blocks).reshape(parameter.shape).to(parameter.dtype)

    for parameter in attention.q_proj.parameters():
        parameter.copy_(turned(parameter, query_order, lambda blocks: rotate_pairs(blocks, query_rotation)))
    for parameter in attention.k_proj.parameters():
        parameter.copy_(turned(parameter, order, lambda blocks: rotate_pairs(blocks, key_rotation)))
    for parameter in attention.v_proj.parameters():
        parameter.copy_(turned(parameter, order, lambda blocks: value_rotation @ blocks))
    columns = attention.o_proj.weight.double().view(-1, len(query_order), size)[:, query_order]
    columns = torch.einsum("ohb,hab->oha", columns, output_rotation)  # W_O,i Q_i^T
    attention.o_proj.weight.copy_(columns.flatten(1).to(attention.o_proj.weight.dtype))


@dataclass
class Merge:
    """How one layer's heads become G: what each head puts into the shared key and value, and how it reads them back.

    v~ = sum_j value_in_j v_j, and v_i is replaced by value_out_i v~, which W_O,i absorbs; per RoPE pair k~ = sum_j key_in_j k_j,
    and k_i is replaced by key_out_i k~, which W_Q,i absorbs. All float64, of D heads in each of G groups.
    """

    value_in: torch.Tensor  # [G, D, d, d]
    value_out: torch.Tensor  # [G, D, d, d]
    key_in: torch.Tensor  # [G, D, d/2] complex
    key_out: torch.Tensor  # [G, D, d/2] complex


def mean_merge(heads: int, kv_heads: int, head_dim: int) -> Merge:
    """Eq. 25, 26: shared heads are means of the source's `heads` key/value heads, queries and outputs stay as they are."""
    shape = kv_heads, heads // kv_heads
    eye = torch.eye(head_dim, dtype=torch.float64).expand(*shape, head_dim, head_dim)
    one = torch.ones(*shape, head_dim // 2, dtype=torch.complex128)
    return Merge(eye / shape[1], eye, one / shape[1], one)


@torch.no_grad()
def merged_state(attention, merge: Merge) -> dict[str, torch.Tensor]:
    """The merged layer's q, k, v and o_proj parameters by name, from an attention layer whose groups are consecutive."""
    groups, members, size, _ = merge.value_in.shape
    readers = attention.q_proj.out_features // attention.k_proj.out_features  # query heads of a key/value head

    def blocks(parameter):  # [heads * d, ...] -> [heads, d, n] float64
        return parameter.double().view(-1, size, parameter[0].numel())

    def of_queries(parts):  # [G, D, ...] of key/value heads -> [H, ...] of their query heads
        return parts.flatten(0, 1).repeat_interleave(readers, 0)

    state = {}
    for name, parameter in attention.named_parameters():
        projection = name.split(".")[0]
        if projection == "q_proj":
            merged = rotate_pairs(blocks(parameter), of_queries(merge.key_out.conj()).to(parameter.device))
        elif projection == "k_proj":
            parts = rotate_pairs(blocks(parameter), merge.key_in.flatten(0, 1).to(parameter.device))
            merged = parts.view(groups, members, *parts.shape[1:]).sum(1)
        elif projection == "v_proj":
            parts = merge.value_in.flatten(0, 1).to(parameter.device) @ blocks(parameter)
            merged = parts.view(groups, members, *parts.shape[1:]).sum(1)
        elif name == "o_proj.weight":
            columns = parameter.double().view(len(parameter), -1, size)
            merged = torch.einsum("oia,iab->oib", columns, of_queries(merge.value_out).to(parameter.device)).flatten(1)
        else:
            continue
        shape = parameter.shape if projection in ("q_proj", "o_proj") else (groups * size, *parameter.shape[1:])
        state[name] = merged.reshape(shape).to(parameter.dtype)
    return state


@torch.no_grad()
def merge_layer(layer, index: int, config, merge: Merge):
    """A stock decoder layer with fewer key/value heads, from one whose groups are consecutive; what merging leaves alone is shared.

    config: the merged model's, with its num_key_value_heads; index: of the layer.
    """
    with torch.device("meta"):
        merged = type(layer)(config, index)
    state = layer.state_dict() | {f"self_attn.{name}": tensor for name, tensor in merged_state(layer.self_attn, merge).items()}
    merged.load_state_dict(state, assign=True)
    return merged.eval()


def merged_config(config, kv_heads: int):
    """A source's config with kv_heads key/value heads."""
    config = copy.deepcopy(config)
    config.num_key_value_heads = kv_heads
    return config


@torch.no_grad()
def merge_model(model, kv_heads: int, merges: list[Merge] | None = None):
    """A stock GQA model: a copy of a whole model whose groups are consecutive, each layer's heads merged.

    merges: one per layer; the paper's means by default.
    """
    config = merged_config(model.config, kv_heads)
    merged = type(model)(config).to(dtype=model.dtype, device=model.device).eval()
    state = model.state_dict()
    for index, layer in enumerate(model.model.layers):
        head_dim = layer.self_attn.head_dim
        source_kv_heads = layer.self_attn.k_proj.out_features // head_dim
        merge = merges[index] if merges else mean_merge(source_kv_heads, kv_heads, head_dim)
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in merge_layer(layer, index, config, merge).state_dict().items()}
    merged.load_state_dict(state)
    return merged
