"""related/dha: operators, losses and the model of fused heads against their definitions."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from common.cli import UserError
from common.data.rows import Sample
from common.evaluate import cache_bytes_per_token, max_difference
from common.families import geometry
from conftest import ROOT, tiny_model
from dha_models import EIGHT, GROUPS, SECOND, averages, fused_tiny, random_operators, tokens
from related.dha import export, fusion, pool, search, training
from related.dha.modeling import DhaConfig, DhaForCausalLM
from related.dha.training import all_logits


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
        lengths = training.build_row([Sample(tuple(ids)) for ids in tokens().tolist()], 2).lengths
        both = loaded(input_ids=row, position_ids=positions, use_cache=False, lengths=lengths).logits[0]
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
