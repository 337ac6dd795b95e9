"""Grouping against full rescoring, brute force and planted answers."""

import collections
import itertools

import numpy as np
import pytest

from common.method.grouping import anneal, combine, default_groups, propose_swap, score
from paper import eq_24
from reference import all_groupings


def random_similarity(layers: int, heads: int, seed: int = 0) -> np.ndarray:
    matrix = np.random.default_rng(seed).normal(size=(layers, heads, heads))
    return matrix + matrix.transpose(0, 2, 1)


def test_score_equals_eq_23():
    similarity = random_similarity(3, 8)
    groups = np.random.default_rng(1).permuted(np.tile(np.arange(8), (3, 5, 1)), axis=-1).reshape(3, 5, 2, 4)
    ours = score(similarity, groups)
    for layer, run in np.ndindex(3, 5):
        expected = eq_24(groups[layer, run], similarity[layer])
        assert ours[layer, run] == pytest.approx(expected, abs=1e-12)


def test_a_swap_is_kept_exactly_when_the_full_score_rises():
    """On whole numbers, whose sums are exact: many swaps leave the score as it is, and are not kept."""
    similarity = np.rint(random_similarity(2, 8))
    random = np.random.default_rng(3)
    slots = random.permuted(np.tile(np.arange(8), (2, 50, 1)), axis=-1)
    kept = 0
    for _ in range(30):
        before, old = score(similarity, slots.reshape(2, 50, 4, 2)), slots.copy()
        propose_swap(similarity, slots, 4, random)
        after = score(similarity, slots.reshape(2, 50, 4, 2))
        changed = (slots != old).any(-1)
        assert (after[changed] > before[changed]).all() and ((slots != old).sum(-1)[changed] == 2).all()
        kept += changed.sum()
    assert kept > 50


def test_every_swap_of_heads_of_different_groups_is_equally_likely():
    """In each of many restarts, where each swap raises the score: heads of a group have nothing in common."""
    heads, proposals = np.arange(12), 20_000
    apart = (1 - np.kron(np.eye(4), np.ones((3, 3)))) / 1024
    slots = np.tile(heads, (2, proposals, 1))
    propose_swap(np.stack((apart, apart)), slots, 4, np.random.default_rng(0))
    pairs = {pair for pair in itertools.combinations(range(12), 2) if apart[pair]}
    for layer in slots:
        swaps = collections.Counter(tuple(np.flatnonzero(each != heads).tolist()) for each in layer)
        assert swaps.keys() == pairs
        expected = proposals / len(pairs)
        assert all(abs(count - expected) < 5 * expected**0.5 for count in swaps.values())


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 4), (9, 3), (6, 1)])
def test_annealing_finds_the_best_grouping_of_few_heads(heads, kv_heads):
    similarity = random_similarity(2, heads, seed=heads + kv_heads)
    groups = anneal(similarity, kv_heads, restarts=30, iterations=400, seed=0)
    assert (np.sort(groups.reshape(2, -1), -1) == np.arange(heads)).all()
    for layer in range(2):
        groupings = all_groupings(list(range(heads)), heads // kv_heads)
        best = max(eq_24(grouping, similarity[layer]) for grouping in groupings)
        assert score(similarity, groups)[layer] == pytest.approx(best, abs=1e-12)


def test_groups_are_of_adjacent_heads_by_default():
    assert default_groups(2, 6, 3).tolist() == 2 * [[[0, 1], [2, 3], [4, 5]]]


def test_groups_come_in_canonical_order_and_by_the_seed():
    """Ascending within each group, groups by their first head."""
    similarity = random_similarity(6, 16)
    first, second = (anneal(similarity, 4, restarts=1, iterations=5, seed=1) for _ in range(2))
    assert (first == second).all()
    assert (anneal(similarity, 4, restarts=1, iterations=0, seed=1) != default_groups(6, 16, 4)).any()
    assert (np.diff(first, axis=-1) > 0).all() and (np.diff(first[..., 0], axis=-1) > 0).all()


def test_combine_adds_similarities_divided_by_their_spread():
    """The standard deviation over a layer's pairs of different heads, layer by layer."""
    key, value = random_similarity(2, 8, 1) / 8, 50 + 1000 * random_similarity(2, 8, 2)
    pairs = list(itertools.combinations(range(8), 2))
    for layer, matrix in enumerate(combine(key, value)):
        spread = [np.std([similarity[layer][pair] for pair in pairs]) for similarity in (key, value)]
        np.testing.assert_allclose(matrix, key[layer] / spread[0] + value[layer] / spread[1])
    flat = np.ones((2, 8, 8))  # without spread: as it is
    np.testing.assert_allclose(combine(key, flat), combine(key, 0 * flat) + 1)
