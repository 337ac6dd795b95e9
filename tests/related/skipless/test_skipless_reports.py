"""Skipless reports: differences of folds, condition numbers, counts of weights."""

from argparse import Namespace

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from common.models import load_config
from conftest import ROOT, tiny_model
from related.skipless import algebra, compare, exactness, report, variants, weights
from related.skipless.exactness import LOGIT_TOLERANCE, relative_difference
from skipless_models import matrices, model_of, tokens


def test_relative_difference_is_over_the_largest_logit_of_the_reference():
    reference = [torch.tensor([1.0, -4.0]), torch.tensor([2.0])]
    logits = [torch.tensor([1.0, -3.0]), torch.tensor([8.0])]
    assert relative_difference(reference, logits) == 6 / 4


def test_rounded_weights_are_those_of_the_dtype_and_compute_in_float64():
    model = model_of()
    rounded = exactness.rounded(model, torch.bfloat16)
    for before, after in zip(model.parameters(), rounded.parameters(), strict=True):
        assert after.dtype == torch.float64 and torch.equal(after, before.bfloat16().double())
    assert model.lm_head.weight.dtype == torch.float64


def test_transplanted_model_has_the_matrices_of_the_stock_one():
    stock = tiny_model(head_dim=6, bias=True).double()
    model = exactness.transplanted(stock, parallel=True)
    source, state = stock.state_dict(), model.state_dict()
    assert model.config.parallel and set(state) < set(source)
    assert all(torch.equal(tensor, source[name]) for name, tensor in state.items())


def test_every_fold_has_a_line_with_its_differences_or_a_reason():
    lines = exactness.every_fold("tiny", model_of(kv_heads=2), tokens(), algebra.MAX_CONDITION)
    assert [line["remove"] for line in lines] == [None, "q", "k", "v", "p"]
    itself, q, k, v, p = lines
    assert itself["float64"] == 0 < itself["float32"] < itself["bfloat16"]
    assert q["gone"] == ["q_proj", "o_proj"] and p["gone"] == ["o_proj"] and p["condition"] is None
    assert q["condition"] > 1 and 0 < q["float64"] < LOGIT_TOLERANCE < q["float32"] < q["bfloat16"]
    assert "square K" in k["refused"] and "square V" in v["refused"]


def test_a_fold_that_is_not_exact_enough_is_refused(monkeypatch):
    model, wrong = model_of(), model_of(seed=1)
    monkeypatch.setattr(exactness, "fold", lambda *arguments: wrong)
    for line in exactness.every_fold("tiny", model, tokens(), algebra.MAX_CONDITION)[1:]:
        assert "expected logits without" in line["refused"]


def test_sweep_gives_every_q_its_condition_number_and_keeps_its_norm(monkeypatch):
    models, whole = [], exactness.fold

    def spy(model, *arguments):
        models.append(model)
        return whole(model, *arguments)

    monkeypatch.setattr(exactness, "fold", spy)
    model = model_of()
    lines = exactness.sweep(model, tokens())
    for line, changed in zip(lines, models, strict=True):
        for before, after in zip(model.model.layers, changed.model.layers, strict=True):
            q, original = after.self_attn.q_proj.weight, before.self_attn.q_proj.weight
            assert float(torch.linalg.cond(q.detach())) == pytest.approx(line["condition"], rel=1e-2)
            assert float(q.norm()) == pytest.approx(float(original.norm()))
    errors = [line["float64"] for line in lines]
    assert [line["condition"] for line in lines] == exactness.SWEEP and errors[-1] > 1e4 * errors[0]


def test_tables_show_differences_savings_and_refusals():
    itself = {"model": "a", "remove": None, "parameters": 200}
    itself |= {"float64": 0, "float32": 2e-7, "bfloat16": 0.03}
    folded = itself | {"remove": "q", "parameters": 150, "float64": 3e-12, "bfloat16": 1.5}
    lines = [itself, folded, *({"model": "a", "remove": letter, "refused": "no"} for letter in "kvp")]
    *_, row, blank, reason = report.exactness_table(lines).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["a", "200", "0 / 2e-07 / 3e-02"]
    assert cells[3:] == ["3e-12 / 2e-07 / over 1, 25%", "refused", "refused", "refused"]
    assert (blank, reason) == ("", "Refused: no.")
    *_, row = report.conditions_table([{"q": 1234.5, "p": 2.0}]).splitlines()
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "0", "1.23e+03", "not square", "not square", "2"]


def test_variants_are_compared_seed_by_seed():
    """Distances of 0.1, 0.4 and 0.1 from the full model: their mean and its standard error."""
    losses = {"full": [1.0, 2.0, 3.0], "without Q and P": [1.1, 2.4, 3.1]}
    *_, row = variants.table(losses, dict.fromkeys(losses, 1234)).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["without Q and P", "1,234", "2.200", "+0.200 ± 0.100"]


@pytest.mark.parametrize(("heads", "expected"), [
    (32, {"MHA": 32, "GQA": 8, "MQA": 1}), (8, {"MHA": 8, "GQA": 2, "MQA": 1}), (9, {"MHA": 9, "MQA": 1}),
    (6, {"MHA": 6, "GQA": 2, "MQA": 1}), (2, {"MHA": 2, "MQA": 1}),
])
def test_random_models_have_kv_heads_that_divide_the_heads(heads, expected):
    assert compare.head_counts(heads) == expected


def test_the_last_line_counts_invertible_matrices():
    """Invertible in float64, if worse conditioned than what a fold inverts by default."""
    conditions = [{"q": 5.0, "p": 2.0}, {"q": 100 * algebra.MAX_CONDITION, "p": float("inf")}]
    expected = "3 of 4 square attention matrices of m invertible, worst condition number inf, P of layer 1"
    assert compare.closing_line("m", conditions, None) == expected
    assert compare.closing_line("m", [{}], None) == "no attention matrix of m is square"


def test_configs_of_the_same_name_are_all_counted(tmp_path):
    for name in ("a", "b", "Qwen2.5-7B"):
        tiny_model().config.save_pretrained(tmp_path / name)
    paths = [str(tmp_path / name / "config.json") for name in "ab"] + [str(tmp_path / "Qwen2.5-7B")]
    table = compare.count_all(Namespace(model="demo", config=paths), tiny_model().config)
    assert list(table)[-3:] == ["config", paths[1], "Qwen2.5-7B"]


def test_weights_of_the_papers_table():
    configs = ROOT / "related" / "skipless" / "configs"
    mistral = weights.count(load_config(str(configs / "mistral-7b.json")))
    assert (mistral.q + mistral.p, mistral.kv) == (33_554_432, 8_388_608)
    assert (mistral.ffn, mistral.embeddings) == (176_160_768, 262_144_000)
    assert (mistral.parallel, mistral.attention) == (False, "GQA")
    assert weights.saving(mistral.total, mistral.without_q_p) == "15%, 1.17x"
    assert mistral.folded == mistral.without_q_p
    config = load_config(str(configs / "pythia-6.9b.json"))
    for vocabulary in (50432, 50400):  # the checkpoint's, and the paper's
        config.vocab_size = vocabulary
        pythia = weights.count(config)
        assert (pythia.q + pythia.p, pythia.kv, pythia.ffn) == (33_554_432, 33_554_432, 134_217_728)
        assert (pythia.parallel, pythia.attention) == (True, "MHA")
        assert weights.saving(pythia.total, pythia.without_q_p) == "16%, 1.19x"
    assert pythia.embeddings == 412_876_800
    assert pythia.folded == pythia.total - 32 * 4096**2


@pytest.mark.parametrize("changes", [
    {}, {"num_key_value_heads": 2}, {"tie_word_embeddings": True}, {"model_type": "qwen3"},
])
def test_counted_weights_are_those_of_the_model(changes):
    model = tiny_model(**changes)
    assert weights.count(model.config).total == matrices(model)


def test_counted_weights_are_those_of_the_model_where_heads_make_up_the_width():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=30, **shape))
    assert weights.count(neox.config).total == matrices(neox)
    for kind in ({}, {"parallel": True}, {"tie_word_embeddings": True}, {"gated": False}):
        model = model_of(**kind)
        counted = weights.count(model.config)
        assert counted.total == matrices(model) and counted.folded == matrices(algebra.fold(model, "q"))
