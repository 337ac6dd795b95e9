"""The skipless model is what its definition says, and loses Q, K, V or P without changing; what cannot is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from common.cli import UserError
from common.models import load_config
from conftest import ROOT, run, save_tiny, tiny_model
from related.skipless import algebra, weights
from related.skipless.fold import TOLERANCE, exact_logits, relative_difference
from related.skipless.modeling import SkiplessConfig
from related.skipless.train import initialise, skipless_config

LAYERS, HEADS, SIZE = 3, 4, 8
WIDTH = HEADS * SIZE
KINDS = [(parallel, kv_heads) for parallel in (False, True) for kv_heads in (HEADS, 2, 1)]


def model_of(parallel=False, kv_heads=HEADS, seed=0, **changes):
    """A float64 model of Gaussian weights and, where it has them, biases."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 50, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
             "num_key_value_heads": kv_heads, "head_dim": SIZE, "max_position_embeddings": 64, "parallel": parallel,
             "bos_token_id": None, "eos_token_id": None, "attention_bias": True, "mlp_bias": True}
    model = AutoModelForCausalLM.from_config(SkiplessConfig(**(shape | changes)), dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.0 if parameter.ndim == 1 else 1.5 * parameter.shape[1] ** -0.5)
    return model


def tokens(seed=1):
    return torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(seed))


def difference(first, second) -> float:
    return relative_difference(exact_logits(first, tokens()), exact_logits(second, tokens()))


def row_matrices(model, index) -> dict[str, np.ndarray]:
    """A block's matrices as in the paper, for rows: y = x W."""
    layer = model.model.layers[index]
    names = {"Q": "self_attn.q_proj", "K": "self_attn.k_proj", "V": "self_attn.v_proj", "P": "self_attn.o_proj",
             "G": "mlp.gate_proj", "U": "mlp.up_proj", "O": "mlp.down_proj"}
    modules = {letter: layer.get_submodule(name) for letter, name in names.items()}
    return {letter: module.weight.detach().numpy().T for letter, module in modules.items() if hasattr(module, "weight")}


def by_definition(model, ids) -> np.ndarray:
    """Logits [T, vocab] of one sequence, in numpy, from the paper's Figures 1 and 3: no biases, RoPE as complex numbers."""
    config = model.config
    x = model.model.embed_tokens.weight.detach().numpy()[ids]
    length = len(ids)
    # angles as transformers has them: computed in float32
    frequencies = (1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, SIZE, 2).float() / SIZE)).numpy()
    angles = (np.arange(length, dtype=np.float32)[:, None] * frequencies).astype(np.float32)
    turn = np.cos(angles).astype(np.float64) + 1j * np.sin(angles).astype(np.float64)

    def turned(rows):  # [T, d] -> complex [T, d/2], after RoPE
        return (rows[:, : SIZE // 2] + 1j * rows[:, SIZE // 2 :]) * turn

    for index in range(config.num_hidden_layers):
        w = row_matrices(model, index)
        heads = []
        for head in range(HEADS):
            own, shared = slice(head * SIZE, (head + 1) * SIZE), head * config.num_key_value_heads // HEADS
            shared = slice(shared * SIZE, (shared + 1) * SIZE)
            q, k, v = turned((x @ w["Q"])[:, own]), turned((x @ w["K"])[:, shared]), (x @ w["V"])[:, shared]
            scores = (q @ k.conj().T).real / SIZE**0.5
            scores[np.triu_indices(length, 1)] = -np.inf
            attention = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(attention / attention.sum(-1, keepdims=True) @ v)
        attended = np.concatenate(heads, -1) @ w["P"]
        into = x if config.parallel else attended
        gate = into @ w["G"]
        out = (gate / (1 + np.exp(-gate)) * (into @ w["U"])) @ w["O"]
        x = attended + out if config.parallel else out
    return x @ model.lm_head.weight.detach().numpy().T


@pytest.mark.parametrize(("parallel", "kv_heads"), KINDS)
def test_model_is_its_definition(parallel, kv_heads):
    model = model_of(parallel, kv_heads, attention_bias=False, mlp_bias=False)
    ids = tokens()[0]
    expected = by_definition(model, ids.numpy())
    found = exact_logits(model, ids[None])[0].numpy()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()  # cosines in float32


@pytest.mark.parametrize("letter", "qkv")
def test_fold_writes_table_1(letter):
    model = model_of(attention_bias=False, mlp_bias=False)
    folded = algebra.fold(model, letter)
    embedding = model.model.embed_tokens.weight.detach().numpy()
    for index in range(LAYERS):
        old, new = row_matrices(model, index), row_matrices(folded, index)
        chosen = old[letter.upper()]
        before = row_matrices(model, index - 1)["O"] if index else embedding  # the embedding is the first block's O
        after = row_matrices(folded, index - 1)["O"] if index else folded.model.embed_tokens.weight.detach().numpy()
        assert np.allclose(after, before @ chosen)
        for other in set("QKV") - {letter.upper()}:
            assert np.allclose(new[other], np.linalg.inv(chosen) @ old[other])
        assert np.allclose(new["G"], old["P"] @ old["G"]) and np.allclose(new["U"], old["P"] @ old["U"])
        assert set(new) == set("QKVGUO") - {letter.upper()}
    assert torch.equal(folded.lm_head.weight, model.lm_head.weight)
    assert np.allclose(row_matrices(folded, LAYERS - 1)["O"], row_matrices(model, LAYERS - 1)["O"])


@pytest.mark.parametrize("bias", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("parallel", "kv_heads"), KINDS)
def test_every_fold_is_exact_and_smaller_or_refused(parallel, kv_heads, bias):
    model = model_of(parallel, kv_heads, attention_bias=bias[0], mlp_bias=bias[1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for letter in "qkvp":
        if letter in "kv" and kv_heads < HEADS:
            with pytest.raises(UserError, match=f"square {letter.upper()}.*{WIDTH} x {kv_heads * SIZE}.*{kv_heads} key/value heads"):
                algebra.fold(model, letter)
            continue
        folded = algebra.fold(model, letter)
        gone = folded.config.removed
        assert len(gone) == (1 if parallel or letter == "p" else 2) and algebra.PROJECTIONS[letter] in gone
        assert not any(name in key for name in gone for key in folded.state_dict())
        lost = LAYERS * len(gone) * WIDTH**2
        biases = sum(p.numel() for p in folded.parameters() if p.ndim == 1) - sum(p.numel() for p in model.parameters() if p.ndim == 1)
        assert folded.num_parameters() == model.num_parameters() - lost + biases
        assert difference(model, folded) < TOLERANCE
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj",
                                  "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"])
def test_a_matrix_left_as_it_was_is_noticed(parallel, name):
    model = model_of(parallel)
    folded = algebra.fold(model, "q")
    with torch.no_grad():
        folded.get_submodule(name).weight.copy_(model.get_submodule(name).weight)
    assert difference(model, folded) > 1e-3


def test_parallel_blocks_lose_both_q_and_p_only_where_one_undoes_the_other():
    model = model_of(parallel=True, attention_bias=False)
    folded = algebra.fold(model, "q")
    assert np.abs(row_matrices(folded, 0)["P"] - np.eye(WIDTH)).max() > 0.1
    with torch.no_grad():
        for layer, following in zip(model.model.layers, model.model.layers[1:], strict=False):
            following.self_attn.q_proj.weight.copy_(torch.linalg.inv(layer.self_attn.o_proj.weight))
    folded = algebra.fold(model, "q")
    for index in range(LAYERS - 1):
        assert np.allclose(row_matrices(folded, index)["P"], np.eye(WIDTH))


def spoil(model, layer, projection, condition):
    """Give one matrix that condition number; inf makes it singular."""
    weight = model.model.layers[layer].self_attn.get_submodule(projection).weight
    left, values, right = torch.linalg.svd(weight.detach())
    values[-1] = 0.0 if condition == np.inf else values[0] / condition
    with torch.no_grad():
        weight.copy_(left @ values.diag() @ right)


@pytest.mark.parametrize(("parallel", "letter"), [(False, "q"), (False, "k"), (False, "v"), (True, "q"), (True, "p")])
def test_singular_and_badly_conditioned_matrices_are_refused_by_layer(parallel, letter):
    for condition, said in ((3e7, r"3\.0e\+07"), (np.inf, "singular")):
        model = model_of(parallel)
        spoil(model, 1, algebra.PROJECTIONS[letter], condition)
        with pytest.raises(UserError, match=rf"layer 1: expected {letter.upper()} of condition number at most 1e\+05, found .*{said}"):
            algebra.fold(model, letter)
        for other in set("qkv") - {letter}:
            assert difference(model, algebra.fold(model, other)) < TOLERANCE


def test_a_singular_p_goes_from_serial_blocks():
    model = model_of()
    spoil(model, 1, "o_proj", np.inf)
    assert difference(model, algebra.fold(model, "p")) < TOLERANCE
    assert difference(model, algebra.fold(model, "q")) < TOLERANCE


def test_heads_wider_than_the_model_are_refused():
    with pytest.raises(UserError, match=f"square Q to remove, found {WIDTH} x {2 * WIDTH}"):
        algebra.fold(model_of(head_dim=2 * SIZE), "q")


def test_tied_embeddings_come_apart_where_one_of_them_changes():
    model = model_of(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for letter, tied in (("q", False), ("p", True)):
        folded = algebra.fold(model, letter)
        assert folded.config.tie_word_embeddings == tied and difference(model, folded) < TOLERANCE


def test_condition_numbers_are_numpys():
    model = model_of(kv_heads=2)
    attention = model.model.layers[0].self_attn
    found = algebra.condition_numbers(attention)
    assert set(found) == {"q", "p"}  # K and V are not square
    assert found["q"] == pytest.approx(np.linalg.cond(attention.q_proj.weight.detach().numpy()))
    assert set(algebra.condition_numbers(algebra.fold(model, "q").model.layers[0].self_attn)) == set()


@pytest.mark.parametrize("parallel", [False, True])
def test_folded_checkpoint_loads_by_auto_class_and_generates_with_a_cache(parallel, tmp_path):
    folded = algebra.fold(model_of(parallel, kv_heads=2), "q")
    folded.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert not any("q_proj" in key for key in file.keys())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert difference(folded, loaded) == 0
    prompt = tokens()[:1, :5]
    with_cache, without = (loaded.generate(prompt, max_new_tokens=10, do_sample=False, use_cache=cached) for cached in (True, False))
    assert torch.equal(with_cache, without) and with_cache.shape == (1, 15)


@pytest.mark.parametrize("parallel", [False, True])
def test_training_starts_near_the_identity(parallel):
    model = AutoModelForCausalLM.from_config(skipless_config(model_of().config, parallel, mlp_bias=True), dtype=torch.float32)
    ids = tokens()
    initialise(model, ids, seed=0)
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
    assert float(hidden.square().mean()) == pytest.approx(1, rel=1e-3)
    for layer in model.model.layers:
        assert max(algebra.condition_numbers(layer.self_attn).values()) < 1.001
        assert torch.equal(layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight)


def test_weights_of_the_papers_table():
    configs = ROOT / "related" / "skipless" / "configs"
    mistral = weights.count(load_config(str(configs / "mistral-7b.json")))
    assert (mistral.q + mistral.p, mistral.kv, mistral.ffn, mistral.embeddings) == (33_554_432, 8_388_608, 176_160_768, 262_144_000)
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


def matrices(model) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2)


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}, {"tie_word_embeddings": True}, {"model_type": "qwen3"}])
def test_counted_weights_are_those_of_the_model(changes):
    model = tiny_model(**changes)
    assert weights.count(model.config).total == matrices(model)


def test_counted_weights_are_those_of_the_model_where_heads_make_up_the_width():
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=30))
    assert weights.count(neox.config).total == matrices(neox)
    for kind in ({}, {"parallel": True}, {"tie_word_embeddings": True}):
        model = model_of(**kind)
        found = weights.count(model.config)
        assert found.total == matrices(model) and found.folded == matrices(algebra.fold(model, "q"))


def test_one_command_then_a_fold_of_its_models(tmp_path, inputs):
    model, home = save_tiny(tmp_path / "model", head_dim=6), tmp_path / "run"
    text = ["--text", inputs["text"], "--heldout", inputs["text"], "--length", 32]
    training = ["--steps", 3, "--batch", 2, "--warmup", 1]
    done = run("related/skipless/compare.py", "--run", home, "--model", model, "--shape", model, *text, *training)
    found = json.loads((home / "compare.json").read_text())
    lines = [line for line in found["exactness"] if line["remove"]]
    assert "32 folds exact" in done.stdout
    assert len(lines) == 10 * 4 and sum("refused" in line for line in lines) == 8
    assert max(line["float64"] for line in lines if "float64" in line) < TOLERANCE
    assert len(found["conditions"]) == 3 and set(found["conditions"][0]) == set("qkvp")
    assert found["trained"]["serial"]["before"] != found["trained"]["serial"]["after"]
    errors = [line["float64"] for line in found["sweep"]]
    assert errors[-1] > 1e4 * errors[0]
    assert "trained parallel" in (home / "compare.md").read_text()

    fold = ["--text", inputs["text"], "--length", 32]
    done = run("related/skipless/fold.py", "--run", home, "--remove", "v", "--dtype", "bfloat16", *fold)
    assert "v_proj, o_proj removed" in done.stdout
    source, folded = (AutoModelForCausalLM.from_pretrained(home / name) for name in ("serial", "serial-without-v"))
    made = json.loads((home / "serial-without-v" / "stage.json").read_text())["summary"]
    assert folded.dtype == torch.bfloat16 and folded.num_parameters() == made["parameters_after"] < made["parameters_before"] == source.num_parameters()
    assert made["max_relative_difference"] < TOLERANCE < made["max_relative_difference_stored"] < 0.1

    assert "norms and skip connections" in run("related/skipless/fold.py", "--model", model, *fold, fails=True).stderr
    tight = run("related/skipless/fold.py", "--run", home, "--max-condition", 0.5, *fold, fails=True).stderr
    assert "condition number at most 5e-01" in tight and not (home / "serial-without-q").exists()
