"""Rotations fused into weights, heads reordered, groups merged: float64 inside, back to the parameter's dtype.

A weight of shape [H * d, hidden] is read as H blocks of rows; o_proj [hidden, H * d] as H blocks of columns.
"""

import copy

import torch


def rotate_pairs(rows: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn RoPE pairs: rows [H, d, ...] times the unit numbers u [H, d/2], pair p being rows (p, p + d/2)."""
    first, second = rows.chunk(2, dim=1)
    real, imaginary = (part.reshape(*part.shape, *[1] * (rows.ndim - 2)) for part in (rotation.real, rotation.imag))
    return torch.cat((real * first - imaginary * second, imaginary * first + real * second), dim=1)


@torch.no_grad()
def fuse_layer(attention, order: list[int], value_rotation: torch.Tensor, key_rotation: torch.Tensor) -> None:
    """Rotate and reorder one attention layer in place; its function does not change (Eq. 12-17).

    attention: a transformers attention module with q/k/v/o_proj. order: head numbers, group after group.
    value_rotation: Q [H, d, d] orthogonal; key_rotation: u [H, d/2] unit complex; both in the *new* order.
    W_V <- Q W_V, W_O <- W_O Q^T, W_Q <- u W_Q, W_K <- u W_K; biases turn with their weights.
    """
    heads, size = len(order), value_rotation.shape[-1]

    def turned(parameter, turn):  # [H * d, ...] -> float64 blocks in the new order -> turned -> the same shape and dtype
        blocks = parameter.double().view(heads, size, -1)[order]
        return turn(blocks).reshape(parameter.shape).to(parameter.dtype)

    for projection in (attention.q_proj, attention.k_proj):
        for parameter in projection.parameters():
            parameter.copy_(turned(parameter, lambda blocks: rotate_pairs(blocks, key_rotation)))
    for parameter in attention.v_proj.parameters():
        parameter.copy_(turned(parameter, lambda blocks: value_rotation @ blocks))
    columns = attention.o_proj.weight.double().view(-1, heads, size)[:, order]
    columns = torch.einsum("ohb,hab->oha", columns, value_rotation)  # W_O,i Q_i^T
    attention.o_proj.weight.copy_(columns.flatten(1).to(attention.o_proj.weight.dtype))


@torch.no_grad()
def merge_heads(parameter: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """Eq. 25, 26: the mean of each group's rows. [H * d, ...] with groups consecutive -> [G * d, ...]."""
    blocks = parameter.double().view(kv_heads, -1, head_dim, *parameter.shape[1:])
    return blocks.mean(1).flatten(0, 1).to(parameter.dtype)


@torch.no_grad()
def merge_model(model, kv_heads: int):
    """A stock GQA model: a copy of an aligned MHA model with each group's keys and values averaged, no training."""
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = kv_heads
    merged = type(model)(config).to(dtype=model.dtype, device=model.device).eval()
    merged.generation_config = copy.deepcopy(model.generation_config)
    state = model.state_dict()
    for name, tensor in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            state[name] = merge_heads(tensor, kv_heads, config.head_dim)
    merged.load_state_dict(state)
    return merged
