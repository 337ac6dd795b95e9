"""related/dha: operators, losses, groups and budgets against their definitions; model, phases, commands."""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from common.cli import UserError, run_stage
from common.data.samples import Sample
from common.evaluate import all_logits, cache_bytes_per_token, max_difference
from common.method.fuse import merge_model
from common.models import Geometry, geometry
from common.training.engine import STOPPED, learning_rate
from conftest import ROOT, byte_tokenizer, expect_error, run, save_tiny, tiny_model
from related.dha import (
    compare,
    export,
    fuse,
    fusion,
    grouping,
    pool,
    pretrain,
    records,
    search,
    similarity,
    training,
)
from related.dha.modeling import DhaConfig, DhaForCausalLM

EIGHT = list(range(8))
GROUPS = {  # of tiny_model: 3 layers of 8 heads
    "key": [
        [[0, 2, 5, 7], [1, 3, 4, 6]],
        [EIGHT],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ],
    "value": [
        [EIGHT],
        [[0, 7], [1, 6], [2, 5], [3, 4]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ],
}
SECOND = {  # of a model whose heads are GROUPS: 2, 1 and 4 key heads, 1, 4 and 2 value heads
    "key": [[[0, 1]], [[0]], [[0, 2], [1, 3]]],
    "value": [[[0]], [[0, 3], [1, 2]], [[0, 1]]],
}
WHOLE = fusion.whole_layers({"key": [8] * 3, "value": [8] * 3})


def random_operators(groups=GROUPS, seed=0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    operators = {}
    for name, operator in fusion.starting_operators(groups, 8).items():
        operators[name] = torch.randn(operator.shape, generator=generator) / operator.shape[1]
    return operators


def averages(operators: dict) -> dict:
    return {name: fusion.averaged(operator) for name, operator in operators.items()}


def tokens(rows=2, length=40):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(3))


# operators and losses


@pytest.mark.parametrize("bias", [False, True])
def test_operators_that_change_nothing_change_nothing_and_others_do(bias):
    source = tiny_model(bias=bias)
    expected = all_logits(source, tokens())
    start = fusion.starting_operators(GROUPS, 8)
    parameters = {name: torch.nn.Parameter(operator) for name, operator in start.items()}
    same = fusion.with_operators(tiny_model(bias=bias), parameters, GROUPS)
    assert type(same.model.layers[0].self_attn.k_proj) is fusion.FusedLinear
    assert (
        same.state_dict().keys() == source.state_dict().keys()
    )  # operators are not among the model's parameters
    assert max_difference(expected, all_logits(same, tokens())) < 1e-5
    for (
        kind
    ) in fusion.PROJECTIONS:  # one factor of one head, of the keys or of the values, makes a difference
        operators = fusion.starting_operators(GROUPS, 8)
        operators[f"1_{kind}"][0, 0, 1, 0] = 0.5
        other = fusion.with_operators(tiny_model(bias=bias), operators, GROUPS)
        assert max_difference(expected, all_logits(other, tokens())) > 1e-3


@pytest.mark.parametrize("groups", [GROUPS, {kind: [GROUPS["key"][2]] * 3 for kind in fusion.PROJECTIONS}])
def test_operators_that_change_nothing_change_nothing_in_a_model_of_fused_heads(groups):
    whole = fusion.whole_layers(export.head_counts(fused_tiny(groups)[1].config))
    for kind in fusion.PROJECTIONS:
        assert [len(layer[0]) for layer in whole[kind]] == [len(layer) for layer in groups[kind]]
    expected = all_logits(fused_tiny(groups)[1], tokens())
    same = fusion.with_operators(fused_tiny(groups)[1], fusion.starting_operators(whole, 8), whole)
    assert max_difference(expected, all_logits(same, tokens())) < 1e-5
    other = fusion.with_operators(fused_tiny(groups)[1], random_operators(whole), whole)
    assert max_difference(expected, all_logits(other, tokens())) > 1e-3


def test_mixed_heads_are_equation_5():
    attention, operators = tiny_model(bias=True).model.layers[0].self_attn, random_operators()
    x = torch.randn(5, 48)
    plain = {"key": attention.k_proj(x).view(5, 8, 8), "value": attention.v_proj(x).view(5, 8, 8)}
    model = fusion.with_operators(tiny_model(bias=True), operators, GROUPS)
    for kind, name in fusion.PROJECTIONS.items():
        mixed = getattr(model.model.layers[0].self_attn, name)(x).view(5, 8, 8)
        for group, members in enumerate(GROUPS[kind][0]):
            for h, head in enumerate(members):
                factors = operators[f"0_{kind}"][group, h]
                expected = sum(factors[j] * plain[kind][:, other] for j, other in enumerate(members))
                torch.testing.assert_close(mixed[:, head], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_combining_heads_in_the_weights_equals_the_operators(bias):
    operators = random_operators()
    model = tiny_model(bias=bias)
    model.load_state_dict(fusion.combine_heads(model.state_dict(), operators, GROUPS, fusion.mix))
    expected = all_logits(fusion.with_operators(tiny_model(bias=bias), operators, GROUPS), tokens())
    assert max_difference(expected, all_logits(model, tokens())) < 1e-4


def test_fusion_loss_is_equation_7_in_the_scale_of_algorithm_3():
    operators, layers = random_operators(), []
    for layer in range(3):
        total = 0.0
        for kind in fusion.PROJECTIONS:  # Algorithm 3 divides the sum over pairs by H g D (g - 1) / 2
            operator = operators[f"{layer}_{kind}"]
            _, size, _, width = operator.shape
            pairs = 0.0
            for group in operator:
                for first, second in itertools.combinations(group, 2):
                    pairs += float((first - second).square().sum())
            total += pairs / (8 * size * width * (size - 1) / 2)
        layers.append(total / 2)
    assert float(fusion.fusion_loss(operators)) == pytest.approx(sum(layers) / 3, rel=1e-5)
    assert float(fusion.fusion_loss(averages(operators))) < 1e-12


def test_pair_losses_by_definition():
    operator = random_operators()["0_key"]
    losses = fusion.pair_losses(operator)
    assert losses.shape == (2, 4, 4)
    for group, h, other in itertools.product(range(2), range(4), range(4)):
        expected = float((operator[group, h] - operator[group, other]).square().mean())
        assert float(losses[group, h, other]) == pytest.approx(expected)


def test_identity_operators_have_a_fusion_loss_of_two_over_the_group_size():
    assert fusion.layer_loss(fusion.kronecker([[0], [1]], 8)) == 0
    for size in (2, 4, 8):
        assert float(fusion.layer_loss(fusion.kronecker([EIGHT[:size]], 8))) == pytest.approx(2 / size)


def test_margin_is_equation_8():
    assert fusion.margin(0, 200) == 1 and fusion.margin(200, 200) == 0 and fusion.margin(900, 200) == 0
    assert fusion.margin(100, 200) == pytest.approx(0.999**100 / 2)


# groups and budgets


def test_budgets_of_algorithm_5():
    draw = random.Random(0)
    losses = [1 + draw.random() / 2 for _ in range(32)]
    # as published: 32 layers of 32 heads, a quarter of them
    given = grouping.allocate(losses, [32] * 32, [4, 8, 16], 256)
    assert sum(given) == 256 and set(given) <= {4, 8, 16}
    assert given[losses.index(max(losses))] == 16 and given.count(16) == 1
    rest = sorted((loss, count) for loss, count in zip(losses, given, strict=True) if count < 16)
    assert [count for _, count in rest] == [4, 4] + [8] * 29  # the remaining heads go to the largest losses
    assert grouping.allocate([0.1, 0.4, 0.2, 0.3], [8] * 4, [1, 2, 4], 8) == [1, 4, 1, 2]
    # 1 / 2 exceeds 0.1 / 1
    assert grouping.allocate([1.0, 0.1, 0.1, 9.0, 0.1], [8] * 5, [1, 2, 4], 11) == [4, 1, 1, 4, 1]
    # 1 / 2 is below 0.9 / 1, but 13 is odd
    assert grouping.allocate([3.0, 0.9, 1.0], [8] * 3, [1, 2, 4, 8], 13) == [8, 1, 4]
    assert grouping.allocate([3.0, 0.9, 1.0], [8] * 3, [1, 2, 4, 8], 12) == [8, 2, 2]
    # the neediest layer gets its own highest rung, and none gets more heads than it has
    assert grouping.allocate([9.0, 3.0, 0.9, 1.0], [2, 8, 1, 4], [1, 2, 4], 9) == [2, 4, 1, 2]


def test_every_budget_that_can_be_met_is_met_exactly_and_no_other():
    draw = random.Random(1)
    for ladder, layers in itertools.product(([1, 2, 4], [2, 4, 8], [1, 3, 6]), (1, 2, 3, 5)):
        for heads in ([24] * layers, draw.choices([1, 2, 3, 4, 8, 12, 24], k=layers)):
            rungs = [[rung for rung in ladder if count % rung == 0] for count in heads]
            sums = {sum(numbers) for numbers in itertools.product(*rungs)}
            for total in range(layers * ladder[-1] + 2):
                losses = [draw.random() for _ in range(layers)]
                if total in sums:
                    given = grouping.allocate(losses, heads, ladder, total)
                    assert sum(given) == total
                    assert all(count in layer for count, layer in zip(given, rungs, strict=True))
                else:
                    with pytest.raises(UserError):
                        grouping.allocate(losses, heads, ladder, total)


def partitions(heads: list[int], size: int):
    if not heads:
        yield []
        return
    for others in itertools.combinations(heads[1:], size - 1):
        group = [heads[0], *others]
        rest = [head for head in heads if head not in group]
        for groups in partitions(rest, size):
            yield [group, *groups]


def random_losses(heads: int, seed: int) -> torch.Tensor:
    losses = torch.rand(heads, heads, generator=torch.Generator().manual_seed(seed))
    return ((losses + losses.T) / 2).fill_diagonal_(0)


@pytest.mark.parametrize("count", [2, 4])
def test_annealing_finds_the_best_of_all_groupings_and_keeps_its_books(count):
    for seed in range(4):
        losses = random_losses(8, seed)
        totals = [grouping.within(losses.tolist(), groups) for groups in partitions(EIGHT, 8 // count)]
        groups = grouping.anneal(losses, count, 50, seed)
        assert grouping.within(losses.tolist(), groups) == pytest.approx(min(totals))
        assert grouping.within_random(losses, count) == pytest.approx(sum(totals) / len(totals))
        total, groups = grouping.walk(losses.tolist(), count, random.Random(seed))  # summed up swap by swap
        assert total == pytest.approx(grouping.within(losses.tolist(), groups))
        assert sorted(sum(groups, [])) == EIGHT


def test_loss_within_groups_and_the_gain_of_a_swap_by_definition():
    losses = random_losses(6, 0).tolist()
    assert grouping.within(losses, [[4, 0, 2], [5, 1, 3]]) == pytest.approx(
        losses[0][2] + losses[0][4] + losses[2][4] + losses[1][3] + losses[1][5] + losses[3][5]
    )
    before, after = [[4, 0, 2], [5, 1, 3]], [[3, 0, 2], [5, 1, 4]]
    gain = grouping.within(losses, before) - grouping.within(losses, after)
    assert grouping.swap_gain(losses, *before, 0, 2) == pytest.approx(gain)


def test_walks_start_from_losses_over_their_mean_and_the_best_one_counts():
    losses = random_losses(16, 0)
    first, second = torch.triu_indices(16, 16, 1)
    scaled = (losses.double() / float(losses[first, second].mean())).tolist()
    for seed in range(3):
        draw = random.Random(seed)
        walks = [grouping.walk(scaled, 4, draw) for _ in range(6)]
        assert len({total for total, _ in walks}) > 1
        best = sorted(sorted(group) for group in min(walks)[1])
        assert grouping.anneal(losses, 4, 6, seed) == best
        assert grouping.anneal(losses * 2**-14, 4, 6, seed) == best  # the scale of the losses does not matter


def test_a_walk_cools_from_100_to_a_thousandth_by_a_tenth_each_proposal(monkeypatch):
    class Draw(random.Random):
        def randrange(self, below):  # always two different groups
            self.turn = 1 - getattr(self, "turn", 1)
            return self.turn

    def accepts(gain, temperature, draw):
        temperatures.append(temperature)
        assert len(temperatures) <= 200, "it does not cool"
        return False

    temperatures = []
    monkeypatch.setattr(grouping, "accepts", accepts)
    grouping.walk(random_losses(4, 0).tolist(), 2, Draw(0))
    assert temperatures == pytest.approx([100 * 0.9**step for step in range(110)])


def test_worse_swaps_are_accepted_with_the_probability_of_algorithm_4():
    class Draw:
        def __init__(self, value: float):
            self.value = value

        def random(self) -> float:
            return self.value

    assert grouping.accepts(0.1, 0.001, Draw(1.0))  # a better grouping, always
    for gain, temperature in ((-1.0, 100.0), (-1.0, 2.0), (-0.3, 0.1)):
        probability = 2.718281828459045 ** (gain / temperature)
        assert grouping.accepts(gain, temperature, Draw(probability - 1e-6))
        assert not grouping.accepts(gain, temperature, Draw(probability + 1e-6))


def test_annealing_takes_worse_groupings_while_it_is_hot():
    class Draw:
        calls, positions = 0, random.Random(0)

        def shuffle(self, heads):
            heads[:] = sum(start, [])

        def randrange(self, below):
            return self.positions.randrange(below)

        def random(self):
            self.calls += 1
            return (
                0.5 if self.calls <= 10 else 1.0
            )  # exp(gain / T) exceeds 1/2 at first; later nothing worse is taken

    losses = torch.ones(6, 6).fill_diagonal_(0)
    losses[:3, :3] = losses[3:, 3:] = 0
    groupings = list(partitions(EIGHT[:6], 3))
    start = min(groupings, key=lambda groups: grouping.within(losses.tolist(), groups))
    draw = Draw()
    best, groups = grouping.walk(losses.tolist(), 2, draw)
    assert draw.calls > 10 and best == 0
    assert sorted(map(sorted, groups)) == start  # it left the optimum and still returns it


def test_search_groups_heads_by_their_own_kind_and_budgets_layers_by_their_loss():
    shape, args = Geometry(3, 8, 8, head_dim=2, hidden=16), SimpleNamespace(walks=20, seed=0)
    operators = averages(fusion.starting_operators(WHOLE, 2))
    pairs = {"key": (0, [[0, 1], [2, 3], [4, 5], [6, 7]]), "value": (2, [[0, 7], [1, 6], [2, 5], [3, 4]])}
    for kind, (layer, groups) in pairs.items():  # in this layer pairs read alike, in the others all heads do
        for group in groups:
            operator = fusion.kronecker([EIGHT], 2)[0, group].mean(0)
            operators[f"{layer}_{kind}"] = operators[f"{layer}_{kind}"].clone()
            operators[f"{layer}_{kind}"][0, group] = operator
    groups, figures = search.choose_groups(args, operators, shape, search.Budget(2, [1, 2, 4]))
    for kind, (layer, expected) in pairs.items():
        assert figures[kind]["heads"] == [4 if index == layer else 1 for index in range(3)]
        assert groups[kind] == [expected if index == layer else [EIGHT] for index in range(3)]
        loss = 24 / 28 / 8  # of 28 pairs of heads all but 4 have a loss of 4 / 4 / 8
        assert figures[kind]["layer_loss"][layer] == pytest.approx(loss)
        assert figures[kind]["loss_within_groups"] == pytest.approx([0, 0, 0])
        assert figures[kind]["loss_within_random_groups"][layer] == pytest.approx(4 * loss)


def test_layers_of_few_heads_need_no_more_of_them_for_having_few():
    heads, args = [8, 2, 4], SimpleNamespace(walks=20, seed=0)
    whole = fusion.whole_layers({"key": heads, "value": [2, 8, 1]})
    operators = fusion.starting_operators(whole, 2)  # all pairs of heads are equally far apart, but for
    operators["0_key"] *= 1.1
    operators["1_value"] *= 1.1
    shape = Geometry(3, 8, 4, head_dim=2, hidden=16)
    groups, figures = search.choose_groups(args, operators, shape, search.Budget(2, [1, 2, 4]))
    assert figures["key"]["source_heads"] == heads and figures["value"]["source_heads"] == [2, 8, 1]
    assert figures["key"]["layer_loss"] == pytest.approx([1.21 * 2 / 8, 2 / 2, 2 / 4])
    assert figures["key"]["heads"] == [4, 1, 1] and figures["value"]["heads"] == [1, 4, 1]
    assert [sorted(sum(layer, [])) for layer in groups["key"]] == [list(range(count)) for count in heads]
    assert groups["value"][2] == [[0]] and figures["value"]["loss_within_random_groups"][2] == 0


def test_cka_is_as_printed_and_finds_a_rotated_head():
    heads = torch.randn(3, 4, 20)
    heads[1] = 3 * torch.linalg.qr(torch.randn(4, 4))[0] @ heads[0]
    matrix = similarity.cka(heads)
    for a, b in itertools.product(range(3), repeat=2):
        x, y = heads[a].T.double(), heads[b].T.double()  # the paper's weights have a column per channel
        norms = (x.T @ x).norm() ** 2 * (y.T @ y).norm() ** 2
        assert float(matrix[a, b]) == pytest.approx(float((x.T @ y).norm() ** 2 / norms.sqrt()))
    assert float(matrix[0, 1]) == pytest.approx(1, abs=1e-5) and float(matrix[0, 2]) < 0.9
    assert similarity.redundancy(matrix) == pytest.approx(
        float(matrix[0, 1] + matrix[0, 2] + matrix[1, 2]) / 3
    )


def test_a_single_head_repeats_nothing():
    assert similarity.redundancy(torch.ones(1, 1)) == 0


def test_head_similarity_compares_the_heads_of_each_kind():
    model = tiny_model()
    matrices, redundancies = similarity.head_similarity(model, 8)
    assert list(matrices) == ["query", "key", "value"] and all(
        len(layers) == 3 for layers in matrices.values()
    )
    value_heads = model.model.layers[1].self_attn.v_proj.weight.view(8, 8, 48)
    torch.testing.assert_close(matrices["value"][1], similarity.cka(value_heads))
    assert redundancies["value"][1] == pytest.approx(similarity.redundancy(matrices["value"][1]), abs=1e-5)


# the model


def fused_tiny(groups=GROUPS, bias=True, **options):
    """A tiny model in fusion, its operators averaged, and the model of fused heads made from it."""
    operators, source = random_operators(groups), tiny_model(bias=bias, **options)
    state = fusion.combine_heads(source.state_dict(), operators, groups, fusion.fold)
    fused = export.fused_model(source.config, state, groups)
    return fusion.with_operators(source, averages(operators), groups), fused


@pytest.mark.parametrize("options", [{"bias": True}, {"bias": False, "tie_word_embeddings": True}])
def test_fused_heads_are_the_averaged_model_and_its_cache_holds_them_alone(options):
    averaged, fused = fused_tiny(**options)
    assert type(fused) is DhaForCausalLM
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4
    assert export.cache_heads(fused) == {"key": [2, 1, 4], "value": [1, 4, 2]}
    export.check_cache(fused, {"key": [2, 1, 4], "value": [1, 4, 2]})
    with pytest.raises(UserError, match="expected a cache of"):
        export.check_cache(fused, {"key": [2, 1, 4], "value": [1, 2, 4]})
    assert cache_bytes_per_token(fused, tokens()[0]) == (7 + 7) * 8 * 4
    assert geometry(fused.config).kv_heads == 14 // (2 * 3)
    attention = fused.model.layers[0].self_attn
    assert attention.key_map == [0, 1, 0, 1, 1, 0, 1, 0] and attention.value_map == [0] * 8


def test_without_fusion_heads_are_the_means_of_their_groups():
    source = tiny_model(bias=True)
    pooled = pool.pooled_model(source.config, source.state_dict(), GROUPS)
    for kind, name in fusion.PROJECTIONS.items():
        for layer, (before, after) in enumerate(zip(source.model.layers, pooled.model.layers, strict=True)):
            for part in ("weight", "bias"):
                heads = getattr(before.self_attn.get_submodule(name), part).unflatten(0, (8, 8))
                means = [heads[group].mean(0) for group in GROUPS[kind][layer]]
                torch.testing.assert_close(getattr(after.self_attn.get_submodule(name), part),
                                           torch.cat(means), rtol=1e-6, atol=1e-7)
    assert torch.equal(source.model.layers[1].self_attn.q_proj.weight,
                       pooled.model.layers[1].self_attn.q_proj.weight)


@pytest.mark.parametrize("second", [SECOND, {
    "key": [[[0, 1]], [[0]], [[0, 1, 2, 3]]], "value": [[[0]], [[0, 1, 2, 3]], [[0, 1]]],
}])  # fmt: skip
def test_heads_fused_twice_are_the_averaged_model_of_heads_fused_once(second, tmp_path):
    fused_tiny()[1].save_pretrained(tmp_path)
    source, operators = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), random_operators(second)
    state = fusion.combine_heads(source.state_dict(), operators, second, fusion.fold)
    fused = export.fused_model(source.config, state, second)
    averaged = fusion.with_operators(source, averages(operators), second)
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4
    heads = {kind: [len(layer) for layer in second[kind]] for kind in fusion.PROJECTIONS}
    export.check_cache(fused, heads)
    if second is SECOND:
        assert fused.config.key_groups == [[EIGHT], [EIGHT], [[0, 2, 4, 6], [1, 3, 5, 7]]]
        assert fused.config.value_groups == [[EIGHT], [[0, 3, 4, 7], [1, 2, 5, 6]], [EIGHT]]
    else:
        assert type(fused) is LlamaForCausalLM and geometry(fused.config).kv_heads == 1
        fused.save_pretrained(tmp_path / "stock")
        config = json.loads((tmp_path / "stock" / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert config.keys().isdisjoint({"auto_map", "key_groups", "value_groups"})


@pytest.mark.parametrize("groups, kind", [
    ([[0, 3], [1, 2]], LlamaForCausalLM), ([[0, 1], [2, 3]], DhaForCausalLM),
])  # fmt: skip
def test_a_stock_llama_of_fused_heads_is_fused_further(groups, kind):
    four = [[0, 4], [1, 5], [2, 6], [3, 7]]
    source = fused_tiny({"key": [four] * 3, "value": [four] * 3})[1]
    assert export.query_heads(source.config)["value"][2] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    second = {"key": [[[0, 3], [1, 2]]] * 3, "value": [groups] * 3}
    operators = random_operators(second)
    state = fusion.combine_heads(source.state_dict(), operators, second, fusion.fold)
    fused = export.fused_model(source.config, state, second)
    averaged = fusion.with_operators(source, averages(operators), second)
    assert type(fused) is kind and geometry(fused.config).kv_heads == 2
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4


def test_decoding_with_the_cache_equals_the_whole_pass():
    _, fused = fused_tiny()
    whole, cache = all_logits(fused, tokens(1))[0], None
    steps = []
    with torch.no_grad():
        for part in tokens(1).split((30, 1, 9), dim=1):
            output = fused(input_ids=part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits[0])
    torch.testing.assert_close(torch.cat(steps), whole, rtol=1e-4, atol=1e-4)


def test_attention_implementations_agree_and_packed_samples_stay_apart(tmp_path):
    _, fused = fused_tiny()
    fused.save_pretrained(tmp_path)
    expected = all_logits(fused, tokens())
    for attention in ("eager", "sdpa", "packed"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
        assert max_difference(expected, all_logits(loaded, tokens())) < 1e-4
    row, positions = tokens().view(1, -1), torch.arange(40).repeat(2)[None]
    with torch.no_grad():
        packed = training.build_row([Sample(tuple(ids)) for ids in tokens().tolist()], 2)
        both = loaded(input_ids=row, position_ids=positions, use_cache=False, row=packed).logits[0]
    torch.testing.assert_close(both, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_fresh_process_loads_it_registered_or_with_trust_remote_code(tmp_path):
    _, fused = fused_tiny()
    fused.save_pretrained(tmp_path / "fused")
    expected = fused.generate(tokens(), max_new_tokens=6, do_sample=False)
    torch.save((tokens(), expected), tmp_path / "expected.pt")
    script = (
        "import torch; {first}; from transformers import AutoModelForCausalLM as Auto\n"
        "tokens, expected = torch.load('expected.pt'); model = Auto.from_pretrained('fused'{trust}).eval()\n"
        "assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), expected)\n"
        "print(type(model).__module__)"
    )
    for first, trust, path, module in (
        ("import related.dha.modeling", "", str(ROOT), "related.dha.modeling"),
        ("pass", ", trust_remote_code=True", "", "transformers_modules"),
    ):
        environment = os.environ | {"PYTHONPATH": path, "HF_MODULES_CACHE": str(tmp_path / "modules")}
        command = [sys.executable, "-c", script.format(first=first, trust=trust)]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0 and done.stdout.startswith(module), done.stdout + done.stderr


def test_shared_groups_of_one_number_are_a_stock_llama():
    layers = [
        [[0, 2, 5, 7], [1, 3, 4, 6]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 7, 3, 4], [1, 2, 5, 6]],
    ]
    groups = {kind: layers for kind in fusion.PROJECTIONS}
    averaged, fused = fused_tiny(groups)
    assert type(fused) is LlamaForCausalLM and geometry(fused.config).kv_heads == 2
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4
    other_values = groups | {"value": [*layers[:2], [[0, 1, 2, 3], [4, 5, 6, 7]]]}
    other_number = {kind: [*layers[:2], [EIGHT]] for kind in fusion.PROJECTIONS}
    assert type(fused_tiny(other_values)[1]) is type(fused_tiny(other_number)[1]) is DhaForCausalLM


def test_config_survives_being_written(tmp_path):
    config = DhaConfig(key_groups=GROUPS["key"], value_groups=GROUPS["value"], num_hidden_layers=3)
    config.save_pretrained(tmp_path)
    again = DhaConfig.from_pretrained(tmp_path)
    assert (again.key_groups, again.value_groups) == (GROUPS["key"], GROUPS["value"])


def test_folding_operators_after_search_is_checked():
    for source in (tiny_model(), fused_tiny()[1]):
        whole = fusion.whole_layers(export.head_counts(source.config))
        operators = random_operators(whole)
        folded, difference = search.fold_operators(source.config, source.state_dict(), operators, whole)
        assert type(folded) is type(source) and 0 < difference <= training.LOGIT_TOLERANCE
        expected = all_logits(fusion.with_operators(source, operators, whole), tokens())
        assert max_difference(expected, all_logits(folded, tokens())) < 1e-4


# the phases


DATA = {"batch": 4, "seed": 0, "tokens_per_microbatch": 128}


def random_samples(count: int) -> list:
    rows = torch.randint(256, (count, 32), generator=torch.Generator().manual_seed(5)).tolist()
    return [training.Sample(row[:-1], row[-1:]) for row in rows]


def fusing(path: str, directory, ranks, steps: int, margin_steps: int):
    """Fusion of the model at `path`, begun in a directory or resumed there: its job, phase and plan."""
    os.makedirs(directory, exist_ok=True)
    plan = training.make_plan(DATA, steps, 0.1, 100)
    start, rates = fusion.starting_operators(GROUPS, 8), (1e-3, 2e-2, 5.0)
    job = training.begin(str(directory), {"steps": steps}, path, ranks, rates, start)
    return job, training.Fusing(job, plan, random_samples(4), 100, GROUPS, margin_steps), plan


def move_operators(job) -> None:
    """Random changes of all operators, and a multiplier of 3."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        job.trainee.replicated[training.MULTIPLIER].fill_(3.0)
        for operator in training.operators_in(job.trainee).values():
            operator.add_(0.1 * torch.randn(operator.shape, generator=generator))


def whole_parameters(trainee) -> list[torch.Tensor]:
    parameters = []
    for tensor in trainee.parameters():
        tensor = tensor.detach()
        parameters.append(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone())
    return parameters


@pytest.mark.slow
def test_lagrangian_drives_the_fusion_loss_down_and_lambda_only_rises_where_it_is_too_large(
    tmp_path, group_of_one
):
    job, phase, plan = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80, 20)
    assert training.train(job, phase, random_samples(16), plan)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = fusion.fusion_loss(fusion.starting_operators(GROUPS, 8))
    assert lines[0]["fusion_loss"] == pytest.approx(float(first))
    assert lines[-1]["fusion_loss"] < 0.05 * lines[0]["fusion_loss"]
    allowed = True
    for before, after in itertools.pairwise(lines):
        assert after["lambda"] >= before["lambda"]
        allowed = allowed and before["fusion_loss"] <= before["margin"]
        assert not allowed or after["lambda"] == 0
    assert lines[-1]["lambda"] > 1
    rates = [line["lr"] / 1e-3 for line in lines]
    assert max(rates) == pytest.approx(1) and rates[-1] == pytest.approx(0.1, abs=0.01)


def test_operator_gradient_is_that_of_the_whole_objective(tmp_path, group_of_one):
    job, phase, _ = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80, 20)
    samples = random_samples(4)
    move_operators(job)
    rows = training.build_row(samples[:2], 4), training.build_row(samples[2:], 4)
    phase.begin_step(40)  # t is 0
    for row in rows:
        phase.row_loss(row)[0].backward()
    phase.end_step(40)

    trained = training.operators_in(job.trainee)
    operators = {name: operator.detach().clone().requires_grad_() for name, operator in trained.items()}
    model = fusion.with_operators(tiny_model(), operators, GROUPS)
    batch = training.as_tokens(samples)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss + 3.0 * fusion.fusion_loss(operators)
    loss.backward()
    for name, operator in operators.items():
        torch.testing.assert_close(trained[name].grad, operator.grad, rtol=1e-3, atol=1e-6)
    multiplier = job.trainee.replicated[training.MULTIPLIER]
    assert float(multiplier.grad) == pytest.approx(float(fusion.fusion_loss(operators).detach()))


def test_no_gradient_pulls_while_the_fusion_loss_is_within_its_margin(tmp_path, group_of_one):
    job, phase, _ = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80, 20)
    with torch.no_grad():
        job.trainee.replicated[training.MULTIPLIER].fill_(3.0)
    figures = phase.end_step(1)  # t is 0.95, the fusion loss of the start about 0.5
    assert figures["margin"] == pytest.approx(0.999 * 0.95) and figures["fusion_loss"] < figures["margin"]
    assert figures["lambda"] == 3.0
    assert float(job.trainee.replicated[training.MULTIPLIER].grad) == 0
    assert all(not operator.grad.any() for operator in phase.operators.values())
    figures = phase.end_step(19)
    excess = figures["fusion_loss"] - figures["margin"]
    assert float(job.trainee.replicated[training.MULTIPLIER].grad) == pytest.approx(excess) and excess > 0


def test_weights_and_operators_descend_and_lambda_ascends_each_at_its_rate(tmp_path, group_of_one):
    job, phase, _ = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80, 20)
    multiplier = job.trainee.replicated[training.MULTIPLIER]
    rates = {}
    for group in job.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
        for parameter in group["params"]:
            rates[id(parameter)] = group["lr"]
            parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in phase.operators.values()]
    weight = job.trainee.net.model.norm.weight
    weight_before = weight.detach().clone()
    job.optimizer.step()
    assert float(multiplier.detach()) == pytest.approx(5.0)  # the first step of Adam has the size of its rate
    for operator, start in zip(phase.operators.values(), before, strict=True):
        torch.testing.assert_close(operator.detach(), start - 2e-2)
    assert rates[id(weight)] == 1e-3 and bool(((weight.detach() - weight_before).full_tensor() < 0).all())


def test_search_trains_operators_by_the_language_model_loss_alone(tmp_path, group_of_one):
    path = save_tiny(tmp_path / "model")
    plan, samples = training.make_plan(DATA, 10, 0.1, 100), random_samples(4)
    start = fusion.starting_operators(WHOLE, 8)
    job = training.begin(str(tmp_path), {}, path, group_of_one, (1e-3, 1e-2), start)
    assert training.MULTIPLIER not in job.trainee.replicated
    phase = training.Searching(job, plan, samples, 100, WHOLE)
    phase.begin_step(0)
    phase.row_loss(training.build_row(samples, 4))[0].backward()
    figures = phase.end_step(0)
    assert figures["fusion_loss"] == pytest.approx(float(fusion.fusion_loss(start)))

    operators = {name: operator.clone().requires_grad_() for name, operator in start.items()}
    batch = training.as_tokens(samples)
    model = fusion.with_operators(tiny_model(), operators, WHOLE)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    assert figures["heldout"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, operator in operators.items():
        torch.testing.assert_close(phase.operators[name].grad, operator.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_fusion_ends_bit_identical(tmp_path, group_of_one):
    path, ends = save_tiny(tmp_path / "model"), []
    for stops in ((12,), (5, 12)):
        for stop in stops:
            job, phase, plan = fusing(path, tmp_path / str(len(stops)), group_of_one, 12, 4)
            assert job.step == (5 if stops == (5, 12) and stop == 12 else 0)
            training.train(job, phase, random_samples(16), plan, stop)
        ends.append(whole_parameters(job.trainee))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert float(phase.multiplier.detach()) > 0
    weights, operators, multiplier, step = training.last_weights(str(tmp_path / "2"))
    assert step == 12 and multiplier == float(phase.multiplier.detach())
    assert all(torch.equal(operators[name], phase.operators[name]) for name in phase.operators)
    assert weights.keys() == tiny_model().state_dict().keys()


def test_learning_rates_end_at_a_tenth_of_their_peak():
    plan = training.make_plan(DATA, 40, 0.1, 100)
    rates = [learning_rate(step, plan) for step in range(41)]
    assert plan.warmup == 4 and rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[22] == pytest.approx(0.55) and rates[40] == pytest.approx(0.1)  # half way, and the end


def test_training_stops_where_it_is_done_and_asks_every_so_many_steps(monkeypatch):
    def train(job, phase, samples, plan, until):
        stops.append(until)
        job.step = until
        return until != stopped_at

    stops, stopped_at, job, plan = [], None, SimpleNamespace(step=7), SimpleNamespace(steps=33)
    monkeypatch.setattr(training, "train", train)
    assert training.train_until(lambda: False, job, None, [], plan, 10)
    assert stops == [10, 20, 30, 33]
    job.step, stops[:] = 0, []
    assert training.train_until(lambda: job.step >= 20, job, None, [], plan, 10) and stops == [10, 20]
    job.step, stops[:], stopped_at = 0, [], 20
    assert not training.train_until(lambda: False, job, None, [], plan, 10) and stops == [10, 20]


def test_text_that_changed_since_search_is_refused(tmp_path):
    ranks, tokenizer = SimpleNamespace(say=lambda text: None), byte_tokenizer()
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.txt").write_text(f"some text to {name} on, long enough")
    data = {"text": str(tmp_path / "train.txt"), "heldout": str(tmp_path / "heldout.txt")}
    data |= {"sequences": 3, "heldout_sequences": 2, "length": 8}
    samples, heldout = training.load_data(data, tokenizer, ranks)
    assert len(samples) == 3 and len(heldout) == 2 and training.as_tokens(samples).shape == (3, 8)
    training.load_data(data, tokenizer, ranks)
    (tmp_path / "heldout.txt").write_text("some text to judge on, long enough")
    with pytest.raises(UserError, match="expected the tokens that search read"):
        training.load_data(data, tokenizer, ranks)


def test_models_it_does_not_apply_to_are_refused_with_the_reason(group_of_one, tmp_path):
    for options, reason in (
        ({"num_key_value_heads": 4}, "MHA"),
        ({"model_type": "mistral"}, "model_type llama"),
    ):
        with pytest.raises(UserError, match=reason):
            search.source_record("model", tiny_model(**options).config)
    assert search.source_record("model", tiny_model().config) is None
    path = save_tiny(tmp_path / "model")
    fusing(path, tmp_path, group_of_one, 10, 4)
    with pytest.raises(UserError, match="steps 10 -> 12"):
        fusing(path, tmp_path, group_of_one, 12, 4)
    training.check_unchanged(path, fusion.starting_operators(GROUPS, 8), GROUPS, tokens())
    with pytest.raises(UserError, match="with operators"):
        training.check_unchanged(path, random_operators(), GROUPS, tokens())


def test_flags_of_the_budget():
    shape = Geometry(layers=4, heads=8, kv_heads=8, head_dim=8, hidden=64)

    def budget(kv_heads=None, ladder=None):
        args, heads = SimpleNamespace(kv_heads=kv_heads, ladder=ladder), {"key": [8] * 4, "value": [8] * 4}
        return search.head_budget(args, shape, heads)

    assert budget() == search.Budget(2, [1, 2, 4])
    assert budget(1) == search.Budget(1, [1, 2]) and budget(4, [8, 2, 4]) == search.Budget(4, [2, 4, 8])
    for kv_heads, ladder, reason in (
        (3, None, "kv-heads"),
        (2, [3, 2], "divisors of 8"),
        (2, [4, 8], "sum to 8"),
    ):
        with pytest.raises(UserError, match=reason):
            budget(kv_heads, ladder)
    shape = Geometry(layers=4, heads=8, kv_heads=4, head_dim=8, hidden=64)
    args, heads = SimpleNamespace(kv_heads=None, ladder=None), {"key": [8, 2, 2, 4], "value": [4] * 4}
    assert search.head_budget(args, shape, heads) == search.Budget(2, [1, 2, 4])
    args.ladder, heads["value"] = [2], [8, 4, 1, 2]  # one layer of value heads has no rung
    with pytest.raises(UserError, match=r"divisors of \[8, 4, 1, 2\]"):
        search.head_budget(args, shape, heads)
    args.kv_heads = 4
    with pytest.raises(UserError, match="for 4 key/value heads, found 4"):
        search.head_budget(args, shape, heads)


def test_fused_checkpoints_are_sources_and_other_shared_heads_are_not(tmp_path):
    config, examples = fused_tiny()[1].config, example_records()
    for stage in (records.FUSE, records.POOL, records.PRETRAIN):
        save_record(tmp_path, stage, examples[stage])
        if stage == records.FUSE:
            assert search.source_record(str(tmp_path / "artifact"), config) == examples[stage]
        else:
            with pytest.raises(UserError, match="or heads that related/dha/fuse.py fused, found 2 for 8"):
                search.source_record(str(tmp_path / "artifact"), config)


def test_a_gqa_llama_is_refused_before_anything_is_written(inputs, tmp_path):
    source, home = save_tiny(tmp_path / "gqa", num_key_value_heads=4), tmp_path / "run"
    texts = ["--text", inputs["text"], "--heldout", __file__, *SMALL]
    expect_error("(MHA)", "related/dha/search.py", "--run", home, "--model", source, *texts)
    assert [path for path in home.rglob("*") if path.suffix != ".lock"] == []


@pytest.mark.parametrize("text, heldout, length, accepted", [
    ("a.txt", "b.txt", 2, True), ("a.txt", "b.txt", 32, True),
    ("demo", "demo", 8, True), ("c4", "c4", 8, True),
    ("a.txt", "a.txt", 8, False), ("a.txt", "b.txt", 1, False), ("a.txt", "b.txt", 33, False),
])  # fmt: skip
def test_held_out_text_is_another_and_predicts_something(text, heldout, length, accepted):
    args = SimpleNamespace(text=text, heldout=heldout, length=length)
    if accepted:
        search.check_texts(args, 32)
    else:
        with pytest.raises(UserError):
            search.check_texts(args, 32)


# records and the comparison


def example_records() -> dict[str, dict]:
    """A record of each command, valid but for files that it does not have."""
    digest = "0" * 64
    model = {"name": "m", "path": "m", "fingerprint": digest, "layers": 2, "heads": 4, "kv_heads": 4}
    model |= {"head_dim": 8, "hidden": 32}
    data = {
        "text": "a.txt",
        "heldout": "b.txt",
        "sequences": 8,
        "heldout_sequences": 2,
        "length": 16,
        "batch": 2,
    }
    data |= {"tokens_per_microbatch": 64, "seed": 0, "lr": 1e-3, "tokens_sha256": digest}
    choice = {
        "layer_loss": [0.1, 0.2],
        "loss_within_groups": [0.0, 0.0],
        "loss_within_random_groups": [0.1, 0.1],
    }
    choice |= {"source_heads": [4, 4], "heads": [1, 2]}
    groups = {"key": [[[0, 1, 2, 3]], [[0, 3], [1, 2]]], "value": [[[0, 1, 2, 3]], [[0, 1], [2, 3]]]}
    record = {"arguments": {}, "model": model, "inputs": {}, "packages": {}, "commit": None, "seconds": 1.0}
    record |= {"date": "2026-01-01"}
    summaries = {
        records.SEARCH: {"steps": 3, "steps_so_far": 3, "kv_heads": 1, "data": data}
        | {"key": choice, "value": choice},
        records.FUSE: {
            "steps": 4,
            "steps_so_far": 7,
            "fusion_loss": 1e-4,
            "loss_ended": 4.0,
            "loss_fused": 4.1,
        },
        records.PRETRAIN: {"steps": 9, "batch": 2, "tokens": 288, "heldout": [[0, 5.0], [288, 4.0]]},
    }
    summaries[records.POOL] = {"steps_so_far": 3}
    summaries[records.FUSE]["data"] = data
    summaries[records.PRETRAIN] |= {"cache_bytes_per_token": 64.0, "data": data}
    made = {}
    for stage, summary in summaries.items():
        made[stage] = json.loads(json.dumps(record | {"stage": stage, "summary": summary}))
    made[records.SEARCH]["groups"] = groups
    for stage in (records.FUSE, records.POOL, records.PRETRAIN):
        made[stage]["files"] = {}
    return made


def save_record(home: Path, stage: str, record) -> str:
    """Write a record where `records.read` looks for it, and return that path."""
    path = home / "search.json" if stage == records.SEARCH else home / "artifact"
    if stage != records.SEARCH:
        path.mkdir(exist_ok=True)
    (path if stage == records.SEARCH else path / "stage.json").write_text(json.dumps(record))
    return str(path)


def replace(record: dict, place: str, value) -> dict:
    """The record with the field at a dotted place replaced, or removed where value is ..."""
    *outer, last = place.split(".")
    for name in outer:
        record = record[int(name) if name.isdigit() else name]
    last = int(last) if last.isdigit() else last
    if value is ...:
        del record[last]
    else:
        record[last] = value


@pytest.mark.parametrize("stage", [records.SEARCH, records.FUSE, records.POOL, records.PRETRAIN])
def test_valid_records_are_read_as_they_are(stage, tmp_path):
    record = example_records()[stage]
    assert records.read(save_record(tmp_path, stage, record), stage) == record


@pytest.mark.parametrize("stage, place, value", [
    (records.SEARCH, "groups", ...),
    (records.SEARCH, "groups.key", None),
    (records.SEARCH, "groups.key", []),
    (records.SEARCH, "groups.key.1", [[0, 3], [1, 1]]),
    (records.SEARCH, "groups.key.1", [[0, 1, 3], [2]]),
    (records.SEARCH, "groups.key.1", [[0, 3], [1, -2]]),
    (records.SEARCH, "groups.value.0", [[0, 1], [2, 3]]),
    (records.SEARCH, "groups.value.1.0.1", "1"),
    (records.SEARCH, "summary.key.heads", [1, 3]),
    (records.SEARCH, "summary.key.heads", [1]),
    (records.SEARCH, "summary.key.source_heads", [4, 2]),
    (records.SEARCH, "summary.key.source_heads", [4]),
    (records.SEARCH, "summary.steps_so_far", ...),
    (records.SEARCH, "summary.data.length", 0),
    (records.SEARCH, "summary.data.lr", "fast"),
    (records.SEARCH, "summary.data", []),
    (records.FUSE, "summary.steps_so_far", 7.5),
    (records.FUSE, "summary.fusion_loss", float("nan")),
    (records.FUSE, "files", {"../model": "0" * 64}),
    (records.POOL, "summary.steps_so_far", ...),
    (records.PRETRAIN, "summary.heldout", []),
    (records.PRETRAIN, "summary.heldout", [[0, 5.0], [288]]),
    (records.PRETRAIN, "summary.heldout", [[288, 4.0], [0, 5.0]]),
    (records.PRETRAIN, "summary.tokens", None),
    (records.PRETRAIN, "summary.cache_bytes_per_token", -1),
])  # fmt: skip
def test_damaged_records_are_refused_in_one_line(stage, place, value, tmp_path):
    record = example_records()[stage]
    replace(record, place, value)
    with pytest.raises(UserError, match=r"expected .*, found .*; run related/dha/\w+.py again") as refusal:
        records.read(save_record(tmp_path, stage, record), stage)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["mean-pool", "it's 1", "a[1]"])
def test_names_of_rows_are_directory_names(name):
    assert records.row_name(name) == name


@pytest.mark.parametrize("name", ["../x", "a/b", "/tmp/x", "", ".", "..", "fused", "search", "calibration"])
def test_names_that_lead_out_of_the_run_or_onto_its_other_results_are_refused(name):
    with pytest.raises(Exception, match="expected a directory name"):
        records.row_name(name)


def test_steps_behind_a_checkpoint_are_those_of_search_and_fusion(tmp_path):
    data = example_records()[records.SEARCH]["summary"]["data"]
    assert records.read_start(str(tmp_path)) is None and records.steps_before(None, data) == 0
    for stage, steps in ((records.FUSE, 7), (records.POOL, 3), (records.PRETRAIN, 0)):
        (tmp_path / "stage.json").write_text(json.dumps(example_records()[stage]))
        assert records.steps_before(records.read_start(str(tmp_path)), data) == steps
    with pytest.raises(UserError, match="batch: expected 2, as in the search before, found 4"):
        records.steps_before(example_records()[records.FUSE], data | {"batch": 4})
    for text in ("[1]", "{", '{"stage": null}', '{"stage": "related/dha/fuse.py"}'):
        (tmp_path / "stage.json").write_text(text)
        with pytest.raises(UserError, match="stage.json: "):
            records.read_start(str(tmp_path))


@pytest.mark.parametrize("batch, steps", [(None, 12), (2, 12), (8, 3), (1, 24)])
def test_a_larger_batch_takes_fewer_steps_for_the_same_tokens(batch, steps):
    data = example_records()[records.SEARCH]["summary"]["data"]
    args = SimpleNamespace(steps=19, batch=batch, warmup=0.1, print_every=1)
    plan = pretrain.make_plan(args, data, 7)
    assert (plan.steps, plan.batch) == (steps, batch or 2) and plan.steps * plan.batch == 24
    args.batch = 5
    with pytest.raises(UserError, match="--batch: expected a divisor of the 24 sequences left, found 5"):
        pretrain.make_plan(args, data, 7)


def test_tokens_of_search_and_fusion_count_before_those_of_training(tmp_path):
    for phase, losses in (("search", (5.0, 4.8, 4.6)), ("fusion", (4.6, 4.5))):
        (tmp_path / phase).mkdir()
        lines = []
        for step, loss in enumerate(losses, 1):
            lines.append(json.dumps({"step": step} | ({"heldout": loss} if step % 2 else {})) + "\n")
        (tmp_path / phase / "metrics.jsonl").write_text("".join(lines))
    fused = {"data": {"batch": 2, "length": 16}, "steps": 4, "loss_ended": 4.4}
    points = compare.uncompressed_curve(str(tmp_path), {"steps": 3}, fused)
    assert points == [[0, 5.0], [2 * 32, 4.6], [3 * 32, 4.6], [7 * 32, 4.4]]


def comparable_rows() -> dict[str, dict]:
    row = example_records()[records.PRETRAIN]["summary"]
    row["heldout"] = [[0, 5.0], [70, 4.5], [150, 4.2], [288, 4.0]]
    late = row | {"heldout": [[140, 4.6], [216, 4.3], [288, 4.1]]}
    return {"source": row | {"cache_bytes_per_token": 256.0}, "pool": row, "dha": late}


def test_the_table_shows_losses_near_the_quarters_of_all_tokens():
    table = compare.comparison_table(comparable_rows()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0][3:] == ["after tokens", "0.00 M", "0.00 M", "0.00 M", "0.00 M"]
    assert cells[2] == ["source", "256", "5.000", "0.00 M", "4.500", "4.200", "", "4.000"]
    assert cells[4] == ["dha", "64", "4.600", "0.00 M", "", "4.600", "4.300", "4.100"]


@pytest.mark.parametrize(
    "field, value", [("tokens", 320), ("data", {"length": 3}), ("batch", 8), ("cache_bytes_per_token", 65.0)]
)
def test_rows_that_cannot_be_compared_are_refused(field, value, tmp_path, monkeypatch):
    rows = comparable_rows()
    monkeypatch.setattr(compare, "read", lambda path, stage: {"summary": rows[os.path.basename(path)]})
    assert compare.read_rows(str(tmp_path), list(rows)) == rows
    rows["pool"][field] = value
    with pytest.raises(UserError, match=f"pool: expected the {field} of dha"):
        compare.read_rows(str(tmp_path), list(rows))


def test_the_picture_shows_every_row_and_the_uncompressed_part_of_dha():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rows = {name: row["heldout"] for name, row in comparable_rows().items()}
    figure = compare.curves.__wrapped__(pyplot, rows, [[0, 5.0], [140, 4.6]], "title")
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    pyplot.close(figure)
    assert list(lines) == ["source", "pool", "dha", "dha, search and fusion (full cache)"]
    assert list(lines["dha"].get_xdata()) == pytest.approx([140e-6, 216e-6, 288e-6])
    assert list(lines["dha"].get_ydata()) == [4.6, 4.3, 4.1]
    dashed = lines["dha, search and fusion (full cache)"]
    assert dashed.get_linestyle() == "--" and list(dashed.get_ydata()) == [5.0, 4.6]


# the commands


SMALL = "--sequences 24 --heldout-sequences 4 --length 32 --batch 4 --steps 4 --heldout-every 2".split()


@pytest.mark.slow
def test_the_scripts_from_search_to_comparison(inputs, tmp_path):
    home = tmp_path / "it's run [1]"
    heldout = tmp_path / "heldout.txt"
    heldout.write_text(Path(json.__file__).read_text())
    source = ["--model", inputs["model"], "--text", inputs["text"], "--heldout", heldout]
    run("related/dha/search.py", "--run-dir", home, *source, *SMALL, processes=2)
    searched = json.loads((home / "search.json").read_text())
    for kind in ("key", "value"):
        counts = searched["summary"][kind]["heads"]
        assert [len(layer_groups) for layer_groups in searched["groups"][kind]] == counts and sum(
            counts
        ) == 2 * 3
        assert all(sorted(sum(layer_groups, [])) == EIGHT for layer_groups in searched["groups"][kind])
    assert searched["summary"]["unchanged_at_start"] <= 1e-5
    printed = run("related/dha/records.py", "--run", home, "--print", "text").stdout
    assert printed == inputs["text"] + "\n"

    fast = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]
    run("related/dha/fuse.py", "--run-dir", home, *fast, processes=2)
    fused = json.loads((home / "fused" / "stage.json").read_text())["summary"]
    assert fused["fusion_loss"] < 1e-3 and fused["steps"] % 10 == 0
    assert fused["unchanged_at_start"] <= 1e-5 and fused["averaged_to_fused"] <= 1e-5
    assert fused["cache_heads"] == {kind: searched["summary"][kind]["heads"] for kind in ("key", "value")}

    total = fused["steps_so_far"] + 4
    expect_error("search and fusion", "related/dha/pretrain.py", "--run", home, "--steps", 4)
    expect_error("expected a directory name", "related/dha/pretrain.py", "--run", home, "--name", "../x")
    run("related/dha/pretrain.py", "--run", home, "--steps", total, "--heldout-every", 2)
    pooled = tmp_path / "pooled"
    merge_model(AutoModelForCausalLM.from_pretrained(inputs["model"]), 2).save_pretrained(pooled)
    byte_tokenizer().save_pretrained(pooled)
    baseline = ["--name", "mean-pool", "--start", pooled, "--heldout-every", 50]
    run("related/dha/pretrain.py", "--run", home, "--steps", total, *baseline)
    for weights, name in pool.NAMES.items():
        run("related/dha/pool.py", "--run", home, "--weights", weights)
        start = ["--name", name, "--start", home / f"start-{name}", "--heldout-every", 50]
        run("related/dha/pretrain.py", "--run", home, "--steps", total, *start)
    names = ["mean-pool", "cold", "unfused", "dha"]
    done = run("related/dha/compare.py", "--run", home, "--names", *names)
    assert "lowest held-out loss" in done.stdout
    rows = json.loads((home / "compare.json").read_text())["summary"]["rows"]
    assert (
        rows["dha"]["cache_bytes_per_token"]
        == rows["mean-pool"]["cache_bytes_per_token"]
        == 2 * 3 * 2 * 8 * 4
    )
    assert rows["dha"]["heldout"][0][0] == fused["steps_so_far"] * 4 * 32
    assert rows["mean-pool"]["heldout"][0][0] == 0
    assert rows["cold"]["heldout"][0] != rows["unfused"]["heldout"][0]
    assert rows["cold"]["heldout"][0][0] == rows["unfused"]["heldout"][0][0] == 4 * 4 * 32
    assert (home / "cka-fused.png").exists()
    assert rows["dha"]["heldout"][-1][0] == rows["mean-pool"]["heldout"][-1][0] == total * 4 * 32

    record = home / "mean-pool" / "stage.json"
    record.write_text(record.read_text().replace(f'"tokens": {total * 4 * 32}', '"tokens": 64'))
    names = ["--names", "mean-pool", "dha", "--force"]
    expect_error("expected the tokens of dha", "related/dha/compare.py", "--run", home, *names)
    weights = home / "searched" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    expect_error("its content does not match", "related/dha/fuse.py", "--run", home, "--force")
    (home / "searched" / "stage.json").write_text("{}")
    expect_error("searched: expected the artifact", "related/dha/fuse.py", "--run", home, "--force")


@pytest.mark.slow
def test_two_halvings_each_search_and_fuse_and_all_their_steps_count(inputs, tmp_path):
    half, quarter = tmp_path / "half", tmp_path / "quarter"
    (tmp_path / "heldout.txt").write_text(Path(json.__file__).read_text())
    texts = ["--text", inputs["text"], "--heldout", tmp_path / "heldout.txt", *SMALL]
    fast = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]
    summaries, steps = [], 0
    for home, source, kv_heads in ((half, inputs["model"], 4), (quarter, half / "fused", 2)):
        arguments = ["--model", source, "--kv-heads", kv_heads, *texts]
        run("related/dha/search.py", "--run", home, *arguments)
        run("related/dha/fuse.py", "--run", home, *fast)
        searched = json.loads((home / "search.json").read_text())["summary"]
        fused = json.loads((home / "fused" / "stage.json").read_text())["summary"]
        assert searched["steps_so_far"] == steps + 4
        steps += 4 + fused["steps"]
        assert fused["steps_so_far"] == steps
        assert searched["unchanged_at_start"] <= 1e-5 and fused["averaged_to_fused"] <= 1e-5
        summaries.append(searched)
    for kind in fusion.PROJECTIONS:
        before, after = (summary[kind]["heads"] for summary in summaries)
        assert sum(before) == 4 * 3 and sum(after) == 2 * 3
        assert summaries[1][kind]["source_heads"] == before
    run("related/dha/pool.py", "--run", quarter)
    pooled = json.loads((quarter / "start-cold" / "stage.json").read_text())["summary"]
    assert pooled["steps_so_far"] == summaries[1]["steps_so_far"]
    staged = ["--name", "staged", "--start", quarter / "fused", "--steps", steps + 2]
    run("related/dha/pretrain.py", "--run", half, *staged)
    row = json.loads((half / "staged" / "stage.json").read_text())["summary"]
    assert row["steps"] == 2 and row["heldout"][0][0] == steps * 4 * 32
    assert row["cache_bytes_per_token"] == 2 * 3 * 2 * 8 * 4

    again = ["--run", tmp_path / "again", "--model", half / "fused", "--kv-heads", 2, *texts]
    expect_error("batch: expected 4", "related/dha/search.py", *again, "--batch", 2)
    weights = half / "fused" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    expect_error("its content does not match", "related/dha/search.py", *again)


@pytest.mark.parametrize("name", ["search", "fuse", "pretrain"])
def test_a_command_that_a_signal_stopped_says_so_by_its_exit_code(name, tmp_path, monkeypatch):
    module = {"search": search, "fuse": fuse, "pretrain": pretrain}[name]
    monkeypatch.setattr(sys, "argv", [name, "--run", str(tmp_path)])
    monkeypatch.setattr(module, "joined_ranks", contextlib.nullcontext)
    for finished, code in ((True, 0), (False, STOPPED)):
        monkeypatch.setattr(module, name, lambda *_, result=finished: result)
        with pytest.raises(SystemExit) as ended:
            run_stage(module.main)
        assert ended.value.code == code


INTERPRETER = """#!/bin/bash
# in place of Python: logs its arguments, one per line, and prints a value for --print
{ printf '%s\\n' "$@"; echo; } >> "$LOG"
run='' name='' script=${1##*/}
[ "$1" = -m ] && script=$2
for argument in "$@"; do
  case $argument in
    --run=*) run=${argument#--run=} ;;
    --print) name=print ;;
    kv-heads) echo 2; name='' ;;
    *) [ "$name" = print ] && echo "$argument of it's [1] \\$(touch $PWNED)"; name='' ;;
  esac
done
mkdir -p "$run"
"""


@pytest.mark.slow
@pytest.mark.parametrize("staged", ["", "1"])
def test_the_shell_script_passes_every_value_as_it_is(staged, tmp_path):
    interpreter, log, pwned = tmp_path / "python", tmp_path / "log", tmp_path / "pwned"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    home = f"{tmp_path}/it's a run [1] $(touch {pwned})'); import os; os.system('touch {pwned}') #"
    environment = os.environ | {"RUN": home, "PYTHON": str(interpreter), "LOG": str(log), "PWNED": str(pwned)}
    environment |= {"FUSE": "--steps 9 --lambda-lr 2", "STEPS": "12", "STAGED": staged}
    command = ["bash", str(ROOT / "related" / "dha" / "run.sh"), "--model", "my model", "--text", "a b.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [call.splitlines() for call in log.read_text().split("\n\n") if call]
    assert not pwned.exists()
    assert calls[0] == [
        "-m",
        "related.dha.search",
        f"--run={home}",
        "--model",
        "my model",
        "--text",
        "a b.txt",
    ]
    assert calls[1][2:] == [f"--run={home}", "--steps", "9", "--lambda-lr", "2"]
    calibrate = next(call for call in calls if call[0] == "01_calibrate.py")
    assert f"--text=text of it's [1] $(touch {pwned})" in calibrate and f"--run={home}" in calibrate
    rows = ("mean-pool", "aligned", "closed-form")
    aligned = [call for call in calls if call[0] == "04_align.py"]
    assert [call[1] for call in aligned] == [f"--run={home}/start-{name}" for name in rows]
    assert all(call[2] == f"--calibration={home}/calibration" for call in aligned)
    names = [call[call.index("--name") + 1] for call in calls if "--name" in call]
    compared = ["source", *rows, "cold", "unfused", "staged", "dha"]
    if staged:
        assert names.pop(2) == "staged"
        assert calls[-1] == ["-m", "related.dha.compare", f"--run={home}", "--names", *compared]
    else:
        assert calls[-1] == ["-m", "related.dha.compare", f"--run={home}"]
    assert names == ["cold", "unfused", *rows, "source"]
    halvings = [call for call in calls if f"--run={home}/half" in call or f"--run={home}/quarter" in call]
    assert [call[1].split(".")[-1] for call in halvings] == (["search", "fuse"] * 2 if staged else [])
    if staged:
        assert halvings[0][-3:] == ["--kv-heads", "4", f"--run={home}/half"]
        second = ["--model", f"{home}/half/fused", "--kv-heads", "2", f"--run={home}/quarter"]
        assert halvings[2][-5:] == second
    pools = [call for call in calls if call[1] == "related.dha.pool"]
    assert [call[2:] for call in pools] == [[f"--run={home}", "--weights", weights] for weights in pool.NAMES]
