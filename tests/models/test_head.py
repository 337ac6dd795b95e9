"""Products of a model's head: 16-bit factors are not rounded, sums are float32."""

import contextlib

import pytest
import torch

from common.models import head
from common.models.head import exact_products, product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_round_no_factor(dtype, monkeypatch):
    """Sums of 512 products in float32 are off by some 1e-6; with factors rounded to bfloat16, by 1e-3."""
    generator, used = torch.Generator().manual_seed(0), []
    monkeypatch.setattr(head, "exact_products", lambda dtype: used.append(dtype) or exact_products(dtype))
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
