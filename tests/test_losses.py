"""Distillation losses against the formulas written out, and the chunked form against the plain one."""

import itertools

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from common.losses import bild, chunked, cross_entropy, differences, kl


def logits(n: int = 6, vocab: int = 40, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_kl_is_scipys_entropy_of_teacher_against_student():
    student, teacher = logits(seed=1), logits(seed=2)
    expected = scipy.stats.entropy(scipy.special.softmax(teacher.numpy(), 1), scipy.special.softmax(student.numpy(), 1), axis=1)
    np.testing.assert_allclose(kl(student, teacher).numpy(), expected, atol=1e-12)
    assert (kl(teacher, teacher).abs() < 1e-12).all()


def test_cross_entropy_is_minus_log_probability():
    student, targets = logits(), torch.tensor([3, 1, 4, 1, 5, 9])
    expected = -scipy.special.log_softmax(student.numpy(), 1)[np.arange(6), targets]
    np.testing.assert_allclose(cross_entropy(student, targets).numpy(), expected, atol=1e-12)


def bild_written_out(student: np.ndarray, teacher: np.ndarray, k: int, temperature: float) -> float:
    """One token, from the definition: both leaders, all pairs i < j of the leader's k largest in descending order."""
    total = 0.0
    for leader in (teacher, student):
        top = np.argsort(-leader)[:k]
        pairs = list(itertools.combinations(top, 2))
        ours, theirs = (scipy.special.softmax([(z[a] - z[b]) / temperature for a, b in pairs]) for z in (student, teacher))
        total += scipy.stats.entropy(theirs, ours)
    return total


def test_bild_equals_the_definition():
    student, teacher = logits(seed=1), logits(seed=2)
    expected = [bild_written_out(s, t, 16, 3.0) for s, t in zip(student.numpy(), teacher.numpy(), strict=True)]
    np.testing.assert_allclose(bild(student, teacher).numpy(), expected, atol=1e-12)
    assert differences(student[:, :16]).shape == (6, 120)
    assert (bild(teacher, teacher).abs() < 1e-12).all()
    # only differences count: adding a constant to all logits of a token changes nothing
    torch.testing.assert_close(bild(student + 5, teacher - 2), bild(student, teacher))


def test_bild_gradient():
    student, teacher = logits(3, 20, 1).requires_grad_(), logits(3, 20, 2)
    assert torch.autograd.gradcheck(lambda z: bild(z, teacher), student)


@pytest.mark.parametrize("loss", [kl, bild])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunked_equals_plain(loss, chunk):
    """Value and gradients for hidden states and for the head, formed chunk by chunk."""
    hidden, teacher = torch.randn(10, 8, dtype=torch.float64), logits(10, 30)
    weight, head = torch.rand(10, dtype=torch.float64), torch.nn.Linear(8, 30, bias=False, dtype=torch.float64)
    results = []
    for run in (lambda per, *rows: chunked(per, chunk, *rows), lambda per, *rows: per(*rows)):
        h = hidden.clone().requires_grad_()
        head.zero_grad()
        value = run(lambda x, t, w: (loss(head(x), t) * w).sum(), h, teacher, weight)
        value.backward()
        results.append((value.detach(), h.grad, head.weight.grad.clone()))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_chunked_gradcheck():
    teacher, weight = logits(5, 12), torch.rand(5, dtype=torch.float64)
    hidden, matrix = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 4), (12, 4)))

    def total(h, w):
        return chunked(lambda x, t, weights: ((kl(x @ w.T, t) + bild(x @ w.T, t)) * weights).sum(), 2, h, teacher, weight)

    assert torch.autograd.gradcheck(total, (hidden, matrix))
