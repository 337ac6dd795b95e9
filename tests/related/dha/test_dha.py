"""related/dha: operators, losses and the model of fused heads against their definitions."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from common.data.rows import Sample
from common.evaluation.evaluate import cache_bytes_per_token
from common.models.equivalence import max_difference
from common.models.families import geometry
from common.training.attention import Trainee
from common.training.packing import build_row
from dha_models import EIGHT, GROUPS, HALVES, random_operators, tokens
from models import save_tiny, tiny_model
from related.dha import fusion, start
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
    first = fusion.starting_operators(whole, 8)
    same = fusion.with_operators(make(), {name: torch.nn.Parameter(first[name]) for name in first}, whole)
    assert same.state_dict().keys() == source.state_dict().keys()  # which operators are not among
    assert max_difference(expected, all_logits(same, tokens())) < 1e-5
    for name in ("2_key", "2_value"):  # one factor of one head makes a difference
        operators = fusion.starting_operators(whole, 8)
        operators[name][0, 0, 1, 0] = 0.5
        other = fusion.with_operators(make(), operators, whole)
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


def test_fusion_loss_is_equation_7_in_the_scale_of_algorithm_3():
    operators, total = random_operators(), 0.0
    for operator in operators.values():  # Algorithm 3 divides the sum over pairs by H g D (g - 1) / 2
        groups, size, _, width = operator.shape
        losses = fusion.pair_losses(operator)
        assert losses.shape == (groups, size, size)
        for group, h, other in itertools.product(range(groups), range(size), range(size)):
            squares = (operator[group, h] - operator[group, other]).square()
            assert float(losses[group, h, other]) == pytest.approx(float(squares.mean()))
            if h < other:
                total += float(squares.sum()) / (8 * size * width * (size - 1) / 2)
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
    assert cache_bytes_per_token(fused, tokens()[0]) == (7 + 7) * 8 * 4
    attention = fused.model.layers[0].self_attn
    assert attention.key_map == [0, 1, 0, 1, 1, 0, 1, 0] and attention.value_map == [0] * 8


def test_shared_groups_of_one_number_are_a_stock_llama():
    averaged, fused = fused_pair(tiny_model(bias=True), {"key": TWO, "value": TWO})
    assert type(fused) is LlamaForCausalLM and geometry(fused.config).kv_heads == 2
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
