"""Training skipless models: where it starts, its loss, stopped and resumed."""

import json
from argparse import Namespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.cli import Clock, UserError
from common.data.rows import Sample
from common.data.text import load_tokens
from common.models import load_config, load_tokenizer
from common.training.distill import next_token_loss
from common.training.packing import batch_indices, build_row
from common.training.sharding import Trainee
from related.skipless import algebra, training
from related.skipless.training import initialise, skipless_config
from skipless_models import HEADS, SIZE, WIDTH, contents, model_of, stop_after_two, tokens


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


@torch.no_grad()
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("without", ["q_proj", "k_proj", "v_proj"])
def test_without_a_projection_training_starts_near_the_identity_too(without, parallel):
    """As sharp as with it: q k = SHARPNESS^2 |x|^2 for a token and itself, in the subspace of each head."""
    config = skipless_config(model_of().config, parallel, mlp_bias=True, removed=[without, "o_proj"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    initialise(model, tokens(), seed=0)
    hidden = hidden_states(model, tokens())
    for before, after, layer in zip(hidden, hidden[1:], model.model.layers, strict=False):
        attention = layer.self_attn
        if parallel and without == "v_proj":  # what attention writes is the mean of its inputs, at full size
            assert 0.3 < float(after.square().mean() / before.square().mean()) < 3
        else:
            assert float(after.square().mean()) == pytest.approx(1, rel=1e-3)
        scores = attention.q_proj(before) * attention.k_proj(before)
        expected = training.SHARPNESS**2 * before.square().sum(-1)
        torch.testing.assert_close(scores.sum(-1), expected, rtol=1e-4, atol=1e-4)
        if not parallel:
            value = attention.v_proj(before)
            similarity = torch.nn.functional.cosine_similarity(value.flatten(1), after.flatten(1))
            assert float(similarity.mean()) > 0.6  # a start of random directions has 0


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


def test_next_token_loss_is_that_of_transformers():
    """For samples of different lengths the mean over samples of their mean cross-entropy, in chunks."""
    model = fresh_model().train()
    initialise(model, tokens(), seed=0)
    model.lm_head.weight.data.mul_(50)
    texts = [tokens()[0].tolist(), tokens(2)[0, :11].tolist()]
    row = build_row([Sample(text[:-1], text[-1:]) for text in texts], len(texts))
    model.set_attn_implementation("packed")
    at = row.all_weight.nonzero()[:, 0]
    loss = next_token_loss(Trainee(model), row, at, row.all_weight, chunk=7)
    losses = [model(torch.tensor([text]), labels=torch.tensor([text])).loss for text in texts]
    torch.testing.assert_close(loss, sum(losses) / 2)


SETTINGS = {"steps": 3, "lr": 0.001, "seed": 0}


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
        (directory / "settings.json").write_bytes(plan)
    before = contents(directory)
    with pytest.raises(UserError, match="settings.json"):
        training.begin(str(directory), SETTINGS, group_of_one)
    assert contents(directory) == before


def train(run, inputs, ranks) -> bool:
    """Three steps of two sequences of 16 tokens. Returns False if a signal stopped them."""
    options = Namespace(
        run=str(run), text=inputs["text"], heldout=inputs["text"], steps=3, batch=2, length=16, lr=1e-3,
        warmup=1, seed=0, print_every=1, force=False,
    )
    return training.train_skipless(options, inputs["model"], False, ranks, Clock())


def test_training_learns_every_next_token(inputs, group_of_one, tmp_path):
    """The first loss is the cross-entropy of all next tokens of the batch, before any step."""
    assert train(tmp_path, inputs, group_of_one)
    ids, _ = load_tokens(inputs["text"], load_tokenizer(inputs["model"]), 6, 16)
    config = skipless_config(load_config(inputs["model"]), False, mlp_bias=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    initialise(model, ids[:2], seed=0)
    batch = ids[batch_indices(0, 2, 6, 0)]
    first = json.loads((tmp_path / "serial" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(float(model(batch, labels=batch).loss.detach()), rel=1e-4)


@pytest.mark.slow
def test_a_stopped_training_resumes_to_the_same_weights(inputs, group_of_one, tmp_path, monkeypatch):
    assert train(tmp_path / "whole", inputs, group_of_one)
    stop_after_two(monkeypatch)
    assert not train(tmp_path / "stopped", inputs, group_of_one)
    monkeypatch.undo()
    assert train(tmp_path / "stopped", inputs, group_of_one)
    whole, resumed = (contents(tmp_path / name / "serial") for name in ("whole", "stopped"))
    assert whole["model.safetensors"] == resumed["model.safetensors"]
    assert [path.name for path in (tmp_path / "stopped").iterdir()] == ["serial"]
