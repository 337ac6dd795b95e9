"""A quantized cache: ggml's formats, the layouts of clients, and attention that reads from it."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from scipy.linalg import hadamard
from transformers import DynamicCache

from common.models.quantized_cache import LAYOUTS, as_cached, from_cached, parse_cache, quantized, read_back
from common.run.errors import UserError
from models import tiny_model

HEADS = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))


class Quantized(DynamicCache):
    layout = "pairs"

    def update(self, keys, values, *args, **options):
        keys = read_back(keys, "q8_0", self.layout, keys=True)
        return super().update(keys, read_back(values, "q4_0", "pairs", keys=False), *args, **options)


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_blocks_are_read_back_as_ggml_does(form):
    kind = GGMLQuantizationType[form.upper()]
    blocks = HEADS.clone()
    blocks[0, 0] = 0
    blocks[1, 1, 3] = -40.0
    theirs = quants.dequantize(quants.quantize(blocks.numpy(), kind), kind)
    np.testing.assert_array_equal(read_back(blocks, form, "halves", keys=True).numpy(), theirs)


def test_fp8_is_the_closest_multiple_of_an_e4m3_number():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()] * HEADS.abs().max() / 448
    closest = numbers[(HEADS[..., None] - numbers).abs().argmin(-1)]
    torch.testing.assert_close(read_back(HEADS, "fp8", "rotated", keys=True), closest)
    assert not read_back(torch.zeros(2, 3), "fp8", "halves", keys=True).any()


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [32, 128, 192])
def test_a_layout_is_orthogonal_and_taken_back(layout, size, keys):
    basis = as_cached(torch.eye(size), layout, keys)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(size))
    torch.testing.assert_close(from_cached(basis, layout, keys), torch.eye(size))
    expected, part = torch.eye(size), 128 if keys and size == 128 else 64
    if keys and layout != "halves":  # channel c of transformers is at 2c, or at 2(c - d/2) + 1
        expected = expected[[*range(0, size, 2), *range(1, size, 2)]]
    if layout == "rotated" and size % 64 == 0:
        matrix = torch.tensor(hadamard(part) / part**0.5).float()
        expected = expected @ torch.block_diag(*[matrix] * (size // part))
    torch.testing.assert_close(basis, expected)


FAMILIES = "qwen3", "olmo2", "phi3", "mistral", "gemma2", "cohere"


@pytest.mark.parametrize("model_type", [
    "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)])
def test_attention_reads_from_the_cache(model_type, monkeypatch):
    """As if transformers' own cache held what is read back, which eager attention then reads.

    A Cohere's pairs are side by side as they are.
    """
    options = {"sliding_window": 8} if model_type in ("mistral", "gemma2") else {}
    monkeypatch.setattr(Quantized, "layout", "halves" if model_type == "cohere" else "pairs")
    model = tiny_model(model_type=model_type, head_dim=64, num_key_value_heads=4, **options)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2  # of scores: some families have one of their own
    tokens, cache = torch.arange(12)[None] * 7 % 260, parse_cache("q8_0/q4_0")
    with torch.no_grad():
        plain = model(input_ids=tokens, use_cache=False).logits
        with quantized(model, cache, "pairs"):
            ours = model(input_ids=tokens, use_cache=False).logits
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, plain)  # as before
        theirs = model(input_ids=tokens, past_key_values=Quantized(config=model.config)).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - plain).abs().max() > 1e-3


def test_a_format_that_is_none_is_refused():
    with pytest.raises(UserError, match="--cache: expected f16, fp8, q8_0, q4_0 or two of them"):
        parse_cache("q5_0")
