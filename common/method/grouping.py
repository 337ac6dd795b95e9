"""Grouping heads (Algorithm 2): partition each layer's heads to maximize the similarity within groups.

Notation: L layers, H key/value heads of the source, G groups of D = H / G heads. Arrays are NumPy arrays.
"""

import numpy as np

from common.run.progress import Progress

RESTARTS, ITERATIONS = 200, 3000  # the paper's epoch and maxIter


def score(similarity: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Eq. 23, 24: the sum of similarities over all pairs within groups.

    similarity: [L, H, H] symmetric; groups: [L, ..., G, D] head indices. Returns [L, ...] float64.
    """
    layers = np.arange(len(similarity)).reshape(-1, *[1] * (groups.ndim - 1), 1)
    within = similarity[layers, groups[..., :, None], groups[..., None, :]]  # [L, ..., G, D, D]
    diagonal = np.einsum("...dd->...", within)
    return (within.sum((-2, -1)) - diagonal).sum(-1) / 2


def canonical(groups: np.ndarray) -> np.ndarray:
    """Sort heads within each group, and groups by their first head. groups: [..., G, D]."""
    groups = np.sort(groups)
    order = np.argsort(groups[..., 0])
    return np.take_along_axis(groups, order[..., None], axis=-2)


def default_groups(layers: int, source_kv_heads: int, kv_heads: int) -> np.ndarray:
    """Groups of adjacent heads, the layout of a GQA checkpoint: [L, G, D]."""
    return np.tile(np.arange(source_kv_heads).reshape(kv_heads, -1), (layers, 1, 1))


def anneal(similarity: np.ndarray, kv_heads: int, restarts: int, iterations: int, seed: int) -> np.ndarray:
    """Algorithm 2 for all layers and restarts at once: the groups with the highest score, [L, G, D].

    Swap two random heads of different groups and keep the swap if the score rises. Like the algorithm as
    printed, it never accepts a worse grouping. similarity: [L, H, H] symmetric.
    """
    layers, heads, _ = similarity.shape
    random = np.random.default_rng(seed)
    slots = random.permuted(np.broadcast_to(np.arange(heads), (layers, restarts, heads)), axis=-1)
    if kv_heads > 1:  # with one group there is nothing to swap
        for _ in Progress(range(iterations), desc="annealing", unit="swap", leave=False):
            propose_swap(similarity, slots, kv_heads, random)
    groups = slots.reshape(layers, restarts, kv_heads, -1)
    best = score(similarity, groups).argmax(-1)
    return canonical(groups[np.arange(layers), best])


def propose_swap(similarity: np.ndarray, slots: np.ndarray, kv_heads: int, random) -> None:
    """Propose one swap in every layer and restart, in place.

    slots: [L, restarts, H] head indices, group after group; random: a NumPy Generator. Swapping head a of
    group g with head b of group h changes the score by sum_{x in h\\b} (S[a, x] - S[b, x]) - sum_{x in g\\a}
    (S[a, x] - S[b, x]): a few gathers, no rescoring.
    """
    shape, size = slots.shape[:2], slots.shape[2] // kv_heads
    layer, restart = np.ogrid[: shape[0], : shape[1]]
    first = random.integers(kv_heads, size=shape)
    shift = random.integers(1, kv_heads, size=shape)
    second = (first + shift) % kv_heads  # pragma: no mutate: first - shift is any other group, too
    place_a, place_b = (group * size + random.integers(size, size=shape) for group in (first, second))
    a, b = slots[layer, restart, place_a], slots[layer, restart, place_b]
    difference = similarity[layer, a] - similarity[layer, b]  # [L, restarts, H]: S[a, x] - S[b, x]
    without = []  # its sum over group g without a, then over group h without b
    for group, head in ((first, a), (second, b)):
        places = group[..., None] * size + np.arange(size)
        members = slots[layer[..., None], restart[..., None], places]  # [L, restarts, D]
        total = np.take_along_axis(difference, members, -1).sum(-1)
        without.append(total - np.take_along_axis(difference, head[..., None], -1)[..., 0])
    accept = without[1] - without[0] > 0
    slots[layer, restart, place_a] = np.where(accept, b, a)
    slots[layer, restart, place_b] = np.where(accept, a, b)


def combine(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Key plus value similarity [L, H, H], each divided by its standard deviation over a layer's pairs."""
    rows, columns = np.triu_indices(key.shape[-1], 1)
    scaled = []
    for matrix in (key, value):
        spread = matrix[:, rows, columns].std(-1)[:, None, None]
        scaled.append(matrix / np.where(spread > 0, spread, 1))
    return scaled[0] + scaled[1]
