"""Grouping heads (Algorithm 2): which D heads of a layer share a key/value head, by the sum of pair similarities."""

import networkx
import numpy as np
from tqdm import tqdm


def score(similarity: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Eq. 23, 24: the sum of similarities of all pairs within groups.

    similarity: [L, H, H] symmetric; groups: [L, ..., G, D] head numbers. Returns [L, ...] float64.
    """
    layers = np.arange(len(similarity)).reshape(-1, *[1] * (groups.ndim - 1), 1)
    within = similarity[layers, groups[..., :, None], groups[..., None, :]]  # [L, ..., G, D, D]
    diagonal = np.einsum("...dd->...", within)
    return (within.sum((-2, -1)) - diagonal).sum(-1) / 2


def canonical(groups: np.ndarray) -> np.ndarray:
    """Heads ascending within each group, groups ascending by their first head. groups: [..., G, D]."""
    groups = np.sort(groups, axis=-1)
    order = np.argsort(groups[..., 0], axis=-1)
    return np.take_along_axis(groups, order[..., None], axis=-2)


def default_groups(layers: int, heads: int, kv_heads: int) -> np.ndarray:
    """Adjacent heads, as a GQA checkpoint lays them out. [L, G, D]."""
    return np.tile(np.arange(heads).reshape(kv_heads, -1), (layers, 1, 1))


def anneal(similarity: np.ndarray, kv_heads: int, restarts: int, iterations: int, seed: int) -> np.ndarray:
    """Algorithm 2 for all layers and restarts at once: [L, G, D] groups of the highest score found.

    Swap two random heads of different groups and keep the swap when the score rises; the printed algorithm never
    accepts a worse grouping, so this does not either. The change of score is a few gathers:
    sum_{x in h\\b} (S[a,x] - S[b,x]) - sum_{x in g\\a} (S[a,x] - S[b,x]) for a in group g, b in group h.
    """
    layers, heads, _ = similarity.shape
    size = heads // kv_heads
    random = np.random.default_rng(seed)
    layer, run = np.ogrid[:layers, :restarts]
    slots = random.permuted(np.broadcast_to(np.arange(heads), (layers, restarts, heads)), axis=-1)
    if kv_heads > 1:  # with one group there is nothing to swap
        for _ in tqdm(range(iterations), desc="annealing", unit="swap", leave=False):
            _swap(similarity, slots, layer, run, kv_heads, size, random)
    groups = slots.reshape(layers, restarts, kv_heads, size)
    best = score(similarity, groups).argmax(-1)
    return canonical(groups[np.arange(layers), best])


def _swap(similarity, slots, layer, run, kv_heads, size, random) -> None:
    """One proposed swap in every layer and restart; slots [L, R, H] are changed in place."""
    shape = slots.shape[:2]
    first = random.integers(kv_heads, size=shape)
    second = (first + random.integers(1, kv_heads, size=shape)) % kv_heads
    place_a, place_b = (group * size + random.integers(size, size=shape) for group in (first, second))
    a, b = slots[layer, run, place_a], slots[layer, run, place_b]
    difference = similarity[layer, a] - similarity[layer, b]  # [L, R, H]: S[a, x] - S[b, x]
    offsets = np.arange(size)
    sums = []
    for group, own in ((first, a), (second, b)):
        members = slots[layer[..., None], run[..., None], group[..., None] * size + offsets]  # [L, R, D]
        total = np.take_along_axis(difference, members, -1).sum(-1)
        sums.append(total - np.take_along_axis(difference, own[..., None], -1)[..., 0])
    accept = sums[1] - sums[0] > 0
    slots[layer, run, place_a] = np.where(accept, b, a)
    slots[layer, run, place_b] = np.where(accept, a, b)


def best_pairs(similarity: np.ndarray) -> np.ndarray:
    """[L, H/2, 2] groups of two of the highest possible score: a maximum-weight perfect matching of each layer."""
    groups = []
    for matrix in similarity:
        graph = networkx.Graph()
        rows, columns = np.triu_indices(len(matrix), 1)
        graph.add_weighted_edges_from(zip(rows.tolist(), columns.tolist(), matrix[rows, columns].tolist(), strict=True))
        groups.append([sorted(pair) for pair in networkx.max_weight_matching(graph, maxcardinality=True)])
    return canonical(np.array(groups))


def combine(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Similarity for grouping by both: keys and values each scaled by its spread over a layer's pairs, then added."""
    rows, columns = np.triu_indices(key.shape[-1], 1)
    spread = [matrix[:, rows, columns].std(-1)[:, None, None] for matrix in (key, value)]
    return sum(matrix / np.where(scale > 0, scale, 1) for matrix, scale in zip((key, value), spread, strict=True))
