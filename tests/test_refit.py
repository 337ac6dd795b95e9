"""The output refit against numpy's least squares, on layers of one linear map."""

import numpy as np
import pytest
import torch
from torch import nn

from common.layers import Spool, run_layer
from common.method.fuse import merge_model
from common.method.refit import HELD_OUT_EVERY, RIDGE_STRENGTHS, Moments, Refit, best_fit
from conftest import tiny_model

TOKENS = torch.randint(0, 256, (6, 40), generator=torch.Generator().manual_seed(0))


def normal(*shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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


def test_a_weight_that_no_ridge_improves_is_kept():
    h, y = normal(60, 6), normal(60, 5, seed=5)
    exact = torch.linalg.lstsq(h[40:], y[40:]).solution.T  # what held-out text itself would choose
    kept, ridge, before, after = best_fit(exact, moments(h[:40], y[:40]), moments(h[40:], y[40:]))
    assert ridge is None and torch.equal(kept, exact) and before == after


@pytest.mark.parametrize("zero", ["inputs", "outputs"])
def test_a_layer_without_inputs_or_outputs_keeps_its_weight_or_learns_zero(zero):
    h, y, weight = normal(40, 6), normal(40, 5, seed=5), normal(5, 6, seed=6)
    h, y = (0 * h, y) if zero == "inputs" else (h, 0 * y)
    refitted, ridge, before, after = best_fit(weight, moments(h, y), moments(h, y))
    assert torch.equal(refitted, weight) and ridge is None
    assert before == after == (1.0 if zero == "inputs" else 0.0)


class Attention(nn.Module):
    def __init__(self, seed: int, bias: bool = False):
        super().__init__()
        self.o_proj = nn.Linear(6, 5, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(self.o_proj.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=seed + number))


class Layer(nn.Module):
    """A layer of which o_proj reads the hidden states themselves; its output replaces them, six wide."""

    def __init__(self, seed: int, bias: bool = False):
        super().__init__()
        self.self_attn = Attention(seed, bias)

    def forward(self, hidden):
        return torch.cat((self.self_attn.o_proj(hidden), hidden[..., :1]), -1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_layer_is_fitted_on_three_sequences_of_four_and_judged_on_the_fourth(batch, bias):
    """Inputs and targets differ, as they do behind a merged layer; the bias is no target of W_O."""
    assert HELD_OUT_EVERY == 4
    targets, inputs = normal(8, 10, 6, seed=1), normal(8, 10, 6, seed=2)
    inputs = targets + 0.1 * inputs
    original, merged = Layer(10, bias), Layer(20, bias)
    weight = merged.self_attn.o_proj.weight.detach().clone()
    y = targets @ original.self_attn.o_proj.weight.detach().T
    held_out = torch.tensor([False, False, False, True] * 2)
    fit, judge = ((inputs[part].flatten(0, 1), y[part].flatten(0, 1)) for part in (~held_out, held_out))
    texts = [[part.clone() for part in text.split(batch)] for text in (targets, inputs, inputs)]
    refit = Refit(lambda layer, hidden: layer(hidden), *texts)
    with torch.no_grad():
        unrefitted = merged(inputs)
        refit.layer(original, merged)
        row = refit.figures[0]
        expected = ridge_regression(*fit, weight, row["ridge"])
        refitted = merged.self_attn.o_proj.weight
        np.testing.assert_allclose(refitted.numpy(), expected, atol=1e-4)  # products are float32
        assert row["before"] == pytest.approx(share(*judge, weight), rel=1e-4)
        assert row["after"] == pytest.approx(share(*judge, refitted), rel=1e-3)
        assert row["after"] < row["before"]
        for text, moved in zip(texts, (original(targets), merged(inputs), unrefitted), strict=True):
            torch.testing.assert_close(torch.cat(text), moved)


def test_one_batch_of_two_sequences_has_one_to_judge():
    refit = Refit(None, [normal(1, 3, 6), normal(1, 3, 6)], [])
    assert [part.tolist() for part in refit.held_out] == [[False], [True]]


def refit_model(model, merged, batch: int) -> list[dict]:
    """Every layer of `merged` refitted on TOKENS, in place."""
    batches = [model.model.embed_tokens(part) for part in TOKENS.split(batch)]
    targets, inputs = Spool(batches), Spool(batches)
    refit = Refit(lambda layer, hidden: run_layer(model, layer, hidden), targets, inputs)
    for layers in zip(model.model.layers, merged.model.layers, strict=True):
        refit.layer(*layers)
    return refit.figures


@torch.no_grad()
def test_refit_brings_every_layer_nearer_and_an_exact_model_stays():
    model = tiny_model()
    merged = merge_model(model, 2)
    apart = float((model(TOKENS).logits - merged(TOKENS).logits).square().mean())
    figures = refit_model(model, merged, batch=2)
    assert len(figures) == 3 and figures[0]["after"] < figures[0]["before"]
    assert all(layer["after"] <= layer["before"] for layer in figures)
    assert float((model(TOKENS).logits - merged(TOKENS).logits).square().mean()) < apart
    same = merge_model(model, 8)
    refit_model(model, same, batch=4)
    torch.testing.assert_close(same(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-3)
