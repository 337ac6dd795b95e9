"""Which channels of the cached keys to remove: what it costs, and four ways to make that small.

Of one key head, K [L, d] are the keys that lose channels and Q [n, d] the prompt's last queries, those of all query heads that read the
key one below the other; both after RoPE. Without the channels in B the scores err by

    || Q K^T - Q S K^T ||_F^2 = sum_{i, j in B} W[i, j],    W = (K^T K) o (Q^T Q)

S being the identity without B, o the elementwise product. W is positive semidefinite: no set costs less than nothing.

  think        the least W[i, i], K being the whole prompt
  align        the same, K being what will really be pruned: the prompt without its last `recent` keys
  greedy       B grown by the least W[i, i] + 2 sum_{j in B} W[i, j], K as for align
  greedy+swap  the best of these three, then a removed and a kept channel exchanged while that lowers the sum of what will be pruned:
               never above any of them

All heads at once, in float64. W is [..., d, d]; a set of channels is bool [..., d], true where removed.
"""

import itertools
import math

import torch


def interactions(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """W [..., d, d] float64 of queries [..., n, d] and keys [..., L, d]."""
    queries, keys = queries.double(), keys.double()
    return (queries.mT @ queries) * (keys.mT @ keys)


def objective(weights: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """sum_{i, j in B} W[i, j], [...]: the squared error of the scores."""
    removed = removed.to(weights.dtype)
    return (removed[..., None, :] @ weights @ removed[..., None])[..., 0, 0]


def cheapest_alone(weights: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` channels of least W[i, i], as if none knew of another."""
    order = weights.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def greedy(weights: torch.Tensor, count: int) -> torch.Tensor:
    """`count` channels, each the one that adds least to those before it."""
    cost = weights.diagonal(dim1=-2, dim2=-1).clone()
    removed = torch.zeros_like(cost, dtype=torch.bool)
    for _ in range(count):
        channel = cost.masked_fill(removed, math.inf).argmin(-1, keepdim=True)
        removed.scatter_(-1, channel, True)
        cost += 2 * weights.take_along_dim(channel[..., None], -2)[..., 0, :]
    return removed


def exchanged(weights: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """`removed` after exchanging a removed and a kept channel, the best pair each time, for as long as the sum falls."""
    alone, size = weights.diagonal(dim1=-2, dim2=-1), weights.shape[-1]
    while True:
        shared = 2 * (weights @ removed.to(weights.dtype)[..., None])[..., 0]
        back = (alone - shared).masked_fill(~removed, math.inf)
        out = (alone + shared).masked_fill(removed, math.inf)
        change, pair = (back[..., :, None] + out[..., None, :] - 2 * weights).flatten(-2).min(-1)
        falls = change < -1e-12 * alone.sum(-1)  # less is rounding, and could go round in circles
        if not falls.any():
            return removed
        pair = torch.stack((pair // size, pair % size), -1)
        removed = removed ^ (torch.zeros_like(removed).scatter_(-1, pair, True) & falls[..., None])


def best_of(weights: torch.Tensor, *sets: torch.Tensor) -> torch.Tensor:
    """Per head the set of least cost."""
    costs = torch.stack([objective(weights, removed) for removed in sets])
    return torch.stack(sets).take_along_dim(costs.argmin(0)[None, ..., None], 0)[0]


def exact(weights: torch.Tensor, count: int) -> torch.Tensor:
    """The best set there is, by trying all: for d <= 16, to judge the others by."""
    size = weights.shape[-1]
    chosen = torch.tensor(list(itertools.combinations(range(size), count)))
    sets = torch.zeros(len(chosen), size, dtype=weights.dtype).scatter_(1, chosen, 1.0).to(weights.device)
    costs = weights.flatten(-2) @ (sets[:, :, None] * sets[:, None, :]).flatten(1).mT
    return sets.bool()[costs.argmin(-1)]


SELECTORS = {  # of W as it will be pruned, W of the whole prompt, and how many go
    "think": lambda weights, whole, count: cheapest_alone(whole, count),
    "align": lambda weights, whole, count: cheapest_alone(weights, count),
    "greedy": lambda weights, whole, count: greedy(weights, count),
    "greedy+swap": lambda weights, whole, count: exchanged(
        weights, best_of(weights, cheapest_alone(whole, count), cheapest_alone(weights, count), greedy(weights, count))),
}


def removed_count(ratio: float, size: int) -> int:
    """How many of `size` channels go: all but floor((1 - ratio) size)."""
    return size - math.floor((1 - ratio) * size + 1e-9)  # 0.1 * 10 is to be 1, whatever 1 - 0.9 is


def kept_channels(select: str, queries: torch.Tensor, keys: torch.Tensor, recent: int, count: int) -> torch.Tensor:
    """Indices [..., d - count], ascending, of the channels that stay when `count` go.

    queries: [..., n, d] observed; keys: [..., L, d] of the whole prompt, whose last `recent` will not be pruned.
    """
    weights, late = (interactions(queries, part) for part in keys.tensor_split((keys.shape[-2] - recent,), -2))
    removed = SELECTORS[select](weights, weights + late, count)
    return (~removed).nonzero()[:, -1].view(*removed.shape[:-1], removed.shape[-1] - count)
