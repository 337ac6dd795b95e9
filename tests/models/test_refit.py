"""The output refit against numpy's least squares, on layers of one linear map; the attention refit against
plain training of a whole decoder layer; Muon against torch's own."""

import math
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from torch import nn

from common.models import refit
from common.models.refit import RIDGE_STRENGTHS, HeadMuon, Moments, Refit, best_fit
from models import tiny_model
from reference import merge_model, normal

TOKENS = torch.randint(0, 256, (6, 120), generator=torch.Generator().manual_seed(0))


def ridge_regression(h: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, ridge: float) -> np.ndarray:
    """argmin |y - W h|^2 + ridge mean(diag sum h h^T) |W - W_O|^2 of h [n, in], y [n, out], by numpy."""
    strength = ridge * float(h.square().sum(0).mean())
    rows = np.vstack((h.numpy(), np.sqrt(strength) * np.eye(h.shape[1])))
    targets = np.vstack((y.numpy(), np.sqrt(strength) * weight.numpy().T))
    return np.linalg.lstsq(rows, targets, rcond=None)[0].T


def share(h: torch.Tensor, y: torch.Tensor, weight) -> float:
    return float((y - h @ torch.as_tensor(weight).T).square().sum() / y.square().sum())


def moments(h: torch.Tensor, y: torch.Tensor) -> Moments:
    return Moments(h.T @ h, y.T @ h, float(y.square().sum()))


def test_best_fit_is_the_ridge_regression_of_least_held_out_error():
    """Of strengths from 1e-4 to 10, half a decade apart."""
    np.testing.assert_allclose(np.log10(RIDGE_STRENGTHS), np.arange(-4, 1.5, 0.5), atol=1e-12)
    h, weight = normal(60, 6), normal(5, 6, seed=5)
    y = h @ normal(6, 5, seed=6) + 2 * normal(60, 5, seed=7)
    fit, judge = (h[:20], y[:20]), (h[20:], y[20:])
    candidates = {ridge: ridge_regression(*fit, weight, ridge) for ridge in RIDGE_STRENGTHS}
    errors = {ridge: share(*judge, candidate) for ridge, candidate in candidates.items()}
    best = min(errors, key=errors.get)
    assert errors[best] < share(*judge, weight) and best not in (RIDGE_STRENGTHS[0], RIDGE_STRENGTHS[-1])
    refitted, ridge, before, after = best_fit(weight, moments(*fit), moments(*judge))
    assert ridge == best
    np.testing.assert_allclose(refitted.numpy(), candidates[best], atol=1e-10)
    assert before == pytest.approx(share(*judge, weight)) and after == pytest.approx(errors[best])
    assert moments(h, 0 * y).error(weight) == 0  # a layer that adds nothing


class Layer(nn.Module):
    """A layer of which o_proj reads the hidden states themselves; its output replaces them."""

    def __init__(self, seed: int, bias: bool = False):
        super().__init__()
        projection = nn.Linear(6, 6, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(projection.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=seed + number))
        self.self_attn = nn.Sequential(OrderedDict(o_proj=projection))

    def forward(self, hidden):
        return self.self_attn(hidden)


@pytest.fixture
def plain_runs(monkeypatch):
    """Layers run by themselves, without a model; a list of what was run, and at which positions."""
    read = []

    def run(attention):
        def module_of(model, layer, hidden, positions):
            module = layer.self_attn if attention else layer
            read.append((module, positions))
            return module(hidden)

        return module_of

    monkeypatch.setattr(refit, "run_layer", run(attention=False))
    monkeypatch.setattr(refit, "run_attention", run(attention=True))
    monkeypatch.setattr(refit, "attention_factor", lambda model, layer: 1.0)
    return read


@pytest.mark.parametrize(("sequences", "bias", "factor"), [(1, False, 1.0), (3, True, 0.25), (3, True, None)])
def test_a_layer_is_fitted_on_seven_batches_of_eight_and_judged_on_the_eighth(
        sequences, bias, factor, plain_runs, monkeypatch):
    """Inputs and targets differ, as they do behind a merged layer; the merged layer keeps its bias.

    Half of the difference is part of the target, where attention, times a factor, adds to what differs.
    """
    monkeypatch.setattr(refit, "attention_factor", lambda model, layer: factor)
    targets, inputs = normal(16, sequences, 9, 6, seed=1), normal(16, sequences, 9, 6, seed=2)
    inputs = targets + 0.1 * inputs
    original, merged = Layer(10, bias), Layer(20, bias)
    weight = merged.self_attn.o_proj.weight.detach().clone()
    held_out = torch.arange(16) % 8 == 7
    texts = [list(text.clone()) for text in (targets, inputs)]
    with torch.no_grad():
        y = original.self_attn(targets) - (merged.self_attn.o_proj.bias if bias else 0)
        y = y + 0.5 * (targets - inputs) / factor if factor else y
        fit, judge = ((inputs[part].flatten(0, 2), y[part].flatten(0, 2)) for part in (~held_out, held_out))
        row = Refit(None, *texts).layer(original, merged)
        expected = ridge_regression(*fit, weight, row["ridge"])
        refitted = merged.self_attn.o_proj.weight
        np.testing.assert_allclose(refitted.numpy(), expected, atol=1e-4)  # products are float32
        assert row["merged"] == pytest.approx(share(*judge, weight), rel=1e-4)
        assert row["output"] == pytest.approx(share(*judge, refitted), rel=1e-3)
        assert row["output"] < row["merged"] and "attention" not in row
        for text, moved in zip(texts, (original(targets), merged(inputs)), strict=True):
            torch.testing.assert_close(torch.stack(text), moved)


def test_a_sequence_is_read_with_two_gaps():
    """Positions ascend from 0 and stay below the context, in which all distances occur."""
    distances = set()
    for number in range(500):
        positions = refit.gapped_positions(number, 16, 64)
        steps = positions.diff()
        assert positions[0] == 0 and positions[-1] < 64 and (steps > 0).all() and (steps > 1).sum() <= 2
        assert torch.equal(positions, refit.gapped_positions(number, 16, 64))
        distances |= set((positions[:, None] - positions).flatten().tolist())
    assert distances == set(range(-63, 64))
    assert refit.gapped_positions(1, 16, 65) is None  # beyond four lengths
    assert refit.gapped_positions(1, 16, 17)[-1] <= 16
    assert refit.gapped_positions(1, 16, 16) is None and refit.gapped_positions(1, 16, None) is None
    assert len({tuple(refit.gapped_positions(number, 16, 64).tolist()) for number in (1, 3, 5)}) == 3
    ends = [int(refit.gapped_positions(number, 3, 4)[-1]) for number in range(500)]
    assert 100 < ends.count(2) < 150  # of 500, a quarter: cuts are within the text, and two gaps of two are 0


def test_both_models_read_a_sequence_at_the_same_positions(plain_runs):
    texts, read = [list(normal(4, 1, 9, 6, seed=seed)) for seed in (1, 2)], defaultdict(list)
    original, merged, gaps = Layer(10), Layer(20), [None, refit.gapped_positions(1, 9, 36), None, None]
    Refit(None, *texts, context=36).layer(original, merged)
    for module, positions in plain_runs:
        read[module].append(positions)
    for module, expected in ((original, gaps), (merged.self_attn, gaps), (merged, gaps)):
        for ours, theirs in zip(read[module], expected, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)


def refit_attention(model, merged, tokens) -> list[dict]:
    """Every layer of `merged` refitted on tokens [sequences, T], one a batch, in place."""
    batches = [model.model.embed_tokens(part) for part in tokens.split(1)]
    texts = list(batches), list(batches)
    run = refit.Refit(model, *texts, attention=True)
    for layers in zip(model.model.layers, merged.model.layers, strict=True):
        run.layer(*layers)
    return run.metrics


FAMILIES = [{"bias": True}, {"model_type": "mistral", "sliding_window": 16}]


def trained(monkeypatch, options=FAMILIES[0], **constants):
    """A source of one layer, its merged model, and that model trained, with W_O not refitted."""
    monkeypatch.setattr(refit, "best_fit", lambda weight, fit, judge: (weight, None, 1.0, 1.0))
    for name, value in constants.items():
        monkeypatch.setattr(refit, name, value)
    model = tiny_model(num_hidden_layers=1, **options)
    start, merged = merge_model(model, 2), merge_model(model, 2)
    refit_attention(model, merged, TOKENS)
    return model, start, merged


@pytest.mark.parametrize("options", FAMILIES)
def test_attention_refit_is_plain_training_of_whole_layers(monkeypatch, options):
    """On the five sequences that are not held out, in the order of a seeded permutation per epoch."""
    model, student, merged = trained(monkeypatch, options=options, EPOCHS=2)
    outputs = []
    for each in (model, student):
        each.model.layers[0].self_attn.register_forward_hook(lambda *call: outputs.append(call[2][0]))
    attention = student.model.layers[0].self_attn
    assert not any(optimizer.defaults.get("weight_decay") for optimizer in refit.optimizers(attention))
    names = [f"{name}_proj.{kind}" for kind in ("weight", "bias") for name in "qkvo"][:-1]
    names = names if attention.q_proj.bias is not None else names[:4]
    parameters = [attention.get_parameter(name) for name in names]
    groups = [{"params": [parameter], "lr": 0.03 * float(parameter.detach().square().mean().sqrt())}
              for parameter in parameters]
    groups[3]["columns"] = True
    optimizers = [HeadMuon(groups[:4], head_dim=8)]
    if groups[4:]:
        optimizers.append(torch.optim.AdamW(groups[4:], weight_decay=0))
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(5, generator=generator) for _ in range(2)])
    starts = [group["lr"] for group in groups]
    for step, number in enumerate(order):
        outputs.clear()
        model(TOKENS[number][None])
        student(TOKENS[number][None])
        student.zero_grad()
        target, output = outputs[0].detach(), outputs[1]
        ((output - target).square().sum() / target.square().sum()).backward()
        stepped = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, start in zip(stepped, starts, strict=True):
            group["lr"] = start * (1 + math.cos(math.pi * step / len(order))) / 2
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in zip(names, parameters, strict=True):
        torch.testing.assert_close(merged.model.layers[0].self_attn.get_parameter(name), parameter,
                                   rtol=1e-3, atol=1e-4, msg=name)  # training amplifies rounding


def test_the_epoch_of_the_least_held_out_error_is_kept(monkeypatch):
    """Errors of 0.5, 0.3, 0.4 and 0.3 after the epochs: the second stays."""
    errors, states, real = iter([0.5, 0.3, 0.4, 0.3]), [], Refit._error

    def watched(refitting, merged, outputs, numbers):
        if numbers is not refitting.held_out:
            return real(refitting, merged, outputs, numbers)
        states.append(merged.self_attn.q_proj.weight.clone())
        return torch.tensor(next(errors))

    monkeypatch.setattr(Refit, "_error", watched)
    _, _, merged = trained(monkeypatch)
    kept = merged.model.layers[0].self_attn.q_proj.weight
    assert len(states) == 4 and [torch.equal(kept, state) for state in states] == [False, True, False, False]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (160, 5)])
def test_each_head_takes_the_step_of_torchs_muon(shape, columns):
    """Twenty steps of small gradients, head by head; torch's multiplies in bfloat16: it loses 2^-8 a product.

    The first head, whose gradients are zero, stays.
    """
    weight = torch.nn.Parameter(normal(*(shape[::-1] if columns else shape)).float())
    start = weight.detach().clone()
    heads = [torch.nn.Parameter(head.detach().clone()) for head in weight.split(8, dim=int(columns))]
    group = {"params": [weight], "lr": 0.1} | ({"columns": True} if columns else {})  # rows, if not said
    ours = HeadMuon([group], head_dim=8)
    torchs = torch.optim.Muon(heads, lr=0.1, momentum=0.9, weight_decay=0, adjust_lr_fn="match_rms_adamw")
    for step in range(20):
        weight.grad = 1e-5 * normal(*weight.shape, seed=step + 1).float()
        weight.grad.split(8, dim=int(columns))[0].zero_()
        for head, gradient in zip(heads, weight.grad.split(8, dim=int(columns)), strict=True):
            head.grad = gradient.clone()
        ours.step()
        torchs.step()
    expected = torch.cat(list(heads), dim=int(columns)).detach()
    assert float((weight.detach() - expected).norm()) < 0.02 * float((expected - start).norm())
