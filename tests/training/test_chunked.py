"""Losses chunk by chunk of tokens against the plain form."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from common.method.losses import bild, kl
from common.models.head import Head, product
from common.training import chunked as chunks
from common.training.chunked import chunked


def logits(n: int = 6, vocab: int = 40, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pieces_of(tokens: int, chunk: int) -> list:
    """Every third token under BiLD, the others under KL, one token under neither."""
    at = torch.arange(tokens - 1)
    answers, prompt = at[::3].split(chunk), at[at % 3 > 0].split(chunk)
    return [("bild", part) for part in answers] + [("kl", part) for part in prompt]


def head_of_weight(weight: torch.Tensor, bias: torch.Tensor | None = None, *options) -> Head:
    return Head(SimpleNamespace(weight=weight, bias=bias), *options)


@pytest.mark.parametrize("tokens, chunk", [(10, 1), (10, 4), (10, 100), (1, 4)])
@pytest.mark.parametrize("head_is_trained", [True, False])
@pytest.mark.parametrize("plain_head", [True, False])
def test_chunked_equals_plain(monkeypatch, tokens, chunk, head_is_trained, plain_head):
    """Value and gradients of hidden states and head, formed chunk by chunk; each piece's loss called once.

    A rank with nothing to predict takes part in the backward pass; a frozen head's gradient is not formed.
    A head may have a bias, and its products be scaled and capped.
    """
    generator = torch.Generator().manual_seed(3)
    hidden, head, weight = (torch.rand(*shape, dtype=torch.float64, generator=generator)
                            for shape in ((tokens, 8), (30, 8), (tokens,)))
    teacher, pieces, called, products, results = logits(tokens, 30), pieces_of(tokens, chunk), [], [], []
    monkeypatch.setattr(chunks, "product", lambda *factors: products.append(factors) or product(*factors))

    def loss(kind, at, student):
        called.append(at)
        return ({"kl": kl, "bild": bild}[kind](student, teacher[at]) * weight[at]).sum()

    def whole(hidden, head):
        logits = hidden @ head.weight.T
        logits = logits if plain_head else 3 * torch.tanh(0.5 * (logits + head.bias) / 3)
        return sum(loss(kind, at, logits[at]) for kind, at in pieces_of(tokens, 100))

    filled = sum(len(at) > 0 for _, at in pieces)
    for function in (partial(chunked, loss, pieces), whole):
        h, w, b = hidden.clone(), head.clone(), head[:, 0].clone()
        leaves = [h.requires_grad_(), w.requires_grad_(head_is_trained), b.requires_grad_(head_is_trained)]
        used = head_of_weight(w) if plain_head else head_of_weight(w, b, 0.5, 3.0)
        value = function(h, used)
        assert results or (len(called), len(products)) == (filled, (1 + head_is_trained) * filled)
        (3 * value).backward()
        results.append((value.detach(), *(leaf.grad for leaf in leaves)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert (results[0][1][-1] == 0).all() and (results[0][2] is None) != head_is_trained
    assert (results[0][3] is None) == (plain_head or not head_is_trained)
    with torch.no_grad():
        value = chunked(loss, pieces, hidden, used)
        torch.testing.assert_close(value, results[1][0], rtol=0, atol=1e-12)


def test_head_gradient_does_not_accumulate_in_bfloat16():
    """512 tokens pull the same way, one a chunk: a bfloat16 sum would stop growing at 256."""
    shapes = (512, 1), (2, 1), (2,)
    hidden, weight, bias = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    pieces, head = [("all", at) for at in torch.arange(512).split(1)], head_of_weight(weight, bias)
    chunked(lambda kind, at, logits: logits.float().sum(), pieces, hidden, head).backward()
    assert (weight.grad == 512).all() and (bias.grad == 512).all()
