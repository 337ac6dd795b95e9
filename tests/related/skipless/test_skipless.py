"""Skipless models: their definition, exact folds of Q, K, V and P, what is refused, and the report."""

import copy
import json

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from scipy.stats import norm
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from common.models.load import load_config
from common.run.errors import UserError
from models import save_tiny, tiny_model
from related.skipless import compare, fold
from related.skipless.fold import LOGIT_TOLERANCE, MAX_CONDITION, exact_logits
from runs import run
from skipless_models import HEADS, LAYERS, SIZE, WIDTH, difference, matrices, model_of, tokens
from torchrun import ROOT

pytestmark = pytest.mark.slow
KINDS = [(parallel, kv_heads) for parallel in (False, True) for kv_heads in (HEADS, 2, 1)]
FFNS = [*((*kind, True) for kind in KINDS), (False, HEADS, False), (True, HEADS, False)]  # gated or not


def row_matrices(model, index) -> dict[str, np.ndarray]:
    """A block's matrices as in the paper, for rows: y = x W."""
    names = {"Q": "self_attn.q_proj", "K": "self_attn.k_proj", "V": "self_attn.v_proj",
             "P": "self_attn.o_proj", "G": "mlp.gate_proj", "U": "mlp.up_proj", "O": "mlp.down_proj"}
    state = model.model.layers[index].state_dict()
    weights = {letter: state.get(f"{name}.weight") for letter, name in names.items()}
    return {letter: weight.numpy().T for letter, weight in weights.items() if weight is not None}


def by_definition(model, ids) -> np.ndarray:
    """Logits [T, vocab] of one sequence in numpy, from the paper's Figures 1 and 3. RoPE is complex."""
    config, x, length = model.config, model.model.embed_tokens.weight.detach().numpy()[ids], len(ids)
    theta, half = config.rope_parameters["rope_theta"], SIZE // 2
    rotation = np.exp(1j * np.arange(length)[:, None] * theta ** -(np.arange(0, SIZE, 2) / SIZE))
    for index in range(config.num_hidden_layers):
        w, heads = row_matrices(model, index), []
        for head in range(HEADS):
            kv_head = head * config.num_key_value_heads // HEADS
            mine, shared = (slice(index * SIZE, (index + 1) * SIZE) for index in (head, kv_head))
            q, k, v = (x @ w["Q"])[:, mine], (x @ w["K"])[:, shared], (x @ w["V"])[:, shared]
            q, k = ((rows[:, :half] + 1j * rows[:, half:]) * rotation for rows in (q, k))
            scores = (q @ k.conj().T).real / SIZE**0.5
            scores[np.triu_indices(length, 1)] = -np.inf
            heads.append(softmax(scores, -1) @ v)
        attended = np.concatenate(heads, -1) @ w["P"]
        into = x if config.parallel else attended
        up = into @ w["U"]
        inner = into @ w["G"] * expit(into @ w["G"]) * up if config.gated else up * norm.cdf(up)
        x = inner @ w["O"] + (attended if config.parallel else 0)
    return x @ model.lm_head.weight.detach().numpy().T


@pytest.mark.parametrize(("parallel", "kv_heads", "gated"), FFNS)
def test_model_computes_its_definition(parallel, kv_heads, gated):
    activation = "silu" if gated else "gelu"
    model = model_of(parallel, kv_heads, attention_bias=False, mlp_bias=False, gated=gated,
                     hidden_act=activation)
    ids = tokens()[0]
    expected = by_definition(model, ids.numpy())
    logits = exact_logits(model, ids[None])[0].numpy()
    # transformers computes cosines in float32
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("letter", "qkv")
def test_fold_writes_table_1(letter):
    model = model_of(attention_bias=False, mlp_bias=False)
    folded = fold.fold(model, letter)
    embedding = model.model.embed_tokens.weight.detach().numpy()
    for index in range(LAYERS):
        old, new = row_matrices(model, index), row_matrices(folded, index)
        chosen = old[letter.upper()]
        before, after = embedding, folded.model.embed_tokens.weight.detach().numpy()  # the first block's O
        if index:
            before, after = (row_matrices(either, index - 1)["O"] for either in (model, folded))
        assert np.allclose(after, before @ chosen)
        for other in set("QKV") - {letter.upper()}:
            assert np.allclose(new[other], np.linalg.inv(chosen) @ old[other])
        assert np.allclose(new["G"], old["P"] @ old["G"]) and np.allclose(new["U"], old["P"] @ old["U"])
        assert set(new) == set("QKVGUO") - {letter.upper()}
    assert torch.equal(folded.lm_head.weight, model.lm_head.weight)
    assert np.allclose(row_matrices(folded, LAYERS - 1)["O"], row_matrices(model, LAYERS - 1)["O"])


@pytest.mark.parametrize("bias", [(False, False), (True, True)])
@pytest.mark.parametrize(("parallel", "kv_heads", "gated"), FFNS)
def test_every_fold_is_exact_and_smaller_or_refused(parallel, kv_heads, gated, bias):
    model = model_of(parallel, kv_heads, attention_bias=bias[0], mlp_bias=bias[1], gated=gated)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for letter in "qkvp":
        if letter in "kv" and kv_heads < HEADS:
            with pytest.raises(UserError, match=f"square {letter.upper()} to remove, found {kv_heads} heads"):
                fold.fold(model, letter)
            continue
        folded = fold.fold(model, letter)
        gone = [fold.PROJECTIONS[letter], *([] if parallel or letter == "p" else ["o_proj"])]
        assert not any(name in key for name in gone for key in folded.state_dict())
        assert matrices(folded) == matrices(model) - LAYERS * len(gone) * WIDTH**2
        assert difference(model, folded) < LOGIT_TOLERANCE
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_parallel_blocks_lose_both_q_and_p_only_where_one_undoes_the_other():
    model = model_of(parallel=True, attention_bias=False)
    folded = fold.fold(model, "q")
    assert np.abs(row_matrices(folded, 0)["P"] - np.eye(WIDTH)).max() > 0.1
    with torch.no_grad():
        for layer, following in zip(model.model.layers, model.model.layers[1:], strict=False):
            following.self_attn.q_proj.weight.copy_(torch.linalg.inv(layer.self_attn.o_proj.weight))
    folded = fold.fold(model, "q")
    assert difference(model, folded) < LOGIT_TOLERANCE
    for index in range(LAYERS - 1):
        assert np.allclose(row_matrices(folded, index)["P"], np.eye(WIDTH))


def spoil(model, layer, projection, condition):
    """Give one matrix this condition number; inf makes it singular."""
    weight = model.model.layers[layer].self_attn.get_submodule(projection).weight
    left, values, right = torch.linalg.svd(weight.detach())
    values[-1] = 0.0 if condition == np.inf else values[0] / condition
    with torch.no_grad():
        weight.copy_(left @ values.diag() @ right)


@pytest.mark.parametrize(("parallel", "letter", "condition"), [
    (False, "q", 3e7), (False, "v", np.inf), (True, "p", np.inf)])
def test_singular_and_badly_conditioned_matrices_are_refused_by_layer(parallel, letter, condition):
    model = model_of(parallel)
    spoil(model, 1, fold.PROJECTIONS[letter], condition)
    with pytest.raises(UserError, match=f"layer 1: expected {letter.upper()} of condition number at most 1e"):
        fold.fold(model, letter)
    assert difference(model, fold.fold(model, "k")) < LOGIT_TOLERANCE


def test_a_singular_p_goes_from_serial_blocks():
    model = model_of()
    spoil(model, 1, "o_proj", np.inf)
    assert difference(model, fold.fold(model, "p")) < LOGIT_TOLERANCE
    assert difference(model, fold.fold(model, "q")) < LOGIT_TOLERANCE


def test_tied_embeddings_come_apart_where_one_of_them_changes():
    model = model_of(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for letter, tied in (("q", False), ("p", True)):
        folded = fold.fold(model, letter)
        assert folded.config.tie_word_embeddings == tied and difference(model, folded) < LOGIT_TOLERANCE


def test_condition_numbers_are_those_of_numpy():
    model = model_of(kv_heads=2)
    attention = copy.deepcopy(model).float().model.layers[0].self_attn
    conditions = fold.condition_numbers(attention)
    assert set(conditions) == {"q", "p"}  # K and V are not square
    expected = np.linalg.cond(attention.q_proj.weight.detach().double().numpy())
    assert conditions["q"] == pytest.approx(expected, rel=1e-12)
    assert fold.condition_numbers(fold.fold(model, "q").model.layers[0].self_attn) == {}


def test_relative_difference_is_over_the_largest_logit_of_the_reference():
    reference = [torch.tensor([1.0, -4.0]), torch.tensor([2.0])]
    assert fold.relative_difference(reference, [torch.tensor([1.0, -3.0]), torch.tensor([8.0])]) == 6 / 4


def test_the_last_line_counts_invertible_matrices():
    """Invertible in float64, if worse conditioned than what a fold inverts by default."""
    conditions = [{"q": 5.0, "p": 2.0}, {"q": 100 * MAX_CONDITION, "p": float("inf")}]
    expected = "3 of 4 square attention matrices of m invertible, worst condition number inf, P of layer 1"
    assert compare.closing_line("m", conditions, None) == expected


@pytest.mark.parametrize(("name", "counts", "saved"), [
    ("mistral-7b", (33_554_432, 8_388_608, 176_160_768, 262_144_000), "| 15%, 1.17x | 15%, 1.17x |"),
    ("pythia-6.9b", (33_554_432, 33_554_432, 134_217_728, 413_138_944), "| 16%, 1.19x | 8%, 1.08x |"),
])  # the paper's Pythia has 32 tokens less
def test_weights_of_the_papers_table(name, counts, saved):
    counted = compare.count(load_config(str(ROOT / "related" / "skipless" / "configs" / f"{name}.json")))
    assert (counted["q"] + counted["p"], counted["kv"], counted["ffn"], counted["embeddings"]) == counts
    assert saved in " ".join(compare.weights_table({name: counted}).split())
    assert counted["without_q_p"] == counted["total"] - 32 * 2 * 4096**2


def test_counted_weights_are_those_of_the_model():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=30, **shape))
    for stock in (tiny_model(num_key_value_heads=2), tiny_model(model_type="qwen3"), neox):
        assert compare.count(stock.config)["total"] == matrices(stock)
    assert compare.count(tiny_model(num_key_value_heads=1).config)["attention"] == "MQA"
    for kind in ({}, {"parallel": True}, {"tie_word_embeddings": True}, {"gated": False}):
        model = model_of(**kind)
        counted = compare.count(model.config)
        assert counted["total"] == matrices(model)
        assert counted["folded"] == matrices(fold.fold(model, "q"))


def test_random_real_and_trained_models_are_folded_and_reported(inputs, tmp_path):
    home, model = tmp_path / "run", save_tiny(tmp_path / "model", head_dim=6)
    text = ["--run", home, "--text", inputs["text"], "--length", 32]
    for kind in ([], ["--parallel"]):
        run("related/skipless/train.py", *text, "--model", model, "--heldout", inputs["text"], "--steps", 3,
            "--batch", 2, "--warmup", 1, *kind)
    assert "40 folds exact" in run("related/skipless/compare.py", *text, "--model", model).stdout
    lines = json.loads((home / "compare" / "stage.json").read_text())["exactness"]
    refused = [line["remove"] for line in lines if "refused" in line]
    assert len(refused) == 8 and {*refused} == {"k", "v"}  # of models with fewer key/value heads
    assert max(line["float64"] for line in lines if "float64" in line) < LOGIT_TOLERANCE

    run("related/skipless/fold.py", *text, "--remove", "v", "--dtype", "bfloat16")
    source, folded = (AutoModelForCausalLM.from_pretrained(home / name)
                      for name in ("serial", "serial-without-v"))
    assert folded.dtype == torch.bfloat16 and folded.num_parameters() < source.num_parameters()
