"""Head groups by simulated annealing (Algorithm 4) and head budgets of the layers (Algorithm 5)."""

import itertools
import math
import random

import torch

from common.cli import UserError

HOT, COLD, COOLING = 100.0, 0.001, 0.9  # Algorithm 4: first and last temperature, factor per proposal


def within(losses: list[list[float]], groups: list[list[int]]) -> float:
    """Sum of losses[h][h'] over the pairs h < h' within groups."""
    pairs = itertools.chain.from_iterable(itertools.permutations(group, 2) for group in groups)
    return sum(losses[a][b] for a, b in pairs if a < b)


def within_random(losses: torch.Tensor, count: int) -> float:
    """Mean of `within` over all partitions of the heads into `count` groups of equal size. losses: [H, H]."""
    heads = len(losses)
    return float(losses.sum()) / 2 * (heads // count - 1) / max(heads - 1, 1)


def swap_gain(losses: list[list[float]], first: list[int], second: list[int], a: int, b: int) -> float:
    """By how much `within` falls when heads first[a] and second[b] trade places."""
    leaving, entering = first[a], second[b]
    before = sum(losses[leaving][h] for h in first) + sum(losses[entering][h] for h in second)
    after = sum(losses[entering][h] for h in first if h != leaving)
    after += sum(losses[leaving][h] for h in second if h != entering)
    return before - after


def accepts(gain: float, temperature: float, draw: random.Random) -> bool:
    """Always accept a swap that lowers the loss, any other with probability exp(gain / temperature)."""
    return gain > 0 or math.exp(gain / temperature) > draw.random()


def walk(losses: list[list[float]], count: int, draw: random.Random) -> tuple[float, list[list[int]]]:
    """Algorithm 4 once, from a random start: the loss of the best grouping visited, and that grouping.

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
            gain = swap_gain(losses, first, second, a, b)
            if accepts(gain, temperature, draw):
                first[a], second[b] = second[b], first[a]
                loss -= gain
            if loss < best_loss:
                best_loss, best_groups = loss, [list(group) for group in groups]
        temperature *= COOLING
    return best_loss, best_groups


def anneal(losses: torch.Tensor, count: int, walks: int, seed: int) -> list[list[int]]:
    """Partition heads into `count` groups of equal size with little loss inside: the best of `walks` walks.

    losses: [H, H], symmetric, zero diagonal. They are divided by their mean, since the published temperatures
    suit losses near 1. A published walk proposes 110 swaps, most of them at temperatures that accept
    anything, and returns its last grouping; several walks that remember their best grouping cost next to
    nothing. Groups and the heads in them are in ascending order.
    """
    pairs = len(losses) * (len(losses) - 1)
    mean = float(losses.sum()) / max(pairs, 1) or 1.0
    scaled, draw = (losses.double() / mean).tolist(), random.Random(seed)
    _, groups = min(walk(scaled, count, draw) for _ in range(walks))
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
    with the most loss per head. As printed, a layer may end at 12 of 32 heads, or above the highest rung. Two
    rules prevent that: only rungs are assigned, so that groups have equal size, and a raise is skipped if the
    total could then not be met. Raises UserError if no counts on the ladder sum to the total.
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
