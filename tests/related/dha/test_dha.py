"""related/dha: operators, losses, groups, budgets and the model of fused heads against their definitions."""

import itertools
import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from common.data.rows import Sample
from common.models.equivalence import max_difference
from common.run.errors import UserError
from common.training.attention import Trainee
from common.training.packing import build_row
from dha_models import EIGHT, GROUPS, HALVES, WHOLE, random_operators, tokens
from models import save_tiny, tiny_model
from reference import all_groupings
from related.dha import fusion, grouping, search, start
from related.dha.training import all_logits

pytestmark = pytest.mark.slow
TWO = [GROUPS["key"][0], HALVES, [[0, 7, 3, 4], [1, 2, 5, 6]]]  # groups in every layer
AGAIN = {"key": [[[0, 1]], [[0]], [[0, 2], [1, 3]]], "value": [[[0]], [[0, 3], [1, 2]], [[0, 1]]]}


def fused_pair(source, groups) -> tuple:
    """A model in fusion, its operators averaged, and the model of fused heads made from it."""
    operators = random_operators(groups)
    fused = fusion.fused_model(source.config, source.state_dict(), groups, operators)
    return fusion.with_operators(source, fusion.averaged(operators), groups), fused


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a fused model's checkpoint, and the model."""
    path, (_, fused) = tmp_path_factory.mktemp("fused"), fused_pair(tiny_model(bias=True), GROUPS)
    fused.save_pretrained(path)
    return path, fused


@pytest.mark.parametrize("make", [tiny_model, lambda: fused_pair(tiny_model(), GROUPS)[1]])
def test_operators_that_change_nothing_change_nothing_and_others_do(make):
    source = make()
    whole, expected = fusion.whole_layers(fusion.head_counts(source.config)), all_logits(source, tokens())
    same = fusion.with_operators(make(), fusion.starting_operators(whole, 8), whole)
    assert max_difference(expected, all_logits(same, tokens())) < 1e-5
    for name in ("2_key", "2_value"):  # one factor of one head makes a difference
        operators = fusion.starting_operators(whole, 8)
        operators[name][0, 0, 1, 0] = 0.5
        other = fusion.with_operators(make(), operators, whole)
        assert max_difference(expected, all_logits(other, tokens())) > 1e-3


def test_mixed_heads_are_equation_5():
    x, operators = torch.randn(5, 48), random_operators()
    models = tiny_model(bias=True), fusion.with_operators(tiny_model(bias=True), operators, GROUPS)
    for kind, name in fusion.PROJECTIONS.items():
        plain, mixed = (getattr(model.model.layers[0].self_attn, name)(x).view(5, 8, 8) for model in models)
        for group, members in enumerate(GROUPS[kind][0]):
            for h, head in enumerate(members):
                factors = operators[f"0_{kind}"][group, h]
                expected = sum(factors[j] * plain[:, other] for j, other in enumerate(members))
                torch.testing.assert_close(mixed[:, head], expected, rtol=1e-4, atol=1e-5)


def test_fusion_loss_is_equation_7_in_the_scale_of_algorithm_3():
    operators, total = random_operators(), 0.0
    for operator in operators.values():  # Algorithm 3 divides the sum over pairs by H g D (g - 1) / 2
        _, size, _, width = operator.shape
        squares = (operator[:, :, None] - operator[:, None]).square()  # [G, g, g, g, d], each pair twice
        torch.testing.assert_close(fusion.pair_losses(operator), squares.mean((3, 4)))
        total += float(squares.sum()) / 2 / (8 * size * width * (size - 1) / 2)
    assert float(fusion.fusion_loss(operators)) == pytest.approx(total / 6, rel=1e-5)
    assert float(fusion.fusion_loss(fusion.averaged(operators))) < 1e-12


def test_margin_is_equation_8():
    assert fusion.margin(0, 200) == 1 and fusion.margin(200, 200) == 0 and fusion.margin(900, 200) == 0
    assert fusion.margin(100, 200) == pytest.approx(0.999**100 / 2)


def test_fused_heads_are_the_averaged_model_and_its_cache_holds_them_alone():
    averaged, fused = fused_pair(tiny_model(tie_word_embeddings=True), GROUPS)
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4
    with torch.no_grad():
        cache = fused(input_ids=tokens(), use_cache=True).past_key_values.layers
    assert [(layer.keys.shape[1], layer.values.shape[1]) for layer in cache] == [(2, 1), (1, 4), (4, 2)]
    attention = fused.model.layers[0].self_attn
    assert attention.key_map == [0, 1, 0, 1, 1, 0, 1, 0] and attention.value_map == [0] * 8


def test_shared_groups_of_one_number_are_a_stock_llama():
    averaged, fused = fused_pair(tiny_model(bias=True), {"key": TWO, "value": TWO})
    assert type(fused) is LlamaForCausalLM and fused.config.num_key_value_heads == 2
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4


def test_fused_heads_are_fused_further(saved):
    averaged, fused = fused_pair(AutoModelForCausalLM.from_pretrained(saved[0]).eval(), AGAIN)
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4
    assert fused.config.key_groups == [[EIGHT], [EIGHT], [[0, 2, 4, 6], [1, 3, 5, 7]]]
    assert fused.config.value_groups == [[EIGHT], [[0, 3, 4, 7], [1, 2, 5, 6]], [EIGHT]]


def test_without_fusion_heads_are_the_means_of_their_groups(tmp_path):
    path, expected = save_tiny(tmp_path, bias=True), tiny_model(bias=True).state_dict()
    for kind, layer, part in itertools.product(GROUPS, range(3), ("weight", "bias")):
        name = f"model.layers.{layer}.self_attn.{fusion.PROJECTIONS[kind]}.{part}"
        heads = expected[name].unflatten(0, (8, 8))
        expected[name] = torch.cat([heads[group].mean(0) for group in GROUPS[kind][layer]])
    pooled, _ = start.averaged(None, path, {"groups": GROUPS, "summary": {"steps_so_far": 4}}, None)
    torch.testing.assert_close(pooled.state_dict(), expected, rtol=1e-6, atol=1e-7)


def test_attention_implementations_agree_step_by_step_too_and_packed_samples_stay_apart(saved):
    path, fused = saved
    expected, cache, steps = all_logits(fused, tokens()), None, []
    for attention in ("eager", "packed"):
        loaded = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention).eval()
        trainee = Trainee(loaded)
        assert max_difference(expected, all_logits(loaded, tokens())) < 1e-4
    with torch.no_grad():
        both = loaded.lm_head(trainee(build_row([Sample(row.tolist()) for row in tokens()], 2)))
        for part in tokens()[:1].split((30, 1, 9), dim=1):
            output = fused(input_ids=part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits[0])
    torch.testing.assert_close(both, torch.cat(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(steps), expected[0], rtol=1e-4, atol=1e-4)


def test_strangers_load_it_with_trust_remote_code(saved, tmp_path):
    """In a process that sees none of this repository."""
    path, fused = saved
    expected = fused.generate(tokens(), max_new_tokens=6, do_sample=False)
    script = f"""import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(path)!r}, trust_remote_code=True)
print(model.generate(torch.tensor({tokens().tolist()}), max_new_tokens=6, do_sample=False).tolist())"""
    environment = os.environ | {"PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    output = subprocess.check_output([sys.executable, "-c", script], cwd=tmp_path, env=environment)
    assert json.loads(output) == expected.tolist()


def test_budgets_of_algorithm_5():
    draw = random.Random(0)
    losses = [1 + draw.random() / 2 for _ in range(32)]
    # as published: 32 layers of 32 heads, a quarter of them
    given = grouping.allocate(losses, [32] * 32, [4, 8, 16], 256)
    assert sum(given) == 256 and set(given) <= {4, 8, 16}
    assert given[losses.index(max(losses))] == 16 and given.count(16) == 1
    rest = sorted((loss, count) for loss, count in zip(losses, given, strict=True) if count < 16)
    assert [count for _, count in rest] == [4, 4] + [8] * 29  # the remaining heads go to the largest losses


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
    losses = random_losses(32, 0)
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
    uneven = fusion.starting_operators(fusion.whole_layers({"key": [4, 8], "value": [4, 8]}), 2)
    uneven = {name: (1.1 if name[0] == "1" else 1) * operator for name, operator in uneven.items()}
    _, metrics = search.choose_groups(uneven, 3, [1, 2, 4], seed=0)
    assert metrics["key"]["heads"] == [2, 4]  # by sums over heads: the mean is larger where there are four


def test_cka_is_as_printed_and_finds_a_rotated_head():
    heads = torch.randn(3, 4, 20, dtype=torch.float64)
    heads[1] = 3 * torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0] @ heads[0]
    matrix = grouping.cka(heads)
    for a, b in itertools.product(range(3), repeat=2):
        x, y = heads[a].T, heads[b].T  # the paper's weights have a column per channel
        norms = (x.T @ x).norm() ** 2 * (y.T @ y).norm() ** 2
        torch.testing.assert_close(matrix[a, b], (x.T @ y).norm() ** 2 / norms.sqrt())
    assert float(matrix[0, 1]) == pytest.approx(1, abs=1e-5) and float(matrix[0, 2]) < 0.9
    assert grouping.redundancy(matrix) == pytest.approx(float(matrix.sum() - 3) / 6)
