"""Attention within the samples of a packed row, by torch's kernel for all samples at once.

The kernel runs on GPUs alone (see test_gpu.py). Here a direct formula with its signature takes its place.
"""

from types import SimpleNamespace

import pytest
import torch

from common.models import attention
from common.models.families import needs_eager
from common.training import attention as training_attention
from common.training.attention import Trainee, varlen_applies
from common.training.packing import build_row
from models import FAMILIES, QUICK, tiny_model
from reference import random_samples, varlen_formula


@pytest.fixture
def formula_as_kernel(monkeypatch):
    """varlen_formula in place of torch's kernel; returns the list of its calls."""
    calls = []

    def kernel(*arguments, **options):
        calls.append(options)
        return varlen_formula(*arguments, **options)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(training_attention, "varlen_applies", lambda weight, head_dim: True)
    return calls


@pytest.mark.parametrize("name", QUICK)
def test_one_kernel_for_all_samples_is_the_familys_own_attention(name, formula_as_kernel):
    """Hidden states and gradients of a row, packed against eager attention, sample by sample."""
    samples, results = random_samples(5), []
    row = build_row(samples, 5)
    assert max(row.lengths) > 12  # longer than the window
    alone = [build_row([sample], 5) for sample in samples]
    for kind, rows in (("packed", [row]), ("eager", alone)):
        trainee = Trainee(tiny_model(attn_implementation=kind, **FAMILIES[name]))
        hidden = torch.cat([trainee(part) for part in rows])
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        gradients = [parameter.grad for parameter in trainee.parameters() if parameter.grad is not None]
        results.append([hidden.detach(), *gradients])
    for packed, eager in zip(*results, strict=True):
        torch.testing.assert_close(packed, eager, rtol=1e-4, atol=1e-4 * float(eager.abs().max()))
    config = trainee.net.config
    assert len(formula_as_kernel) == (0 if needs_eager(config) else config.num_hidden_layers)  # once a layer


@pytest.mark.parametrize("applies, changes", [
    (True, {}), (True, {"dtype": torch.float16}), (True, {"head_dim": 256}),
    (False, {"is_cuda": False}), (False, {"dtype": torch.float32}), (False, {"head_dim": 264}),
    (False, {"head_dim": 20}), (False, {"capability": (7, 5)}),
])  # fmt: skip
def test_the_kernel_is_called_within_its_limits(monkeypatch, applies, changes):
    given = {"is_cuda": True, "dtype": torch.bfloat16, "head_dim": 128, "capability": (8, 0)} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: given["capability"])
    assert varlen_applies(SimpleNamespace(**given), given["head_dim"]) == applies
