"""How a layer's groups of heads are merged into shared ones, as maps of head vectors (Eq. 25, 26)."""

from dataclasses import dataclass

import torch

from common.method.stats import LayerGrams


@dataclass
class Merge:
    """How to merge one layer's G groups of D heads into shared heads, and read those in their place.

    v~ = sum_j value_in_j v_j, and v_i is replaced by value_out_i v~ (value_out_i is folded into W_O,i).
    k~ = sum_j key_in_j k_j before RoPE, and query i reads it by key_out_i (key_out_i^T is folded into W_Q,i).
    All [G, D, d, d] float64. Behind a norm over all heads, k and q are what the norm gives, and the norm of
    the merged layer needs E[k~^2] [G, d] and E[(key_out_i^T q_i)^2] [G, D, d] of its coordinates, the latter
    summed over query heads; None leaves its scale, or W_Q and its norm, as they are. With norms of single
    heads, q is what they give, k is before them, and key_variance [d] is what E[k~^2] would be if the
    coordinates of k were uncorrelated, averaged over groups; None leaves these norms alone and q before them.
    """

    value_in: torch.Tensor
    value_out: torch.Tensor
    key_in: torch.Tensor
    key_out: torch.Tensor
    key_energy: torch.Tensor | None = None
    query_energy: torch.Tensor | None = None
    key_variance: torch.Tensor | None = None


def mean_merge(grams: LayerGrams, groups: torch.Tensor, value_rotation: torch.Tensor,
               key_rotation: torch.Tensor) -> Merge:
    """Eq. 25, 26: shared heads are the means of their groups; W_Q and W_O do not change.

    groups: [G, D] head indices; value_rotation: Q [G, D, d, d]; key_rotation: u [G, D, d/2] complex.
    """
    eye = torch.eye(value_rotation.shape[-1], dtype=torch.float64).expand(value_rotation.shape)
    mean = eye / groups.shape[1]
    return Merge(mean, eye, mean, eye)
