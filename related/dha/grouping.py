"""Who shares a head with whom, and how many heads a layer may keep (Algorithms 4 and 5); how alike heads are (Appendix B.1)."""

import math
import random

import torch

from common.cli import UserError

HOT, COLD, COOLING = 100.0, 0.001, 0.9  # temperatures of Algorithm 4


def within(losses, groups: list[list[int]]) -> float:
    """Sum of losses[h][h'] over the pairs within groups."""
    return sum(losses[a][b] for group in groups for a in group for b in group if a < b)


def walk(losses: list[list[float]], count: int, draw: random.Random) -> tuple[float, list[list[int]]]:
    """Algorithm 4 once, from a random start: the best grouping passed on the way, and its loss.

    At each temperature two heads of different groups are proposed to swap; a worse grouping is taken with probability
    exp(-(what it loses) / temperature).
    """
    heads = list(range(len(losses)))
    draw.shuffle(heads)
    size = len(heads) // count
    groups = [heads[start : start + size] for start in range(0, len(heads), size)]
    loss = within(losses, groups)
    best, temperature = (loss, [list(group) for group in groups]), HOT
    while temperature > COLD:
        i, j = draw.randrange(count), draw.randrange(count)
        if i != j:
            first, second = groups[i], groups[j]
            a, b = draw.randrange(size), draw.randrange(size)
            gain = sum(losses[first[a]][h] for h in first) + sum(losses[second[b]][h] for h in second)
            gain -= sum(losses[second[b]][h] for h in first if h != first[a]) + sum(losses[first[a]][h] for h in second if h != second[b])
            if gain > 0 or math.exp(gain / temperature) > draw.random():
                first[a], second[b] = second[b], first[a]
                loss -= gain
                if loss < best[0]:
                    best = loss, [list(group) for group in groups]
        temperature *= COOLING
    return best


def anneal(losses: torch.Tensor, count: int, walks: int, seed: int) -> list[list[int]]:
    """Heads in `count` groups of one size with little loss inside: the best of `walks` walks. losses: [H, H], symmetric, zero diagonal.

    The published temperatures suit scores of order one, so losses are divided by their mean. One walk proposes 110 swaps, most of
    them while it is too hot to care, and returns where it stopped; several walks that remember the best they saw cost
    nothing. Groups and the heads in them come in ascending order.
    """
    scale = float(losses.sum()) / (len(losses) * (len(losses) - 1)) or 1.0
    scaled, draw = (losses.double() / scale).tolist(), random.Random(seed)
    groups = min(walk(scaled, count, draw) for _ in range(walks))[1]
    return sorted(sorted(group) for group in groups)


def spendable(given: list[int], ladder: list[int], rest: int) -> bool:
    """Whether raising layers along the ladder can use up `rest` heads exactly."""
    reachable = {0}
    for now in given:
        reachable |= {spent + rung - now for spent in reachable for rung in ladder if rung > now and spent + rung - now <= rest}
    return rest in reachable


def allocate(losses: list[float], ladder: list[int], total: int) -> list[int]:
    """Algorithm 5: `total` heads over layers, each layer's number one of `ladder` (ascending).

    All start at the smallest; the layer of largest loss gets the largest; the rest goes, a rung at a time, to the
    largest loss per head held. Two things are added to what is printed, where a layer might end at 12 of 32 heads, or above the
    largest: only rungs are given, so that groups are of one size, and only such as leave a rest that can be spent.
    Raises UserError where no numbers on the ladder add up to the total.
    """
    given = [ladder[0]] * len(losses)
    rest = total - sum(given)
    if rest < 0 or not spendable(given, ladder, rest):
        raise UserError(f"--ladder: expected numbers of which {len(losses)} add up to {total} heads, found {ladder}")

    def raised(layer: int, rung: int) -> bool:
        """Give a layer that rung if the budget allows it."""
        nonlocal rest
        after = [*given[:layer], rung, *given[layer + 1 :]]
        left = rest - (rung - given[layer])
        if left < 0 or not spendable(after, ladder, left):
            return False
        given[:], rest = after, left
        return True

    raised(max(range(len(losses)), key=losses.__getitem__), ladder[-1])
    while rest:
        order = sorted((layer for layer in range(len(losses)) if given[layer] < ladder[-1]), key=lambda layer: -losses[layer] / given[layer])
        next(layer for layer in order if raised(layer, ladder[ladder.index(given[layer]) + 1]))
    return given


def cka(heads: torch.Tensor) -> torch.Tensor:
    """Linear CKA of every two heads as Appendix B.1 prints it (without centring): [H, d, n] -> [H, H] in 0 .. 1."""
    heads = heads.double()
    overlap = torch.einsum("adn,ben->abde", heads, heads).square().sum((2, 3))  # |W_a W_b^T|_F^2
    own = overlap.diagonal()
    return overlap / (own[:, None] * own).sqrt()


def redundancy(similarity: torch.Tensor) -> float:
    """Mean of [H, H] over the pairs of heads."""
    first, second = torch.triu_indices(*similarity.shape, 1)
    return float(similarity[first, second].mean())
