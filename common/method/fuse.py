"""Fusing rotations into weights and reordering heads (Eq. 11-17): in float64, stored in the original dtype.

A weight [heads * d, hidden] consists of blocks of rows, one per head; o_proj [hidden, heads * d] of blocks of
columns. Rotations are per key/value head. In a GQA source, its query heads go along: their rows of q_proj and
columns of o_proj are moved and rotated with it.
"""

import torch

from common.families import head_parameters
from common.method.rope import rotate_pairs


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
    size, repeats = value_rotation.shape[-1], attention.num_key_value_groups
    query_order = [head * repeats + query for head in order for query in range(repeats)]
    query_rotation = key_rotation.repeat_interleave(repeats, 0)
    output_rotation = value_rotation.repeat_interleave(repeats, 0)

    def store(parameter, blocks):
        parameter.copy_(blocks.reshape(parameter.shape).to(parameter.dtype))

    turns = {"q": (query_order, query_rotation), "k": (order, key_rotation)}
    for name, parameter in head_parameters(attention).items():
        if name == "o_proj.weight":
            columns = head_columns(parameter, size)[:, query_order]
            store(parameter, torch.einsum("ohb,hab->oha", columns, output_rotation))  # W_O Q^T
        elif name.startswith("v_proj."):
            store(parameter, value_rotation @ head_rows(parameter, size)[order])
        else:
            heads, rotation = turns[name[0]]
            turn = exchange_pairs if "_norm." in name else rotate_pairs
            store(parameter, turn(head_rows(parameter, size)[heads], rotation))


def exchange_pairs(rows: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rows [H, d, n] with those of a pair exchanged where u [H, d/2] is a turn by a quarter."""
    first, second = rows.chunk(2, dim=1)
    stays = rotation.real.abs()[..., None] > 0.5
    return torch.cat((first.where(stays, second), second.where(stays, first)), dim=1)
