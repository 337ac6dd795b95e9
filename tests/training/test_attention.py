"""Attention within the samples of a packed row: torch's kernel for all samples at once against one a sample.

The kernel runs on GPUs alone (see test_gpu.py). Here a direct formula with its signature takes its place.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from common.training import attention
from common.training.attention import packed_attention, varlen_applies, varlen_attention
from common.training.packing import build_row
from conftest import tiny_model
from test_families import FAMILIES, assert_packed_is_eager
from test_packing import random_samples


def varlen_formula(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
                   enable_gqa=False):
    """varlen_attn as its documentation describes it: softmax of each sample's scores within the window."""
    arguments = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    options = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}
    inspect.signature(varlen_attn).bind(*arguments, **options)
    for starts, longest in ((cu_seq_q, max_q), (cu_seq_k, max_k)):
        assert starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == len(query)
        assert longest == starts.diff().max()
    assert enable_gqa or query.shape[1] == key.shape[1]
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    before, after = (reach if reach >= 0 else len(query) for reach in window_size)
    scale, outputs = scale or query.shape[-1] ** -0.5, []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        position = torch.arange(end - start)
        distance = position[:, None] - position
        outside = (distance > before) | (distance < -after)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(outside, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def formula_as_kernel(monkeypatch):
    """varlen_formula in place of torch's kernel; returns the list of its calls."""
    calls = []

    def kernel(*arguments, **options):
        calls.append(options)
        return varlen_formula(*arguments, **options)

    monkeypatch.setattr(attention, "varlen_kernel", lambda: kernel)
    monkeypatch.setattr(attention, "varlen_applies", lambda query: True)
    return calls


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_one_kernel_for_all_samples_is_the_familys_own_attention(changes, formula_as_kernel):
    """With windows and fewer kv heads."""
    assert_packed_is_eager(changes)
    assert len(formula_as_kernel) == tiny_model(**changes).config.num_hidden_layers  # once a layer


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_one_kernel_equals_a_kernel_a_sample(window, kv_heads):
    samples, generator = random_samples(6), torch.Generator().manual_seed(1)
    row = build_row(samples, 6)
    total = row.input_ids.numel()
    states = [torch.randn(1, heads, total, 8, generator=generator) for heads in (4, kv_heads, kv_heads)]
    module = SimpleNamespace(num_key_value_groups=4 // kv_heads, is_causal=True)
    expected, _ = packed_attention(module, *states, None, row=row, sliding_window=window, scaling=0.3)
    torch.testing.assert_close(varlen_attention(varlen_formula, states, row, window, 0.3), expected,
                               rtol=0, atol=1e-5)


def test_without_a_row_and_with_dropout_samples_go_one_by_one(formula_as_kernel):
    row, generator = build_row(random_samples(1), 1), torch.Generator().manual_seed(2)
    states = [torch.randn(1, 2, row.lengths[0], 8, generator=generator) for _ in range(3)]
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    whole, _ = packed_attention(module, *states, None)
    packed_attention(module, *states, None, row=row, dropout=0.5)
    assert not formula_as_kernel
    torch.testing.assert_close(
        whole, torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True).transpose(1, 2)
    )


@pytest.mark.parametrize("applies, changes", [
    (True, {}), (True, {"dtype": torch.float16}), (True, {"shape": (1, 8, 64, 256)}),
    (False, {"is_cuda": False}), (False, {"dtype": torch.float32}), (False, {"shape": (1, 8, 64, 264)}),
    (False, {"shape": (1, 8, 64, 20)}), (False, {"capability": (7, 5)}), (False, {"kernel": None}),
])  # fmt: skip
def test_the_kernel_is_called_within_its_limits(monkeypatch, applies, changes):
    query = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 8, 64, 128), "capability": (8, 0),
             "kernel": varlen_attn} | changes
    monkeypatch.setattr(attention, "varlen_kernel", lambda: query["kernel"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: query["capability"])
    assert varlen_applies(SimpleNamespace(**query)) == applies


@pytest.fixture
def kernel_of_torch(monkeypatch):
    """kernel_of_torch(FUNCTION): varlen_kernel() where that is torch's varlen_attn."""

    def choose(function):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        attention.varlen_kernel.cache_clear()
        return attention.varlen_kernel()

    yield choose
    attention.varlen_kernel.cache_clear()


def test_a_kernel_without_windows_is_not_used(kernel_of_torch):
    """torch 2.10's."""
    assert kernel_of_torch(varlen_attn) is varlen_attn
    older = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None  # noqa: E731
    assert kernel_of_torch(older) is None


def test_a_kernel_without_fewer_kv_heads_gets_repeated_ones(kernel_of_torch):
    """torch 2.11's."""

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return varlen_formula(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale,
                              window_size=window_size)

    row, generator = build_row(random_samples(6), 6), torch.Generator().manual_seed(1)
    total = row.input_ids.numel()
    states = [torch.randn(1, heads, total, 8, generator=generator) for heads in (4, 2, 2)]
    expected = varlen_attention(varlen_formula, states, row, 5, 0.3)
    torch.testing.assert_close(varlen_attention(kernel_of_torch(older), states, row, 5, 0.3), expected)
