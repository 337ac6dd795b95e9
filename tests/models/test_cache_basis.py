"""The basis for a quantized cache: the model stays, errors of scores and outputs fall, as written out."""

import copy
import re

import pytest
import torch

from common.method.rope import to_complex, to_real
from common.models.cache_basis import CacheSamples, change_basis, fit_basis, fit_values, score_error
from common.models.families import head_parameters
from common.models.load import load_model
from common.models.quantized_cache import LAYOUTS, attention_with, parse_cache, quantized, read_back
from models import byte_tokenizer, tiny_model
from torchrun import ROOT

TOKENS = torch.randint(260, (3, 40), generator=torch.Generator().manual_seed(0))
FAMILIES = [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("olmo2", {}), ("olmo3", {}), ("phi3", {}),
            ("gemma", {}), ("mistral", {"sliding_window": 8}), ("olmo", {})]
QUICK = [("qwen3", "rotated")]


@torch.no_grad()
def uneven_model(model_type: str, **options):
    """A model in which a pair of every head's keys is large, in both channels alike."""
    model = tiny_model(model_type=model_type, head_dim=32, num_key_value_heads=4, **options)
    for layer in model.model.layers:
        parameters = head_parameters(layer.self_attn)
        weights = parameters.get("k_norm.weight", parameters["k_proj.weight"])
        weights.unflatten(0, (-1, 32))[:, [1, 17]] *= 6
    return model


@pytest.mark.parametrize("model_type, options, layout", [
    pytest.param(name, options, layout, id=f"{name}-{layout}",
                 marks=[] if (name, layout) in QUICK else [pytest.mark.slow])
    for name, options in FAMILIES for layout in LAYOUTS
])
@torch.no_grad()
def test_the_model_stays_and_a_four_bit_cache_loses_less(model_type, options, layout):
    model = uneven_model(model_type, **options)
    changed, samples = copy.deepcopy(model), [CacheSamples() for _ in model.model.layers]
    with attention_with(model, lambda module, *states: samples[module.layer_idx].watch(module, *states)):
        model(input_ids=TOKENS, use_cache=False)
    for layer, each in zip(changed.model.layers, samples, strict=True):
        basis = fit_basis(layer.self_attn, each, layout)
        assert basis.keys.max() <= 1 and basis.values.max() <= 1 and basis.keys.mean() < 0.97
        assert basis.factor.abs().log().mean(-1).abs().max() < 1e-5  # one scale for all pairs changes nothing
        assert bool(basis.factor.imag.any()) == (model_type not in ("qwen3", "olmo2", "olmo3"))  # by norms
        change_basis(layer.self_attn, basis)
    first, second = (each.double()(input_ids=TOKENS).logits for each in (model, changed))
    allowed = 2e-5 * float(first.abs().max())  # the parameters are float32
    torch.testing.assert_close(first, second, rtol=0, atol=allowed)


def test_errors_are_those_of_scores_written_out():
    """E over tokens of (q . e)^2, for queries of which each channel is by itself."""
    draw = torch.Generator().manual_seed(1)
    keys, energy = torch.randn(300, 2, 32, generator=draw), torch.rand(2, 16, generator=draw) + 0.1
    factor = torch.polar(torch.rand(2, 16, generator=draw) + 0.5, torch.randn(2, 16, generator=draw))
    turned = to_real(to_complex(keys) * factor)
    error = turned - read_back(turned, "q4_0", "pairs", keys=True)
    spread = (energy.sqrt() / factor.abs()).repeat(1, 2)
    signs = torch.randint(2, (2000, 1, 2, 32), generator=draw) * 2 - 1.0
    scores = (signs * spread * error[:100]).sum(-1).square().mean((0, 1))
    torch.testing.assert_close(score_error(keys[:100], energy, factor, "pairs"), scores, rtol=0.05, atol=0)


def test_the_map_of_values_has_the_least_error_of_even_noise():
    """tr(M C M^T) tr(M^-T W M^-1) is at its bound, the square of the trace of (C^1/2 W C^1/2)^1/2."""
    draw = torch.randn(2, 1, 32, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    moment, output = draw @ draw.mT
    found = fit_values(moment, output)
    inverse = torch.linalg.inv(found)
    product = torch.einsum("gab,gbc,gac->g", found, moment, found) * torch.einsum(
        "gba,gbc,gca->g", inverse, output, inverse)
    singular = torch.linalg.eigvals(moment @ output).real.sqrt().sum(-1)
    torch.testing.assert_close(product, singular.square(), rtol=0.02, atol=0)


@pytest.mark.slow
@torch.no_grad()
def test_the_documented_lines_serve_a_model_that_is_not_converted(inputs, tmp_path, monkeypatch):
    """Its function stays, and with a four-bit cache it is closer to itself."""
    source, expected, losses = uneven_model("llama"), uneven_model("llama")(TOKENS).logits, []
    source.save_pretrained(tmp_path / "SOURCE")
    byte_tokenizer().save_pretrained(tmp_path / "SOURCE")
    (tmp_path / "TEXT").symlink_to(inputs["text"])
    (code,) = re.findall(r"```python\n(.*?fit_basis.*?)```", (ROOT / "docs/FAQ.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    changed = load_model("OUT")
    torch.testing.assert_close(changed(TOKENS).logits, expected, rtol=0, atol=1e-4)
    for model in (source, changed):
        with quantized(model, parse_cache("q4_0"), "rotated"):
            losses.append(float((model(TOKENS).logits - expected).square().mean()))
    assert losses[1] < 0.8 * losses[0]
