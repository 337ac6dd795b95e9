"""Losses chunk by chunk of tokens against the plain form."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from common.method.losses import bild, kl
from common.models.head import Head
from common.training.chunked import chunked
from reference import normal


def pieces_of(tokens: int, chunk: int) -> list:
    """Every third token under BiLD, the others under KL, one token under neither."""
    at = torch.arange(tokens - 1)
    answers, prompt = at[::3].split(chunk), at[at % 3 > 0].split(chunk)
    return [(bild, part) for part in answers] + [(kl, part) for part in prompt]


def head_of_weight(weight: torch.Tensor, bias: torch.Tensor | None = None, *options) -> Head:
    return Head(SimpleNamespace(weight=weight, bias=bias), *options)


@pytest.mark.parametrize("tokens, chunk", [(10, 4), (10, 100), (1, 4)])
@pytest.mark.parametrize("head_is_trained", [True, False])
@pytest.mark.parametrize("plain_head", [True, False])
def test_chunked_equals_plain(tokens, chunk, head_is_trained, plain_head):
    """Value and gradients of hidden states and head, formed chunk by chunk; each piece's loss called once.

    A rank with nothing to predict takes part in the backward pass; a frozen head gets no gradient. A head may
    have a bias, and its products be scaled and capped.
    """
    hidden, head, weight, teacher = (normal(*shape, seed=3) for shape in (
        (tokens, 8), (30, 8), (tokens,), (tokens, 30)))
    pieces, called, results = pieces_of(tokens, chunk), [], []

    def loss(kind, at, student):
        called.append(at)
        return (kind(student, teacher[at]) * weight[at]).sum()

    def plain(hidden, head):
        logits = hidden @ head.weight.T
        logits = logits if plain_head else 3 * torch.tanh(0.5 * (logits + head.bias) / 3)
        return sum(loss(kind, at, logits[at]) for kind, at in pieces_of(tokens, 100))

    for function in (partial(chunked, loss, pieces), plain):
        h = hidden.clone().requires_grad_()
        w, b = (part.clone().requires_grad_(head_is_trained) for part in (head, head[:, 0]))
        used = head_of_weight(w) if plain_head else head_of_weight(w, b, 0.5, 3.0)
        value = function(h, used)
        (3 * value).backward()
        results.append((value.detach(), h.grad, w.grad, b.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert len(called) == sum(len(at) > 0 for _, at in pieces) + len(pieces_of(tokens, 100))
    assert (results[0][1][-1] == 0).all() and (results[0][2] is None) != head_is_trained
    with torch.no_grad():
        torch.testing.assert_close(chunked(loss, pieces, hidden, used), results[1][0], rtol=0, atol=1e-12)


def test_head_gradient_does_not_accumulate_in_bfloat16():
    """512 tokens pull the same way, one a chunk: a bfloat16 sum would stop growing at 256."""
    shapes = (512, 1), (2, 1), (2,)
    hidden, weight, bias = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    pieces, head = [("all", at) for at in torch.arange(512).split(1)], head_of_weight(weight, bias)
    chunked(lambda kind, at, logits: logits.float().sum(), pieces, hidden, head).backward()
    assert (weight.grad == 512).all() and (bias.grad == 512).all()
