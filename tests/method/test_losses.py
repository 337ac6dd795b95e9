"""Distillation losses against the formulas written out, and the chunked form against the plain one."""

import contextlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import paper
from common.head import Head
from common.method import losses
from common.method.losses import bild, chunked, exact_products, kl, product


def logits(n: int = 6, vocab: int = 40, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_kl_is_scipys_entropy_of_teacher_against_student():
    student, teacher = logits(seed=1), logits(seed=2)
    probabilities = (scipy.special.softmax(logits.numpy(), 1) for logits in (teacher, student))
    expected = scipy.stats.entropy(*probabilities, axis=1)
    np.testing.assert_allclose(kl(student, teacher).numpy(), expected, atol=1e-12)


def test_bild_equals_the_definition():
    student, teacher = logits(seed=1), logits(seed=2)
    expected = torch.stack([paper.bild(*logits) for logits in zip(student, teacher, strict=True)])
    torch.testing.assert_close(bild(student, teacher), expected, rtol=0, atol=1e-12)


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
    monkeypatch.setattr(losses, "product", lambda *factors: products.append(factors) or product(*factors))

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_round_no_factor(dtype, monkeypatch):
    """Sums of 512 products in float32 are off by some 1e-6; with factors rounded to bfloat16, by 1e-3."""
    generator, used = torch.Generator().manual_seed(0), []
    monkeypatch.setattr(losses, "exact_products", lambda dtype: used.append(dtype) or exact_products(dtype))
    left, right = (torch.randn(256, 512, generator=generator).to(dtype) for _ in range(2))
    exact = left.double() @ right.double().T
    for ours in (product(left, right.T), product(left, right.T, torch.zeros(256, 256))):
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() < 1e-5 * exact.norm()
    assert used == [dtype, dtype]


def test_only_bfloat16_factors_use_its_instructions_and_only_there():
    matmul = torch.backends.mkldnn.matmul
    before, within = matmul.fp32_precision, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with contextlib.suppress(ZeroDivisionError), exact_products(dtype):
            within[dtype] = matmul.fp32_precision
            raise ZeroDivisionError
        assert matmul.fp32_precision == before
    assert within == {torch.float32: before, torch.bfloat16: "bf16", torch.float16: before}


def test_products_on_a_gpu_have_16_bit_factors_and_sums_in_float32(monkeypatch):
    """Of stand-ins for tensors on a GPU."""
    seen = []
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, lambda *parts, **options: seen.append((parts, options)))
    with FakeTensorMode():
        left, right = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((4, 8), (8, 6)))
        total = torch.empty(4, 6, device="cuda")
        product(left, right)
        product(left, right, total)
    into = {"out_dtype": torch.float32}
    assert seen == [((left, right), into), ((total, left, right), into | {"out": total})]


def test_head_gradient_does_not_accumulate_in_bfloat16():
    """512 tokens pull the same way, one a chunk: a bfloat16 sum would stop growing at 256."""
    shapes = (512, 1), (2, 1), (2,)
    hidden, weight, bias = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    pieces, head = [("all", at) for at in torch.arange(512).split(1)], head_of_weight(weight, bias)
    chunked(lambda kind, at, logits: logits.float().sum(), pieces, hidden, head).backward()
    assert (weight.grad == 512).all() and (bias.grad == 512).all()
