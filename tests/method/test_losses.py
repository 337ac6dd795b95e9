"""Distillation losses against the formulas written out."""

import numpy as np
import scipy.special
import scipy.stats
import torch

import paper
from common.method.losses import bild, kl


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
