"""related/dha: groups of heads, budgets of layers and similarities against their definitions."""

import itertools
import math
import random

import pytest
import torch

from common.run.errors import UserError
from dha_models import EIGHT, WHOLE
from reference import all_groupings
from related.dha import fusion, grouping, search

pytestmark = pytest.mark.slow


def test_budgets_of_algorithm_5():
    draw = random.Random(0)
    losses = [1 + draw.random() / 2 for _ in range(32)]
    # as published: 32 layers of 32 heads, a quarter of them
    given = grouping.allocate(losses, [32] * 32, [4, 8, 16], 256)
    assert sum(given) == 256 and set(given) <= {4, 8, 16}
    assert given[losses.index(max(losses))] == 16 and given.count(16) == 1
    rest = sorted((loss, count) for loss, count in zip(losses, given, strict=True) if count < 16)
    assert [count for _, count in rest] == [4, 4] + [8] * 29  # the remaining heads go to the largest losses
    # 1 / 2 exceeds 0.1 / 1
    assert grouping.allocate([1.0, 0.1, 0.1, 9.0, 0.1], [8] * 5, [1, 2, 4], 11) == [4, 1, 1, 4, 1]
    # the neediest layer gets its own highest rung, and none gets more heads than it has
    assert grouping.allocate([9.0, 3.0, 0.9, 1.0], [2, 8, 1, 4], [1, 2, 4], 9) == [2, 4, 1, 2]


def test_every_budget_that_can_be_met_is_met_exactly_and_no_other():
    draw, ladder = random.Random(1), [1, 2, 4]
    for heads in ([24, 24, 24], [2, 3, 4], [12]):
        rungs = [[rung for rung in ladder if count % rung == 0] for count in heads]
        sums = {sum(numbers) for numbers in itertools.product(*rungs)}
        for total in range(4 * len(heads) + 2):
            losses = [draw.random() for _ in heads]
            if total in sums:
                given = grouping.allocate(losses, heads, ladder, total)
                assert sum(given) == total
                assert all(count in layer for count, layer in zip(given, rungs, strict=True))
            else:
                with pytest.raises(UserError):
                    grouping.allocate(losses, heads, ladder, total)


def random_losses(heads: int, seed: int) -> torch.Tensor:
    losses = torch.rand(heads, heads, generator=torch.Generator().manual_seed(seed))
    return ((losses + losses.T) / 2).fill_diagonal_(0)


@pytest.mark.parametrize("count", [2, 4])
def test_annealing_finds_the_best_of_all_groupings_and_keeps_its_books(count):
    for seed in range(4):
        losses = random_losses(8, seed)
        totals = [grouping.within(losses.tolist(), groups) for groups in all_groupings(EIGHT, 8 // count)]
        groups = grouping.anneal(losses, count, seed)
        assert grouping.within(losses.tolist(), groups) == pytest.approx(min(totals))
        assert grouping.within_random(losses, count) == pytest.approx(sum(totals) / len(totals))
        total, groups = grouping.walk(losses.tolist(), count, random.Random(seed))  # summed up swap by swap
        assert total == pytest.approx(grouping.within(losses.tolist(), groups))
    losses = random_losses(16, 0)
    assert grouping.anneal(losses, count, seed=0) == grouping.anneal(1024 * losses, count, seed=0)


def test_worse_swaps_are_accepted_with_the_probability_of_algorithm_4_from_100_to_a_thousandth(monkeypatch):
    for gain, temperature in ((-1.0, 100.0), (-1.0, 2.0), (-0.3, 0.1)):
        probability, draw = math.exp(gain / temperature), random.Random(0)
        accepted = sum(grouping.accepts(gain, temperature, draw) for _ in range(10_000))
        assert accepted / 10_000 == pytest.approx(probability, abs=0.015)
    assert grouping.accepts(0.1, 0.001, random.Random(0))  # a better grouping, always
    temperatures = set()
    # None: no proposal is accepted
    monkeypatch.setattr(grouping, "accepts", lambda gain, temperature, draw: temperatures.add(temperature))
    for seed in range(20):  # a proposal within a group is none
        grouping.walk(random_losses(8, 0).tolist(), 2, random.Random(seed))
    assert sorted(temperatures, reverse=True) == pytest.approx([100 * 0.9**step for step in range(110)])


def test_search_groups_heads_by_their_own_kind_and_budgets_layers_by_their_loss():
    operators = fusion.averaged(fusion.starting_operators(WHOLE, 2))
    pairs = {"key": (0, [[0, 1], [2, 3], [4, 5], [6, 7]]), "value": (2, [[0, 7], [1, 6], [2, 5], [3, 4]])}
    for kind, (layer, groups) in pairs.items():  # in this layer pairs read alike, in the others all heads do
        operators[f"{layer}_{kind}"] = operators[f"{layer}_{kind}"].clone()
        for group in groups:
            operators[f"{layer}_{kind}"][0, group] = fusion.kronecker([EIGHT], 2)[0, group].mean(0)
    groups, metrics = search.choose_groups(operators, 2, [1, 2, 4], seed=0)
    for kind, (layer, expected) in pairs.items():
        assert metrics[kind]["heads"] == [4 if index == layer else 1 for index in range(3)]
        assert groups[kind] == [expected if index == layer else [EIGHT] for index in range(3)]
        loss = 24 / 28 / 8  # of 28 pairs of heads all but 4 have a loss of 4 / 4 / 8
        assert metrics[kind]["layer_loss"][layer] == pytest.approx(loss)


def test_cka_is_as_printed_and_finds_a_rotated_head():
    heads = torch.randn(3, 4, 20)
    heads[1] = 3 * torch.linalg.qr(torch.randn(4, 4))[0] @ heads[0]
    matrix = grouping.cka(heads)
    for a, b in itertools.product(range(3), repeat=2):
        x, y = heads[a].T.double(), heads[b].T.double()  # the paper's weights have a column per channel
        norms = (x.T @ x).norm() ** 2 * (y.T @ y).norm() ** 2
        expected = float((x.T @ y).norm() ** 2 / norms.sqrt())
        assert float(matrix[a, b]) == pytest.approx(expected, rel=1e-12)
    assert float(matrix[0, 1]) == pytest.approx(1, abs=1e-5) and float(matrix[0, 2]) < 0.9
    mean = float(matrix[0, 1] + matrix[0, 2] + matrix[1, 2]) / 3
    assert grouping.redundancy(matrix) == pytest.approx(mean)
