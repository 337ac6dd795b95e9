"""The aligned model is the same function; deliberate faults show that the check would notice."""

import pytest
import torch

from common.method.fuse import fuse_layer, mean_merge, merge_model, merged_state
from conftest import tiny_model

LIMITS = {torch.float32: 1e-4, torch.float64: 1e-9}  # rounding through three layers, logits of size ~10


def random_rotations(heads: int, size: int):
    values = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float64)).Q
    keys = torch.polar(torch.ones(heads, size // 2, dtype=torch.float64), 6.3 * torch.rand(heads, size // 2, dtype=torch.float64))
    return values, keys


def logits_of(model, seed: int = 5):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (3, 40), generator=generator)
    positions = torch.randint(0, 200, (3, 40), generator=generator).sort(-1).values  # random positions, gaps included
    with torch.no_grad():
        return model(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_model_is_the_same_function(dtype, bias):
    model = tiny_model(bias=bias).to(dtype)
    before = logits_of(model)
    assert before.std() > 0.5  # the comparison is not of zeros
    for layer in model.model.layers:
        fuse_layer(layer.self_attn, torch.randperm(8).tolist(), *random_rotations(8, 8))
    assert (logits_of(model) - before).abs().max() <= LIMITS[dtype]


@pytest.mark.parametrize("fault", ["reflected key pair", "value rotation not orthogonal", "rotation across pairs"])
def test_what_is_not_allowed_changes_the_function(fault):
    model = tiny_model().double()
    before = logits_of(model)
    attention = model.model.layers[1].self_attn
    values, keys = random_rotations(8, 8)
    if fault == "value rotation not orthogonal":
        values[3] *= 1.01
    fuse_layer(attention, list(range(8)), values, keys)
    if fault == "reflected key pair":  # an orthogonal map that RoPE does not commute with, absorbed by q and k alike
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.data[0] *= -1
    if fault == "rotation across pairs":
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.data[[0, 1]] = projection.weight.data[[1, 0]]
    assert (logits_of(model) - before).abs().max() > 1e-4


def test_fusing_writes_equations_12_to_16():
    model = tiny_model(bias=True).double()
    attention = model.model.layers[0].self_attn
    before = {name: p.clone() for name, p in attention.named_parameters()}
    values, keys = random_rotations(8, 8)
    order = torch.randperm(8).tolist()
    fuse_layer(attention, order, values, keys)
    for new, old in enumerate(order):
        rows, was = slice(8 * new, 8 * new + 8), slice(8 * old, 8 * old + 8)
        block = torch.block_diag(*[torch.tensor([[u.real, -u.imag], [u.imag, u.real]]) for u in keys[new]])
        interleaved = [p + half * 4 for p in range(4) for half in (0, 1)]  # (0, 4, 1, 5, ...): pairs side by side
        rotation = torch.empty(8, 8, dtype=torch.float64)
        rotation[torch.tensor(interleaved)[:, None], torch.tensor(interleaved)] = block.double()
        for name in ("q_proj", "k_proj"):
            torch.testing.assert_close(getattr(attention, name).weight[rows], rotation @ before[f"{name}.weight"][was])
            torch.testing.assert_close(getattr(attention, name).bias[rows], rotation @ before[f"{name}.bias"][was])
        torch.testing.assert_close(attention.v_proj.weight[rows], values[new] @ before["v_proj.weight"][was])
        torch.testing.assert_close(attention.v_proj.bias[rows], values[new] @ before["v_proj.bias"][was])
        torch.testing.assert_close(attention.o_proj.weight[:, rows], before["o_proj.weight"][:, was] @ values[new].T)
    assert torch.equal(attention.o_proj.bias, before["o_proj.bias"])


def test_merge_is_the_mean_of_equations_25_and_26():
    attention = tiny_model(bias=True).model.layers[0].self_attn
    state = merged_state(attention, mean_merge(source_kv_heads=8, kv_heads=2, head_dim=8))
    for name, parameter in attention.named_parameters():
        if name[0] in "kv":
            groups = parameter.detach().double().view(2, 4, 8, -1)
            expected = torch.stack([sum(group) / 4 for group in groups]).view(state[name].shape)
            torch.testing.assert_close(state[name], expected.float(), rtol=0, atol=1e-7)
        elif name in state:
            assert torch.equal(state[name], parameter)  # queries and outputs are as they were


def test_merging_equal_heads_changes_nothing():
    """If the heads of every group already share keys and values, the stock GQA model is the same function."""
    model = tiny_model(bias=True)
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for parameter in projection.parameters():
                blocks = parameter.data.view(2, 4, 8, -1)
                blocks[:] = blocks[:, :1].clone()
    merged = merge_model(model, 2)
    assert merged.config.num_key_value_heads == 2 and merged.model.layers[0].self_attn.k_proj.out_features == 16
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=0, atol=1e-4)
