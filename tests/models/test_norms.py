"""Norms of keys and queries, over all heads or of single ones: what they allow, and merging behind them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.method.merge import Merge
from common.models.calibration import Calibration
from common.models.edits import merge_layer, merged_config
from common.models.families import merged_modules, watch_heads
from models import save_tiny, tiny_model
from reference import blended, merge_model
from runs import run


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [8, 4])
def test_merged_heads_behind_a_norm_are_right_up_to_a_number_per_token(kv_heads):
    """Merged queries and keys, as RoPE sees them, against the sums of their definition; the number is 1 in
    the mean square."""
    layer = tiny_model(model_type="olmo2", num_key_value_heads=kv_heads, bias=True).double().model.layers[1]
    members, generator = kv_heads // 2, torch.Generator().manual_seed(4)
    hidden = torch.randn(3, 30, 48, generator=generator, dtype=torch.float64)
    value_in, value_out, key_in, key_out = torch.randn(4, 2, members, 8, 8, generator=generator).double()

    def states(attention) -> dict:
        """Letter -> vectors of each head before RoPE, [tokens, heads, d]."""
        watched = {}
        handles = watch_heads(attention, lambda letter, vectors: watched.update({letter: vectors}))
        turns = (torch.ones(1, 30, 8, dtype=torch.float64), torch.zeros(1, 30, 8, dtype=torch.float64))
        attention(hidden, position_embeddings=turns, attention_mask=None)
        for handle in handles:
            handle.remove()
        return {letter: vectors.view(90, -1, 8) for letter, vectors in watched.items()}

    source = states(layer.self_attn)
    keys = torch.einsum("gjab,ngjb->nga", key_in, source["k"].view(90, 2, members, 8))
    queries = source["q"].view(90, kv_heads, -1, 8)
    queries = torch.einsum("kba,nkrb->nkra", key_out.flatten(0, 1), queries)
    merge = Merge(value_in, value_out, key_in, key_out, key_energy=keys.square().mean(0),
                  query_energy=queries.square().mean(0).sum(1).view(2, members, 8))
    config = merged_config(layer.self_attn.config, 2)
    attention = merge_layer(layer, 1, config, merge).self_attn
    variance = key_in.square() @ layer.self_attn.k_norm.weight.view(2, members, 8, 1).square()
    factor = attention.k_norm.weight.square() / variance.sum(1).flatten()  # one for all rows
    torch.testing.assert_close(factor, factor[:1].expand_as(factor))
    merged = states(attention)
    for expected, found in ((keys, merged["k"]), (queries.flatten(1, 2), merged["q"])):
        ratio = expected / found
        token = ratio.flatten(1).median(1).values[:, None, None]
        torch.testing.assert_close(ratio, token.expand_as(ratio), rtol=1e-3, atol=1e-3)  # eps of the norms
        assert float(token.square().mean()) == pytest.approx(1, rel=1e-3) and token.std() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("whole_head", [False, True])
def test_masks_blend_norms_over_all_heads(whole_head):
    """Open masks give the source, closed ones the merged model, and others blend head by head."""
    model = tiny_model(model_type="olmo2")
    merged, names = merge_model(model, 2), merged_modules(model.model.layers[0].self_attn, whole_head)
    assert ("q_norm" in names) == whole_head and "k_norm" in names
    for name in names:
        for parameter in getattr(merged.model.layers[1].self_attn, name).parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    student = blended(model, merged, names)
    z = torch.rand(8)
    norm = student.model.layers[1].self_attn.k_norm
    norm.z = z
    original, shared = norm.original.weight.view(8, 8), norm.merged.weight.view(2, 8).repeat_interleave(4, 0)
    weight, x = (z[:, None] * original + (1 - z[:, None]) * shared).flatten(), torch.randn(5, 64)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_masks_blend_norms_of_single_heads():
    """By the mask of each key/value head, also for the query heads that read it; means leave them alone."""
    model = tiny_model(model_type="qwen3", num_key_value_heads=4)
    attention, merged = model.model.layers[0].self_attn, merge_model(model, 2)
    names = merged_modules(attention, whole_head=True)
    assert names[4:] == ("k_norm", "q_norm") and merged_modules(attention) == ("k_proj", "v_proj")
    for name in names[4:]:
        getattr(merged.model.layers[1].self_attn, name).weight.add_(0.3 * torch.randn(8))
    student, z, x = blended(model, merged, names), torch.rand(4), torch.randn(2, 5, 8, 8)
    for name, masked in (("k_norm", z), ("q_norm", z.repeat_interleave(2))):
        norm, heads = getattr(student.model.layers[1].self_attn, name), x[..., : len(masked), :]
        norm.z = z
        weight = masked[:, None] * norm.original.weight + (1 - masked[:, None]) * norm.merged.weight
        expected = weight * heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(norm(heads), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_keys_and_queries_of_qwen3_are_calibrated_behind_their_norms_too(inputs, tmp_path):
    """Against hooks on the norms."""
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 4}
    path, home = save_tiny(tmp_path / "model", model_type="qwen3", **sizes), tmp_path / "run"
    text = ["--text", inputs["text"], "--sequences", 2, "--length", 64]
    run("01_calibrate.py", "--run", home, "--model", path, *text)
    calibration, watched = Calibration(str(home / "calibration")), {}
    model = AutoModelForCausalLM.from_pretrained(path)
    for name in ("q_norm", "k_norm", "k_proj"):
        def hook(module, inputs, output, name=name):
            watched[name] = output.double().view(128, -1, 8)

        getattr(model.model.layers[1].self_attn, name).register_forward_hook(hook)
    model(calibration.tokens())
    keys, close = watched["k_proj"], {"rtol": 1e-4, "atol": 1e-3}
    vectors = torch.cat((watched["k_norm"], keys / keys.square().mean((1, 2), keepdim=True).sqrt()), dim=1)
    grams = calibration.grams("cpu", 1)
    torch.testing.assert_close(grams.normed(), torch.einsum("nia,njb->ijab", vectors, vectors), **close)
    torch.testing.assert_close(grams.full_key, torch.einsum("nia,njb->ijab", keys, keys), **close)
    queries = watched["q_norm"].view(128, 4, 2, 8)
    torch.testing.assert_close(grams.query, torch.einsum("nira,nirb->iab", queries, queries), **close)
