"""Skipless models: their definition, exact folds of Q, K, V and P, what is refused, training, reports."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scipy.stats import norm
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from common.cli import Clock, UserError
from common.data.samples import Sample
from common.models import load_config
from common.training.engine import STOPPED
from common.training.packing import build_row
from common.training.sharding import Trainee
from conftest import ROOT, copy_run, run, run_in_process, save_tiny, tiny_model
from related.skipless import algebra, compare, exactness, report, training, weights
from related.skipless.exactness import LOGIT_TOLERANCE, exact_logits, relative_difference
from related.skipless.modeling import SkiplessConfig
from related.skipless.training import initialise, skipless_config

COMPARE, FOLD, TRAIN = (f"related/skipless/{name}.py" for name in ("compare", "fold", "train"))

LAYERS, HEADS, SIZE = 3, 4, 8
WIDTH = HEADS * SIZE
KINDS = [(parallel, kv_heads) for parallel in (False, True) for kv_heads in (HEADS, 2, 1)]
FFNS = [*((*kind, True) for kind in KINDS), (False, HEADS, False), (True, HEADS, False)]  # gated or not


def model_of(parallel=False, kv_heads=HEADS, seed=0, **changes):
    """A float64 model of Gaussian weights and, where it has them, biases."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 50, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": SIZE,
             "max_position_embeddings": 64, "parallel": parallel, "bos_token_id": None, "eos_token_id": None,
             "attention_bias": True, "mlp_bias": True}
    model = AutoModelForCausalLM.from_config(SkiplessConfig(**(shape | changes)), dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.0 if parameter.ndim == 1 else 1.5 * parameter.shape[1] ** -0.5)
    return model


def matrices(model) -> int:
    """The number of weights without biases."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)


def tokens(seed=1):
    return torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(seed))


def difference(first, second) -> float:
    return relative_difference(exact_logits(first, tokens()), exact_logits(second, tokens()))


def row_matrices(model, index) -> dict[str, np.ndarray]:
    """A block's matrices as in the paper, for rows: y = x W."""
    layer = model.model.layers[index]
    names = {"Q": "self_attn.q_proj", "K": "self_attn.k_proj", "V": "self_attn.v_proj",
             "P": "self_attn.o_proj", "G": "mlp.gate_proj", "U": "mlp.up_proj", "O": "mlp.down_proj"}
    weights = {letter: layer.state_dict().get(f"{name}.weight") for letter, name in names.items()}
    return {letter: weight.numpy().T for letter, weight in weights.items() if weight is not None}


def by_definition(model, ids) -> np.ndarray:
    """Logits [T, vocab] of one sequence in numpy, from the paper's Figures 1 and 3. RoPE is complex."""
    config = model.config
    x = model.model.embed_tokens.weight.detach().numpy()[ids]
    length = len(ids)
    theta, pairs = config.rope_parameters["rope_theta"], np.arange(0, SIZE, 2) / SIZE
    rotation = np.exp(1j * np.arange(length)[:, None] * theta**-pairs)

    def rotated(rows):  # [T, d] -> complex [T, d/2], after RoPE
        return (rows[:, : SIZE // 2] + 1j * rows[:, SIZE // 2 :]) * rotation

    for index in range(config.num_hidden_layers):
        w = row_matrices(model, index)
        heads = []
        for head in range(HEADS):
            kv_head = head * config.num_key_value_heads // HEADS
            mine, shared = (slice(index * SIZE, (index + 1) * SIZE) for index in (head, kv_head))
            q, k, v = (x @ w["Q"])[:, mine], (x @ w["K"])[:, shared], (x @ w["V"])[:, shared]
            q, k = rotated(q), rotated(k)
            scores = (q @ k.conj().T).real / SIZE**0.5
            scores[np.triu_indices(length, 1)] = -np.inf
            attention = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(attention / attention.sum(-1, keepdims=True) @ v)
        attended = np.concatenate(heads, -1) @ w["P"]
        into = x if config.parallel else attended
        up = into @ w["U"]
        if config.gated:
            gate = into @ w["G"]
            inner = gate / (1 + np.exp(-gate)) * up
        else:
            inner = up * norm.cdf(up)
        out = inner @ w["O"]
        x = attended + out if config.parallel else out
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
    folded = algebra.fold(model, letter)
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


@pytest.mark.parametrize("bias", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("parallel", "kv_heads", "gated"), FFNS)
def test_every_fold_is_exact_and_smaller_or_refused(parallel, kv_heads, gated, bias):
    model = model_of(parallel, kv_heads, attention_bias=bias[0], mlp_bias=bias[1], gated=gated)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for letter in "qkvp":
        if letter in "kv" and kv_heads < HEADS:
            shape = f"{WIDTH} x {kv_heads * SIZE} .{kv_heads} key/value heads of {HEADS}"
            with pytest.raises(UserError, match=f"square {letter.upper()} to remove, found {shape}"):
                algebra.fold(model, letter)
            continue
        folded = algebra.fold(model, letter)
        gone = folded.config.removed
        assert len(gone) == (1 if parallel or letter == "p" else 2) and algebra.PROJECTIONS[letter] in gone
        assert not any(name in key for name in gone for key in folded.state_dict())
        lost = LAYERS * len(gone) * WIDTH**2
        assert matrices(folded) == matrices(model) - lost
        assert difference(model, folded) < LOGIT_TOLERANCE
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", [
    "model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj",
    "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj",
])
def test_a_matrix_left_unchanged_is_noticed(parallel, name):
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
    """Give one matrix this condition number; inf makes it singular."""
    weight = model.model.layers[layer].self_attn.get_submodule(projection).weight
    left, values, right = torch.linalg.svd(weight.detach())
    values[-1] = 0.0 if condition == np.inf else values[0] / condition
    with torch.no_grad():
        weight.copy_(left @ values.diag() @ right)


REFUSED = [(False, "q"), (False, "k"), (False, "v"), (True, "q"), (True, "p")]


@pytest.mark.parametrize(("parallel", "letter"), REFUSED)
@pytest.mark.parametrize(("condition", "shown"), [(3e7, r"3\.0e\+07$"), (np.inf, r"singular in float64\)$")])
def test_singular_and_badly_conditioned_matrices_are_refused_by_layer(parallel, letter, condition, shown):
    model = model_of(parallel)
    spoil(model, 1, algebra.PROJECTIONS[letter], condition)
    expected = rf"layer 1: expected {letter.upper()} of condition number at most 1e\+05, found .*{shown}"
    with pytest.raises(UserError, match=expected):
        algebra.fold(model, letter)
    for other in set("qkv") - {letter}:
        assert difference(model, algebra.fold(model, other)) < LOGIT_TOLERANCE


def test_a_singular_p_goes_from_serial_blocks():
    model = model_of()
    spoil(model, 1, "o_proj", np.inf)
    assert difference(model, algebra.fold(model, "p")) < LOGIT_TOLERANCE
    assert difference(model, algebra.fold(model, "q")) < LOGIT_TOLERANCE


def test_heads_wider_than_the_model_are_refused():
    with pytest.raises(UserError, match=f"square Q to remove, found {WIDTH} x {2 * WIDTH}"):
        algebra.fold(model_of(head_dim=2 * SIZE), "q")


def test_tied_embeddings_come_apart_where_one_of_them_changes():
    model = model_of(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for letter, tied in (("q", False), ("p", True)):
        folded = algebra.fold(model, letter)
        assert folded.config.tie_word_embeddings == tied and difference(model, folded) < LOGIT_TOLERANCE


def test_condition_numbers_are_those_of_numpy():
    model = model_of(kv_heads=2)
    attention = model.model.layers[0].self_attn
    conditions = algebra.condition_numbers(attention)
    assert set(conditions) == {"q", "p"}  # K and V are not square
    for letter, linear in (("q", attention.q_proj), ("p", attention.o_proj)):
        assert conditions[letter] == pytest.approx(np.linalg.cond(linear.weight.detach().numpy()))
    assert algebra.condition_numbers(algebra.fold(model, "q").model.layers[0].self_attn) == {}


@pytest.mark.parametrize("parallel", [False, True])
def test_folded_checkpoint_loads_by_auto_class_and_generates_with_a_cache(parallel, tmp_path):
    folded = algebra.fold(model_of(parallel, kv_heads=2), "q")
    folded.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert not any("q_proj" in key for key in file.keys())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert difference(folded, loaded) == 0
    prompt = tokens()[:1, :5]
    tokens_by_cache = [loaded.generate(prompt, max_new_tokens=10, do_sample=False, use_cache=use_cache)
                       for use_cache in (True, False)]
    assert torch.equal(*tokens_by_cache) and tokens_by_cache[0].shape == (1, 15)


def fresh_model(parallel: bool = False, kv_heads: int = HEADS):
    """A float32 model as train_skipless makes it."""
    config = skipless_config(model_of(kv_heads=kv_heads).config, parallel, mlp_bias=True)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def hidden_states(model, ids) -> list[torch.Tensor]:
    """The input of the first block and the output of each block."""
    hidden, outputs = model.model.embed_tokens(ids), []
    hooks = [layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
             for layer in model.model.layers]
    model.model(ids)
    for hook in hooks:
        hook.remove()
    return [hidden, *outputs]


@torch.no_grad()
@pytest.mark.parametrize("parallel", [False, True])
def test_training_starts_near_the_identity(parallel):
    model = fresh_model(parallel)
    ids = tokens()
    initialise(model, ids, seed=0)
    hidden = hidden_states(model, ids)
    for block in hidden[1:]:
        assert float(block.square().mean()) == pytest.approx(1, rel=1e-3)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert max(algebra.condition_numbers(attention).values()) < 1.001
        assert torch.equal(attention.q_proj.weight, attention.k_proj.weight)
        scale = attention.q_proj.weight.norm() / WIDTH**0.5
        assert float(scale) == pytest.approx(training.SHARPNESS, rel=1e-4)
        assert (mlp.gate_proj.bias == training.GATE_BIAS).all() and (mlp.up_proj.bias == 0).all()
        direction = torch.nn.functional.cosine_similarity
        assert direction(mlp.down_proj.weight.flatten(), mlp.up_proj.weight.T.flatten(), 0) > 0.9999


def test_grouped_keys_start_equal_to_the_queries_that_read_them():
    model = fresh_model(kv_heads=2)
    initialise(model, tokens(), seed=0)
    attention = model.model.layers[0].self_attn
    queries = attention.q_proj.weight.unflatten(0, (2, 2, SIZE))[:, 0]  # the first of each group
    assert torch.equal(attention.k_proj.weight, queries.flatten(0, 1))


@torch.no_grad()
def test_a_block_starts_as_a_rotation_of_its_input():
    """Sharp attention reads the token itself and the open gate passes it on: what is left is x V P."""
    model = fresh_model()
    initialise(model, tokens(), seed=0)
    hidden = hidden_states(model, tokens())
    for before, after, layer in zip(hidden, hidden[1:], model.model.layers, strict=False):
        rotated = before @ (layer.self_attn.o_proj.weight @ layer.self_attn.v_proj.weight).T
        similarity = torch.nn.functional.cosine_similarity(rotated.flatten(1), after.flatten(1))
        assert float(similarity.mean()) > 0.8


def test_next_token_loss_is_that_of_transformers(monkeypatch):
    """For samples of different lengths the mean over samples of their mean cross-entropy, in chunks."""
    monkeypatch.setattr(training, "LOSS_CHUNK", 7)
    model = fresh_model().train()
    initialise(model, tokens(), seed=0)
    model.lm_head.weight.data.mul_(50)
    texts = [tokens()[0].tolist(), tokens(2)[0, :11].tolist()]
    row = build_row([Sample(text[:-1], text[-1:]) for text in texts], len(texts))
    model.set_attn_implementation("packed")
    loss, parts = training.NextToken(Trainee(model)).row_loss(row)
    losses = [model(torch.tensor([text]), labels=torch.tensor([text])).loss for text in texts]
    torch.testing.assert_close(loss, sum(losses) / 2)
    assert parts == {}


# ---- a stopped training


SETTINGS = {"steps": 3, "lr": 0.001, "seed": 0}


def contents(directory) -> dict[str, bytes]:
    """Relative path -> bytes of all files below a directory."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.fixture
def begun(group_of_one, tmp_path) -> dict[str, bytes]:
    """The files of a training in tmp_path/train that was begun with SETTINGS and has saved a checkpoint."""
    directory = tmp_path / "train"
    training.begin(str(directory), SETTINGS, group_of_one)
    (directory / "step-00000002").mkdir()
    (directory / "step-00000002" / "weights").write_text("two steps")
    return contents(directory)


def test_a_training_begins_with_the_initialised_model(group_of_one, tmp_path):
    config = skipless_config(model_of().config, parallel=False, mlp_bias=True)
    start = training.write_start(str(tmp_path / "train"), config, tokens(), 0, group_of_one)
    written = AutoModelForCausalLM.from_pretrained(start).state_dict()
    model = fresh_model()
    initialise(model, tokens(), seed=0)
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())
    before = contents(start)
    training.write_start(str(tmp_path / "train"), config, tokens(), 1, group_of_one)
    assert contents(start) == before  # a training that resumes keeps its start


def test_a_training_with_the_same_settings_goes_on(begun, group_of_one, tmp_path):
    training.begin(str(tmp_path / "train"), SETTINGS, group_of_one)
    assert contents(tmp_path / "train") == begun


@pytest.mark.parametrize("change", [{"steps": 4}, {"lr": 0.01}, {"seed": 1}, {"length": 8}])
def test_a_training_with_other_settings_is_refused_and_kept(begun, group_of_one, tmp_path, change):
    (name, value), = change.items()
    with pytest.raises(UserError, match=f"{name} .* -> {value}") as refusal:
        training.begin(str(tmp_path / "train"), SETTINGS | change, group_of_one)
    assert "\n" not in str(refusal.value) and contents(tmp_path / "train") == begun


def test_force_moves_an_unfinished_training_aside(begun, group_of_one, tmp_path):
    training.start_anew(str(tmp_path / "train"), group_of_one)
    assert contents(tmp_path / "train.old-1") == begun and not (tmp_path / "train").exists()
    training.begin(str(tmp_path / "train"), SETTINGS, group_of_one)
    training.start_anew(str(tmp_path / "train"), group_of_one)
    assert contents(tmp_path / "train.old-1") == begun and (tmp_path / "train.old-2").is_dir()


@pytest.mark.parametrize("plan", [None, b"[]", b"{", b"\xff"])
def test_a_directory_without_settings_is_refused_and_kept(group_of_one, tmp_path, plan):
    directory = tmp_path / "train"
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")
    if plan:
        (directory / "plan.json").write_bytes(plan)
    before = contents(directory)
    with pytest.raises(UserError, match="plan.json"):
        training.begin(str(directory), SETTINGS, group_of_one)
    assert contents(directory) == before


def stop_after_two(monkeypatch) -> None:
    """Have every training stop after its second step, as if by a signal."""
    whole_training = training.train

    def train(*positional):
        whole_training(*positional, until=2)
        return False

    monkeypatch.setattr(training, "train", train)


@pytest.mark.slow
def test_training_on_other_text_is_refused(inputs, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    flags = ["--run", tmp_path / "run", "--model", inputs["model"], "--text", text]
    flags += ["--heldout", inputs["text"]]
    flags += ["--steps", 3, "--batch", 2, "--length", 16, "--warmup", 1]
    text.write_text("some text, repeated " * 40)
    stop_after_two(monkeypatch)
    assert run_in_process(TRAIN, [str(flag) for flag in flags]).returncode == STOPPED
    monkeypatch.undo()
    text.write_text("other text, repeated " * 40)
    before = contents(tmp_path / "run")
    assert "samples_sha256" in run(TRAIN, *flags, fails=True).stderr and contents(tmp_path / "run") == before
    text.write_text("some text, repeated " * 40)
    run(TRAIN, *flags)


@pytest.mark.slow
def test_a_stopped_training_resumes_to_the_same_weights(inputs, group_of_one, tmp_path, monkeypatch):
    def train(run) -> bool:
        options = Namespace(
            run=str(run), text=inputs["text"], heldout=inputs["text"], steps=3, batch=2, length=16, lr=1e-3,
            warmup=1, seed=0, print_every=1, force=False,
        )
        return training.train_skipless(options, inputs["model"], False, group_of_one, Clock())

    assert train(tmp_path / "whole")
    stop_after_two(monkeypatch)
    assert not train(tmp_path / "stopped")
    monkeypatch.undo()
    assert train(tmp_path / "stopped")
    whole, resumed = (contents(tmp_path / name / "serial") for name in ("whole", "stopped"))
    assert whole["model.safetensors"] == resumed["model.safetensors"]
    assert [path.name for path in (tmp_path / "stopped").iterdir()] == ["serial"]


# ---- exactness


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


@pytest.mark.parametrize(("heads", "expected"), [
    (32, {"MHA": 32, "GQA": 8, "MQA": 1}), (8, {"MHA": 8, "GQA": 2, "MQA": 1}), (9, {"MHA": 9, "MQA": 1}),
    (6, {"MHA": 6, "GQA": 2, "MQA": 1}), (2, {"MHA": 2, "MQA": 1}),
])
def test_random_models_have_kv_heads_that_divide_the_heads(heads, expected):
    assert compare.head_counts(heads) == expected


def test_the_last_line_counts_invertible_matrices():
    conditions = [{"q": 5.0, "p": 2.0}, {"q": 7.0, "p": float("inf")}]
    expected = "3 of 4 square attention matrices of m invertible, worst condition number inf, P of layer 1"
    assert compare.closing_line("m", conditions, None) == expected
    assert compare.closing_line("m", [{}], None) == "no attention matrix of m is square"


def test_configs_of_the_same_name_are_all_counted(tmp_path):
    for name in ("a", "b", "Qwen2.5-7B"):
        tiny_model().config.save_pretrained(tmp_path / name)
    paths = [str(tmp_path / name / "config.json") for name in "ab"] + [str(tmp_path / "Qwen2.5-7B")]
    table = compare.count_all(Namespace(model="demo", config=paths), tiny_model().config)
    assert list(table)[-3:] == ["config", paths[1], "Qwen2.5-7B"]


# ---- weights.py


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


# ---- commands


SHORT = ["--length", 32, "--steps", 3, "--batch", 2, "--warmup", 1]


@pytest.fixture(scope="module")
def compared(inputs, tmp_path_factory):
    """A run directory after compare.py on a tiny model, what it printed, and the model."""
    home = tmp_path_factory.mktemp("skipless")
    model = save_tiny(home / "model", head_dim=6)
    text = ["--text", inputs["text"], "--heldout", inputs["text"]]
    done = run(COMPARE, "--run", home / "run", "--model", model, "--shape", model, *text, *SHORT)
    return home / "run", done.stdout, model


@pytest.mark.slow
def test_one_command_trains_folds_and_reports(compared):
    home, printed, _ = compared
    results = json.loads((home / "compare.json").read_text())
    lines = [line for line in results["exactness"] if line["remove"]]
    assert "40 folds exact" in printed
    assert len(lines) == 12 * 4 and sum("refused" in line for line in lines) == 8
    assert max(line["float64"] for line in lines if "float64" in line) < LOGIT_TOLERANCE
    assert len(results["conditions"]) == 3 and set(results["conditions"][0]) == set("qkvp")
    assert results["trained"]["serial"]["before"] != results["trained"]["serial"]["after"]
    assert [line["condition"] for line in results["sweep"]] == exactness.SWEEP
    assert "trained parallel" in (home / "compare.md").read_text()


@pytest.mark.slow
def test_fold_writes_a_checkpoint_and_replaces_only_its_own(compared, inputs):
    home, _, _ = compared
    flags = ["--run", home, "--text", inputs["text"], "--length", 32]
    done = run(FOLD, *flags, "--remove", "v", "--dtype", "bfloat16")
    assert "v_proj, o_proj removed" in done.stdout
    source = AutoModelForCausalLM.from_pretrained(home / "serial")
    folded = AutoModelForCausalLM.from_pretrained(home / "serial-without-v")
    summary = json.loads((home / "serial-without-v" / "stage.json").read_text())["summary"]
    assert folded.dtype == torch.bfloat16 and folded.num_parameters() == summary["parameters_after"]
    assert summary["parameters_after"] < summary["parameters_before"] == source.num_parameters()
    stored = summary["max_relative_difference_stored"]
    assert summary["max_relative_difference"] < LOGIT_TOLERANCE < stored < 0.1
    run(FOLD, *flags, "--remove", "v", fails=True)
    run(FOLD, *flags, "--remove", "v", "--force")
    refused = run(FOLD, *flags, "--out", home / "serial", "--force", fails=True).stderr
    assert "found one of related/skipless/train.py" in refused
    assert AutoModelForCausalLM.from_pretrained(home / "serial").num_parameters() == source.num_parameters()


@pytest.mark.slow
def test_fold_refuses_what_it_cannot_do(compared, inputs):
    home, _, model = compared
    flags = ["--run", home, "--text", inputs["text"], "--length", 32]
    for changes, message in (
        (["--model", model], "norms and skip connections"),
        (["--max-condition", 0.5], "condition number at most 5e-01"),
        (["--max-condition", "nan"], "--max-condition"),
        (["--length", 257], "--length: expected at most 256"),
        (["--model", home / "none"], "none"),
    ):
        assert message in run(FOLD, *flags, "--out", home / "new", *changes, fails=True).stderr
    assert not (home / "new").exists()


@pytest.mark.slow
def test_bad_arguments_of_training_are_refused_before_any_work(inputs, tmp_path):
    square = save_tiny(tmp_path / "square", head_dim=6)
    flags = ["--run", tmp_path / "run", "--text", inputs["text"], "--heldout", inputs["text"]]
    flags += ["--steps", 3, "--batch", 2]
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for command, changes, message in (
        (TRAIN, ["--model", square, "--length", 1], "--length: expected 2 to 256"),
        (TRAIN, ["--model", square, "--length", 257], "--length: expected 2 to 256"),
        (TRAIN, ["--model", square, "--lr", -1], "--lr"),
        (TRAIN, ["--model", square, "--seed", -1], "--seed"),
        (TRAIN, ["--model", inputs["text"]], inputs["text"]),
        (COMPARE, ["--model", square, "--shape", inputs["model"]], "--shape: expected a square Q"),
        (COMPARE, ["--model", square, "--shape", square, "--length", 300], "--length: expected 2 to 256"),
        (COMPARE, ["--model", square, "--config", inputs["text"], "--report-only"], inputs["text"]),
        (TRAIN, ["--model", square, "--heldout", short], f"{short}: expected"),
    ):
        assert message in run(command, *flags, *changes, fails=True).stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_with_other_steps_is_refused_by_the_command(inputs, tmp_path, monkeypatch):
    """The checkpoints of a stopped training stay where they are."""
    flags = ["--run", tmp_path / "run", "--model", inputs["model"], "--text", inputs["text"], "--warmup", 1]
    flags += ["--heldout", inputs["text"], "--length", 16, "--batch", 2]
    stop_after_two(monkeypatch)
    assert run_in_process(TRAIN, [str(flag) for flag in (*flags, "--steps", 3)]).returncode == STOPPED
    monkeypatch.undo()
    before = contents(tmp_path / "run")
    assert any("step-00000002" in name for name in before)
    assert "steps 3 -> 4" in run(TRAIN, *flags, "--steps", 4, fails=True).stderr
    assert contents(tmp_path / "run") == before
    run(TRAIN, *flags, "--steps", 3)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["serial"]


@pytest.mark.slow
def test_a_trained_model_of_another_shape_or_changed_is_refused(compared, inputs, tmp_path):
    home, _, model = compared
    other = save_tiny(tmp_path / "other", head_dim=6, seed=1)
    text = ["--text", inputs["text"], "--heldout", inputs["text"]]
    flags = ["--run", tmp_path / "run", "--model", model, *text, *SHORT]
    copy_run(home, tmp_path / "run")
    (tmp_path / "run" / "compare.json").unlink()
    assert "expected an artifact of model" in run(COMPARE, *flags, "--shape", other, fails=True).stderr
    weights_file = tmp_path / "run" / "parallel" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"x")
    assert "its content does not match" in run(COMPARE, *flags, "--shape", model, fails=True).stderr


@pytest.mark.slow
def test_matrices_that_are_not_square_are_reported(inputs, tmp_path):
    done = run(COMPARE, "--run", tmp_path, "--model", inputs["model"], "--report-only")
    assert "no attention matrix of" in done.stdout and "not square" in (tmp_path / "compare.md").read_text()
