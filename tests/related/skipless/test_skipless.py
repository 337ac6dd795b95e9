"""Skipless models: their definition, exact folds, what is refused, the report, and how they are trained."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import sem
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from common.data.documents import EVALUATION
from common.data.text import load_tokens
from common.models.load import load_config, load_model, load_tokenizer
from common.run.errors import UserError
from common.training.engine import STOPPED
from common.training.packing import batch_indices
from models import save_tiny, tiny_model
from related.skipless import compare, fold, train
from related.skipless.fold import LOGIT_TOLERANCE, MAX_CONDITION, exact_logits
from related.skipless.modeling import SkiplessConfig
from runs import expect_error, interrupt, read, run
from torchrun import ROOT

pytestmark = pytest.mark.slow
TRAIN = "related/skipless/train.py"
LAYERS, HEADS, SIZE = 3, 4, 8
WIDTH = HEADS * SIZE
KINDS = [(parallel, *ffn) for parallel in (False, True)  # key/value heads, a gated FFN or a plain one
         for ffn in ((HEADS, True), (2, True), (1, True), (HEADS, False))]
TOKENS = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))


def model_of(parallel=False, kv_heads=HEADS, **changes):
    """A float64 model of Gaussian weights and, where it has them, biases."""
    shape = {"vocab_size": 50, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": SIZE,
             "max_position_embeddings": 64, "parallel": parallel, "bos_token_id": None, "eos_token_id": None,
             "attention_bias": True, "mlp_bias": True}
    return compare.random_model(SkiplessConfig(**(shape | changes)))


def matrices(model) -> int:
    """The number of weights without biases."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)


def difference(first, second) -> float:
    return fold.relative_difference(exact_logits(first, TOKENS), exact_logits(second, TOKENS))


def row_matrices(model, index) -> dict[str, torch.Tensor]:
    """A block's matrices as in the paper, for rows: y = x W."""
    names = {"Q": "self_attn.q_proj", "K": "self_attn.k_proj", "V": "self_attn.v_proj",
             "P": "self_attn.o_proj", "G": "mlp.gate_proj", "U": "mlp.up_proj", "O": "mlp.down_proj"}
    state = model.model.layers[index].state_dict()
    return {letter: state[f"{name}.weight"].T for letter, name in names.items() if f"{name}.weight" in state}


@torch.no_grad()
def by_definition(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits [1, T, vocab] of one sequence, from the paper's Figures 1 and 3."""
    x = model.model.embed_tokens(ids)
    turns = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
    for index in range(LAYERS):
        w = row_matrices(model, index)
        q, k, v = ((x @ w[letter]).unflatten(-1, (-1, SIZE)).transpose(1, 2) for letter in "QKV")
        q, k = apply_rotary_pos_emb(q, k, *turns)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = mixed.transpose(1, 2).flatten(2) @ w["P"]
        into = x if model.config.parallel else attended
        inner = F.silu(into @ w["G"]) * (into @ w["U"]) if model.config.gated else F.gelu(into @ w["U"])
        x = inner @ w["O"] + (attended if model.config.parallel else 0)
    return x @ model.lm_head.weight.T


@pytest.mark.parametrize(("parallel", "kv_heads", "gated"), KINDS)
def test_model_computes_its_definition(parallel, kv_heads, gated):
    model = model_of(parallel, kv_heads, attention_bias=False, mlp_bias=False, gated=gated,
                     hidden_act="silu" if gated else "gelu")
    torch.testing.assert_close(exact_logits(model, TOKENS[:1])[0], by_definition(model, TOKENS[:1])[0])


@pytest.mark.parametrize("letter", "qkv")
@torch.no_grad()
def test_fold_writes_table_1(letter):
    model = model_of(attention_bias=False, mlp_bias=False)
    folded, letter = fold.fold(model, letter), letter.upper()
    old, new = ([row_matrices(either, index) for index in range(LAYERS)] for either in (model, folded))
    writers, written = ([either.model.embed_tokens.weight, *(block["O"] for block in blocks)]
                        for either, blocks in ((model, old), (folded, new)))  # the embedding is O of block -1
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        expected = {name: before[letter].inverse() @ before[name] for name in {*"QKV"} - {letter}}
        expected |= {name: before["P"] @ before[name] for name in "GU"} | {"O": written[index + 1]}
        torch.testing.assert_close(after, expected)
        torch.testing.assert_close(written[index], writers[index] @ before[letter])
    torch.testing.assert_close(written[-1], writers[-1])
    assert torch.equal(folded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize(("parallel", "kv_heads", "gated"), KINDS)
def test_every_fold_is_exact_and_smaller_or_refused(parallel, kv_heads, gated, mlp_bias):
    model = model_of(parallel, kv_heads, mlp_bias=mlp_bias, gated=gated)
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


def spoil(model, projection, condition):
    """Give one matrix of layer 1 this condition number; inf makes it singular."""
    weight = model.model.layers[1].self_attn.get_submodule(projection).weight
    left, values, right = torch.linalg.svd(weight.detach())
    values[-1] = values[0] / condition
    with torch.no_grad():
        weight.copy_(left @ values.diag() @ right)


@pytest.mark.parametrize(("parallel", "letter", "condition"), [
    (False, "q", 3e7), (False, "v", math.inf), (True, "p", math.inf), (False, "p", math.inf)])
def test_matrices_that_are_inverted_are_refused_by_layer_where_badly_conditioned(parallel, letter, condition):
    model = model_of(parallel)
    spoil(model, fold.PROJECTIONS[letter], condition)
    if parallel or letter != "p":  # P of serial blocks is just multiplied into the FFN
        expected = f"layer 1: expected {letter.upper()} of condition number at most 1e"
        with pytest.raises(UserError, match=expected):
            fold.fold(model, letter)
    else:
        assert difference(model, fold.fold(model, letter)) < LOGIT_TOLERANCE
    assert difference(model, fold.fold(model, "k")) < LOGIT_TOLERANCE


def test_tied_embeddings_come_apart_where_one_of_them_changes():
    model = model_of(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for letter, tied in (("q", False), ("p", True)):
        folded = fold.fold(model, letter)
        assert folded.config.tie_word_embeddings == tied and difference(model, folded) < LOGIT_TOLERANCE


def test_condition_numbers_are_those_of_numpy():
    attention = model_of(kv_heads=2).float().model.layers[0].self_attn
    q, p = (linear.weight.detach().double().numpy() for linear in (attention.q_proj, attention.o_proj))
    expected = {"q": np.linalg.cond(q), "p": np.linalg.cond(p)}  # K and V are not square
    assert fold.condition_numbers(attention) == pytest.approx(expected, rel=1e-12)


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
    models = [model_of(**kind) for kind in
              ({}, {"parallel": True}, {"tie_word_embeddings": True}, {"gated": False})]
    for model in (tiny_model(num_key_value_heads=2), tiny_model(model_type="qwen3"), *models):
        assert compare.count(model.config)["total"] == matrices(model)
    for model in models:
        assert compare.count(model.config)["folded"] == matrices(fold.fold(model, "q"))


@torch.no_grad()
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("without", [None, "q_proj", "k_proj", "v_proj"])
def test_training_starts_near_the_identity(without, parallel):
    """Sharp attention reads the token itself, and the open gate passes it on: what is left is x V P.

    Sharp is q k = SHARPNESS^2 |x|^2 for a token and itself, in the subspace of each head.
    """
    removed = [without, "o_proj"] if without else []
    source = tiny_model(num_attention_heads=4, num_key_value_heads=4, head_dim=12).config
    config = train.skipless_config(source, parallel, mlp_bias=True, removed=removed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
    train.initialise(model, tokens, seed=0)
    states = model(tokens, output_hidden_states=True).hidden_states
    for before, after, layer in zip(states, states[1:], model.model.layers, strict=False):
        attention = layer.self_attn
        assert max(fold.condition_numbers(attention).values()) < 1.001
        scores = attention.q_proj(before) * attention.k_proj(before)
        expected = train.SHARPNESS**2 * before.square().sum(-1)
        torch.testing.assert_close(scores.sum(-1), expected, rtol=1e-4, atol=1e-4)
        if not parallel:
            assert float(after.square().mean()) == pytest.approx(1, rel=1e-3)
            rotated = attention.o_proj(attention.v_proj(before))
            similarity = F.cosine_similarity(rotated.flatten(), after.flatten(), dim=0)
            assert similarity > 0.7  # in random directions it is 0


def flags(run_directory, inputs, *changes) -> list:
    """Three steps of two sequences of 16 tokens."""
    return ["--run", run_directory, "--model", inputs["model"], "--text", inputs["text"], "--heldout",
            inputs["text"], "--steps", 3, "--batch", 2, "--length", 16, "--warmup", 1, *changes]


def test_training_learns_every_next_token(inputs, tmp_path):
    """The first loss is the cross-entropy of all next tokens of the batch, before any step."""
    run(TRAIN, *flags(tmp_path, inputs, "--heldout", "demo"))
    tokenizer = load_tokenizer(inputs["model"])
    ids, _ = load_tokens(inputs["text"], tokenizer, 6, 16)
    config = train.skipless_config(load_config(inputs["model"]), False, mlp_bias=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    train.initialise(model, ids[:2], seed=0)
    batch = ids[batch_indices(0, 2, 6, 0)]
    first = json.loads((tmp_path / "serial" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(float(model(batch, labels=batch).loss.detach()), rel=1e-6)
    batch, _ = load_tokens("demo", tokenizer, 32, 16, EVALUATION)
    loss = load_model(str(tmp_path / "serial"))(batch, labels=batch).loss.detach()
    summary = read(tmp_path / "serial" / "stage.json")["summary"]
    assert summary["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)


def test_a_stopped_training_resumes_to_the_same_weights_with_the_same_settings_alone(inputs, tmp_path):
    run(TRAIN, *flags(tmp_path / "whole", inputs))
    with pytest.MonkeyPatch.context() as patched:
        interrupt(patched, 1)
        run(TRAIN, *flags(tmp_path / "run", inputs), code=STOPPED)
    expect_error("lr 0.001 -> 0.01", TRAIN, *flags(tmp_path / "run", inputs, "--lr", 0.01))
    assert "after step 2" in run(TRAIN, *flags(tmp_path / "run", inputs)).stdout
    whole, resumed = (load_model(str(tmp_path / name / "serial")) for name in ("whole", "run"))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_all_variants_are_trained_and_compared_seed_by_seed(inputs, tmp_path):
    """In the table, by the mean distance from the full model of each seed, and its standard error."""
    model, home = save_tiny(tmp_path / "model", head_dim=6), tmp_path / "run"
    run(TRAIN, *flags(home, inputs, "--model", model, "--variants", 2))
    summary = read(home / "variants" / "stage.json")["summary"]
    *_, full, _, _, without_v = (home / "variants" / "variants.md").read_text().splitlines()
    for letter, title in train.VARIANTS.items():
        removed = {fold.PROJECTIONS[letter], "o_proj"} if letter else set()
        for seed in (0, 1):
            path = train.model_path(home / f"seed-{seed}", False, letter)
            trained = AutoModelForCausalLM.from_pretrained(path)
            assert set(trained.config.removed) == removed
            assert trained.num_parameters() == summary["parameters"][title]
            perplexity = read(Path(path, "stage.json"))["summary"]["perplexity"]
            assert summary["losses"][title][seed] == pytest.approx(math.log(perplexity))
        assert len(set(summary["losses"][title])) == 2  # another seed is another training
    losses = torch.tensor(list(summary["losses"].values()), dtype=torch.float64)
    apart = losses[-1] - losses[0]
    assert "+" not in full and f"| {apart.mean():+.3f} ± {sem(apart):.3f} |" in without_v


def test_random_real_and_trained_models_are_folded_and_reported(inputs, tmp_path):
    home, model = tmp_path / "run", save_tiny(tmp_path / "model", head_dim=6)
    text = ["--run", home, "--text", inputs["text"], "--length", 32]
    for kind in ([], ["--parallel"]):
        run(TRAIN, *flags(home, inputs, "--model", model, *kind))
    output = run("related/skipless/compare.py", *text, "--model", model).stdout
    assert "40 folds exact" in output and "12 of 12 square attention matrices" in output
    lines = read(home / "compare" / "stage.json")["exactness"]
    refused = [line["remove"] for line in lines if "refused" in line]
    assert len(refused) == 8 and {*refused} == {"k", "v"}  # of models with fewer key/value heads
    assert max(line["float64"] for line in lines if "float64" in line) < LOGIT_TOLERANCE

    run("related/skipless/fold.py", *text, "--remove", "v", "--dtype", "bfloat16")
    source, folded = (AutoModelForCausalLM.from_pretrained(home / name)
                      for name in ("serial", "serial-without-v"))
    assert folded.dtype == torch.bfloat16 and folded.num_parameters() < source.num_parameters()
