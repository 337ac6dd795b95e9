"""DHA's heads in closed form, head counts by measured loss, and heads aligned before fusion."""

import copy
import itertools
from functools import partial

import pytest
import torch

from common.method.rope import rotate_pairs
from common.models.calibration import Calibration
from common.models.equivalence import max_difference
from common.models.layers import Layers
from dha_models import GROUPS, tokens
from models import byte_tokenizer, tiny_model
from reference import normal
from related.dha import start
from related.dha.training import all_logits
from runs import run

pytestmark = pytest.mark.slow


@torch.no_grad()
def share_heads(attention, index: int) -> None:
    """Make the heads of each of a layer's groups in GROUPS one, up to rotations."""
    turns = torch.polar(torch.ones(8, 4), normal(8, 4, seed=9 + index).float())
    rotations, _ = torch.linalg.qr(normal(8, 8, 8, seed=index).float())
    for kind, projection, rotate in (("value", attention.v_proj, lambda heads: rotations @ heads),
                                     ("key", attention.k_proj, lambda heads: rotate_pairs(heads, turns))):
        first = {head: group[0] for group in GROUPS[kind][index] for head in group}
        for parameter in projection.parameters():
            heads = parameter.view(8, 8, -1)
            heads.copy_(rotate(heads[[first[head] for head in range(8)]]))


@pytest.fixture(scope="module")
def source(inputs, tmp_path_factory):
    """A calibrated model whose heads share what they can, as a Source."""
    home, model = tmp_path_factory.mktemp("shared"), tiny_model(bias=True)
    for index, layer in enumerate(model.model.layers):
        share_heads(layer.self_attn, index)
    model.save_pretrained(home / "model")
    byte_tokenizer().save_pretrained(home / "model")
    run("01_calibrate.py", "--run", home, "--model", home / "model", "--text", inputs["text"],
        "--sequences", 8, "--length", 64)
    layers = Layers(str(home / "model"), torch.float32, "cpu")
    return start.Source(layers, partial(Calibration(str(home / "calibration")).grams, "cpu"), 64)


def test_keys_and_values_are_merged_exactly_in_groups_of_their_own(source):
    """To 1e-4 of the largest logit, since statistics are float32 products."""
    merged, expected = source.merged(GROUPS), all_logits(source.layers.model, tokens())
    largest = max(float(logits.abs().max()) for logits in expected)
    assert max_difference(expected, all_logits(merged, tokens())) < 1e-4 * largest


def test_groups_of_least_energy_and_the_heads_a_layer_needs_are_those_that_lose_none(source):
    """With as many heads as its groups in all, each layer gets those it shares without loss."""
    layers = [start.energy_losses(source.grams_of(index), 64) for index in range(3)]
    losses = {kind: [layer[kind] for layer in layers] for kind in start.KINDS}
    needed = {kind: [len(layer) for layer in GROUPS[kind]] for kind in start.KINDS}
    for kind, groups in GROUPS.items():
        assert start.energy_groups(losses[kind], needed[kind]) == groups
    counts, costs = start.measure_counts(source, losses, sum(map(sum, needed.values())), tokens(4, 64))
    assert counts == needed
    for kind, index in itertools.product(needed, range(3)):
        below = [cost for heads, cost in costs[kind][index].items() if heads < needed[kind][index]]
        assert costs[kind][index][needed[kind][index]] < 1e-6 < min(below, default=1)


def test_the_cheapest_counts_are_those_of_all():
    rungs = (1, 2, 4, 8)
    costs = [dict(zip(rungs, normal(4, seed=layer).abs().tolist(), strict=True)) for layer in range(5)]
    cost = {heads: sum(costs[layer][number] for layer, number in enumerate(heads))
            for heads in itertools.product(rungs, repeat=5)}
    for total in range(5, 31):  # some counts add up to each
        cheapest = tuple(start.cheapest_counts(costs, total))
        assert sum(cheapest) == total
        assert cost[cheapest] == pytest.approx(min(cost[heads] for heads in cost if sum(heads) == total))


@torch.no_grad()
def test_rotated_heads_are_nearer_to_their_own_groups(source):
    """Those of each group become equal; nothing else changes."""
    model = copy.deepcopy(source.layers.model)
    for index, layer in enumerate(model.model.layers):
        groups = {kind: GROUPS[kind][index] for kind in start.KINDS}
        start.rotate_layer(layer.self_attn, source.grams_of(index), groups["key"], groups["value"])
        for kind, name in (("value", "v_proj"), ("key", "k_proj")):
            heads = getattr(layer.self_attn, name).weight.view(8, 8, -1)
            for group in groups[kind]:
                assert float((heads[group] - heads[group[0]]).abs().max()) < 1e-4
    assert max_difference(all_logits(source.layers.model, tokens()), all_logits(model, tokens())) < 1e-4
