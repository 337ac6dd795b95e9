"""Head groups by annealing (Algorithm 4), head budgets (Algorithm 5), how alike heads are (Appendix B.1)."""

import itertools
import math
import random

import torch

from common.reporting import plots
from common.run.errors import UserError

HOT, COLD, COOLING = 100.0, 0.001, 0.9  # Algorithm 4: first and last temperature, factor per proposal
WALKS = 50  # of which the best counts; published: 1


def within(losses: list[list[float]], groups: list[list[int]]) -> float:
    """Sum of losses[h][h'] over the pairs of heads within groups. losses: symmetric."""
    return sum(losses[a][b] for group in groups for a, b in itertools.combinations(group, 2))


def within_random(losses: torch.Tensor, count: int) -> float:
    """Mean of `within` over all partitions of the heads into `count` groups of equal size. losses: [H, H]."""
    heads = len(losses)
    return float(losses.sum()) / 2 * (heads // count - 1) / max(heads - 1, 1)


def accepts(gain: float, temperature: float, draw: random.Random) -> bool:
    """Always accept a swap that lowers the loss, any other with probability exp(gain / temperature)."""
    return gain > 0 or math.exp(gain / temperature) > draw.random()


def walk(losses: list[list[float]], count: int, draw: random.Random) -> tuple[float, list[list[int]]]:
    """Algorithm 4 once, from a random grouping: the loss of the best grouping visited, and that grouping.

    Each step proposes to swap two heads of different groups.
    """
    heads = list(range(len(losses)))
    draw.shuffle(heads)
    size = len(heads) // count
    groups = [heads[start : start + size] for start in range(0, len(heads), size)]
    loss, temperature = within(losses, groups), HOT
    best_loss, best_groups = loss, [list(group) for group in groups]
    while temperature > COLD:
        i, j = draw.randrange(count), draw.randrange(count)
        if i != j:
            first, second = groups[i], groups[j]
            a, b = draw.randrange(size), draw.randrange(size)
            gain = within(losses, [first, second])
            first[a], second[b] = second[b], first[a]
            gain -= within(losses, [first, second])
            if accepts(gain, temperature, draw):
                loss -= gain
            else:
                first[a], second[b] = second[b], first[a]
            if loss < best_loss:
                best_loss, best_groups = loss, [list(group) for group in groups]
        temperature *= COOLING
    return best_loss, best_groups


def anneal(losses: torch.Tensor, count: int, seed: int) -> list[list[int]]:
    """Partition heads into `count` groups of equal size with little loss inside: the best of WALKS walks.

    losses: [H, H], symmetric, zero diagonal; divided by their mean, as the published temperatures suit losses
    near 1. The published single walk ends at its last grouping, after 110 swaps that are mostly accepted
    whatever they cost. Groups and the heads in them are in ascending order.
    """
    mean = losses.sum() / (len(losses) * (len(losses) - 1))
    scaled = (losses / mean).tolist()
    draw = random.Random(seed)
    _, groups = min(walk(scaled, count, draw) for _ in range(WALKS))
    return sorted(sorted(group) for group in groups)


def can_reach(given: list[int], ladders: list[list[int]], total: int) -> bool:
    """Whether raising some layers along their ladders turns `given` into head counts that sum to `total`."""
    sums = {sum(given)}
    for count, ladder in zip(given, ladders, strict=True):
        raises = [rung - count for rung in ladder if rung > count]
        sums |= {before + heads for before in sums for heads in raises if before + heads <= total}
    return total in sums


def allocate(losses: list[float], heads: list[int], ladder: list[int], total: int) -> list[int]:
    """Algorithm 5: distribute `total` heads over layers, each layer's count a rung of the ascending `ladder`.

    heads: those that each layer has; its rungs are their divisors. Every layer starts at its lowest rung, the
    layer with the largest loss gets its highest, and the remaining heads go one rung at a time to the layer
    with the most loss per head. Unlike as printed, only rungs are assigned, so that groups have equal size,
    and a raise is skipped if the total could then not be met. Raises UserError if no counts sum to it.
    """
    ladders = [[rung for rung in ladder if count % rung == 0] for count in heads]
    given = [min(rungs, default=0) for rungs in ladders]
    if 0 in given or not can_reach(given, ladders, total):
        raise UserError(
            f"--ladder: expected divisors of {heads}, the heads of every layer, that sum to {total}, "
            f"found {ladder}"
        )

    def raised(layer: int, rung: int) -> list[int]:
        return [*given[:layer], rung, *given[layer + 1 :]]

    neediest = max(range(len(losses)), key=losses.__getitem__)
    if can_reach(raised(neediest, ladders[neediest][-1]), ladders, total):
        given = raised(neediest, ladders[neediest][-1])
    while sum(given) < total:
        open_layers = [layer for layer in range(len(losses)) if given[layer] < ladders[layer][-1]]
        for layer in sorted(open_layers, key=lambda layer: -losses[layer] / given[layer]):
            rungs = ladders[layer]
            candidate = raised(layer, rungs[rungs.index(given[layer]) + 1])
            if can_reach(candidate, ladders, total):
                given = candidate
                break
    return given


def cka(heads: torch.Tensor) -> torch.Tensor:
    """Linear CKA of every pair of heads, uncentred as Appendix B.1 prints it: [H, d, n] -> [H, H] float64."""
    heads = heads.double()
    overlap = torch.einsum("adn,ben->abde", heads, heads).square().sum((2, 3))  # |W_a W_b^T|_F^2
    self_overlap = overlap.diagonal()
    return overlap / (self_overlap[:, None] * self_overlap).sqrt()


def redundancy(similarity: torch.Tensor) -> float:
    """Mean of [H, H] similarities over the pairs of different heads, 0 for a single head."""
    if len(similarity) == 1:
        return 0.0
    first, second = torch.triu_indices(*similarity.shape, 1)
    return float(similarity[first, second].mean())


@torch.no_grad()
def draw_similarity(model, path: str, title: str) -> dict[str, list[float]]:
    """Draw the CKA of the heads of each layer; returns their redundancies, by "query", "key" and "value"."""
    similarity = {}
    for kind in ("query", "key", "value"):
        weights = [getattr(layer.self_attn, f"{kind[0]}_proj").weight for layer in model.model.layers]
        similarity[kind] = [cka(weight.unflatten(0, (-1, model.config.head_dim))) for weight in weights]
    cka_heatmaps(path, similarity, title)
    return {kind: [round(redundancy(matrix), 5) for matrix in layers] for kind, layers in similarity.items()}


@plots.drawing
def cka_heatmaps(plt, similarity: dict[str, list], title: str):
    """A row of [H, H] heatmaps per kind of head, a column per layer, with the redundancy as title."""
    kinds, layers = len(similarity), len(similarity["key"])
    size = 1.7 * layers + 1.4, 1.9 * kinds + 0.5
    figure, axes = plt.subplots(kinds, layers, squeeze=False, layout="constrained", figsize=size)
    for row, (kind, matrices) in zip(axes, similarity.items(), strict=True):
        for layer, (axis, matrix) in enumerate(zip(row, matrices, strict=True)):
            image = axis.imshow(matrix.numpy(), vmin=0, vmax=1, cmap="viridis")
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"layer {layer}: {redundancy(matrix):.3f}", fontsize=8)
        row[0].set_ylabel(kind)
    figure.colorbar(image, ax=axes, shrink=0.6, label="linear CKA of two heads' weights")
    figure.suptitle(title)
    return figure
