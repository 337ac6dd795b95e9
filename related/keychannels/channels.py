"""Choosing which channels of the cached keys to remove: the objective, five selectors, and two premises.

For one key head, K [L, d] are the keys that lose channels and Q [n, d] the last queries of the prompt, with
all query heads that read this key head stacked; both after RoPE. Removing the channels in B changes the
scores by

    || Q K^T - Q S K^T ||_F^2 = sum_{i, j in B} W[i, j],    W = (K^T K) o (Q^T Q)

where S is the identity with zeros at B and o is the elementwise product. The selectors, of which think is
published, align is its successor GCJCP's, a draft that ends before its algorithm, and the next two are ours:

  think        smallest W[i, i], with K the entire prompt
  align        the same, with K only what will really be pruned: the prompt without its last `recent` keys
  greedy       grow B by the channel with the smallest W[i, i] + 2 sum_{j in B} W[i, j]; K as for align
  greedy+swap  from the best of those three, swap a removed and a kept channel while that lowers the cost
  delta        like greedy, with W[i, i] + sum_{j in B} W[i, j], the draft's Delta_i: each pair counts once

All heads are handled at once, in float64. W is [..., d, d]; a set of channels is bool [..., d], True where
removed.
"""

import itertools
import math

import torch

SHARES = (0.1, 0.25, 0.5)  # premises: of the channels
POSITIONS, REMOVED = 0.1, 0.5  # premises: share of the prompt that is chosen, of channels that are removed
ROUNDING = 1e-12  # of the trace of W: a swap that gains less could be undone by rounding, and loop for ever


def by_key_head(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[B, H, T, d] -> [B, G, H / G * T, d]: stack the queries of all heads that read the same key head."""
    return queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)


def interactions(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """W [..., d, d] float64 from queries [..., n, d] and keys [..., L, d]."""
    queries, keys = queries.double(), keys.double()
    return (queries.mT @ queries) * (keys.mT @ keys)


def objective(weights: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """sum_{i, j in B} W[i, j], shape [...]: the squared error of the scores."""
    removed = removed.to(weights.dtype)
    return (removed[..., None, :] @ weights @ removed[..., None])[..., 0, 0]


def cheapest_alone(weights: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` channels with the smallest W[i, i], ignoring interactions."""
    order = weights.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def greedy(weights: torch.Tensor, count: int, times: int = 2) -> torch.Tensor:
    """`count` channels, each the one with the smallest W[i, i] + `times` sum_{j in B} W[i, j].

    2 is what the channel adds to the cost of those before it, 1 the Delta_i of the GCJCP draft.
    """
    cost = weights.diagonal(dim1=-2, dim2=-1).clone()
    removed = torch.zeros_like(cost, dtype=torch.bool)
    for _ in range(count):
        channel = cost.masked_fill(removed, math.inf).argmin(-1, keepdim=True)
        removed.scatter_(-1, channel, True)
        cost += times * weights.take_along_dim(channel[..., None], -2)[..., 0, :]
    return removed


def swap(weights: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """Swap a removed and a kept channel, the best pair each time, until no swap lowers the cost."""
    alone, size = weights.diagonal(dim1=-2, dim2=-1), weights.shape[-1]
    while True:
        shared = 2 * (weights @ removed.to(weights.dtype)[..., None])[..., 0]
        restore = (alone - shared).masked_fill(~removed, math.inf)  # change of cost when channel i returns
        remove = (alone + shared).masked_fill(removed, math.inf)  # change of cost when channel j goes
        change, pair = (restore[..., :, None] + remove[..., None, :] - 2 * weights).flatten(-2).min(-1)
        improves = change < -ROUNDING * alone.sum(-1)
        if not improves.any():
            return removed
        pair = torch.stack((pair // size, pair % size), -1)
        removed = removed ^ (torch.zeros_like(removed).scatter_(-1, pair, True) & improves[..., None])


def exact(weights: torch.Tensor, count: int) -> torch.Tensor:
    """The cheapest set of all, by enumeration: the reference for the selectors, for d <= 16."""
    size = weights.shape[-1]
    members = torch.tensor(list(itertools.combinations(range(size), count)))
    sets = torch.zeros(len(members), size, dtype=weights.dtype).scatter_(1, members, 1.0).to(weights.device)
    costs = weights.flatten(-2) @ (sets[:, :, None] * sets[:, None, :]).flatten(1).mT
    return sets.bool()[costs.argmin(-1)]


def greedy_and_swap(pruned: torch.Tensor, whole: torch.Tensor, count: int) -> torch.Tensor:
    """Swaps that begin with the cheapest of the sets of think, align and greedy, for each head."""
    sets = torch.stack([cheapest_alone(whole, count), cheapest_alone(pruned, count), greedy(pruned, count)])
    best = objective(pruned, sets).argmin(0)
    return swap(pruned, sets.take_along_dim(best[None, ..., None], 0)[0])


SELECTORS = {  # of W of the keys that will be pruned, W of the entire prompt, and how many channels to remove
    "think": lambda pruned, whole, count: cheapest_alone(whole, count),
    "align": lambda pruned, whole, count: cheapest_alone(pruned, count),
    "greedy": lambda pruned, whole, count: greedy(pruned, count),
    "greedy+swap": greedy_and_swap,
    "delta": lambda pruned, whole, count: greedy(pruned, count, times=1),
}


def removed_count(ratio: float, size: int) -> int:
    """How many of `size` channels to remove: all but floor((1 - ratio) size)."""
    return size - math.floor((1 - ratio) * size + 1e-9)  # 1 - 0.9 in floating point is a little below 0.1


def kept_channels(
    select: str,  # one of SELECTORS
    queries: torch.Tensor,  # [..., n, d]: the observed ones
    keys: torch.Tensor,  # [..., L, d]: those of the entire prompt
    recent: int,  # how many of the last keys will not be pruned
    count: int,  # channels to remove
) -> torch.Tensor:
    """Ascending indices [..., d - count] of the channels that are kept."""
    old, late = keys.tensor_split((keys.shape[-2] - recent,), -2)
    pruned = interactions(queries, old)
    removed = SELECTORS[select](pruned, pruned + interactions(queries, late), count)
    return (~removed).nonzero()[:, -1].view(*removed.shape[:-1], removed.shape[-1] - count)


def largest_shares(energy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The share of energy [..., d] in the largest SHARES of the channels, each [...]."""
    ordered = energy.sort(-1, descending=True).values
    counts = {f"{share:.0%}": max(1, round(share * energy.shape[-1])) for share in SHARES}
    return {name: ordered[..., :count].sum(-1) / energy.sum(-1) for name, count in counts.items()}


def attention_to(queries: torch.Tensor, keys: torch.Tensor, first: int, scaling: float) -> torch.Tensor:
    """Mean attention [G, T] to every key, over queries and the query heads of each key head.

    queries: [H, n, d] at positions first, first + 1, ...; keys: [G, T, d].
    """
    scores = scaling * queries.unflatten(0, (len(keys), -1)) @ keys[:, None].mT  # [G, H / G, n, T]
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=keys.device).tril(first)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).mean((1, 2))


def chosen_share(attention: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The share of attention [G, T] in the POSITIONS that `by` [G, T] is largest at: [G]."""
    count = max(1, round(POSITIONS * attention.shape[-1]))
    return attention.take_along_dim(by.topk(count).indices, -1).sum(-1) / attention.sum(-1)


def head_premises(queries: torch.Tensor, keys: torch.Tensor, prompt: int, observed: int,
                  scaling: float) -> dict[str, dict[str, torch.Tensor]]:
    """Whether channels and positions chosen by a window serve later queries, in one layer and text; each [G].

    queries: [H, T, d]; keys: [G, T, d]; after RoPE. prompt: its tokens, the last `observed` of which are the
    window.
    """
    window = prompt - observed
    before, queries, keys = keys[:, :window].double(), queries.double(), keys.double()
    early, later = queries[:, window:prompt], queries[:, prompt:]
    by_window, by_later = (interactions(by_key_head(part[None], keys[None])[0], before)
                           for part in (early, later))
    attention = {"the window": attention_to(early, keys[:, :prompt], window, scaling)[:, :window],
                 "later queries": attention_to(later, keys, prompt, scaling)[:, :window]}
    attention["recency"] = torch.arange(window, dtype=torch.float64, device=keys.device).expand(len(keys), -1)
    count, chooser = removed_count(REMOVED, keys.shape[-1]), SELECTORS["greedy+swap"]
    return {
        "keys": largest_shares(before.square().sum(1)),
        "scores": largest_shares(by_window.diagonal(dim1=-2, dim2=-1)),
        "positions": {name: chosen_share(attention["later queries"], by) for name, by in attention.items()},
        "channels": {name: objective(by_later, chooser(by, by, count)) / by_later.sum((-1, -2))
                     for name, by in (("the window", by_window), ("later queries", by_later))},
    }
