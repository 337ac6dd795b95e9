"""The aligned model is the same function; deliberate faults show that the check would notice."""

import pytest
import torch

import paper
from common.method.merge import fuse_layer
from common.method.rope import rotate_pairs
from conftest import tiny_model

LIMITS = {torch.float32: 1e-4, torch.float64: 1e-9}  # rounding through three layers, logits of size ~10


def random_rotations(heads: int, size: int):
    values = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float64)).Q
    angles = 6.3 * torch.rand(heads, size // 2, dtype=torch.float64)
    return values, torch.polar(torch.ones_like(angles), angles)


def logits_of(model, seed: int = 5):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (3, 40), generator=generator)
    positions = torch.randint(0, 200, (3, 40), generator=generator).sort(-1).values  # with gaps
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


@pytest.mark.parametrize(
    "fault", ["reflected key pair", "value rotation not orthogonal", "rotation across pairs"]
)
def test_what_is_not_allowed_changes_the_function(fault):
    model = tiny_model().double()
    before = logits_of(model)
    attention = model.model.layers[1].self_attn
    values, keys = random_rotations(8, 8)
    if fault == "value rotation not orthogonal":
        values[3] *= 1.01
    fuse_layer(attention, list(range(8)), values, keys)
    if fault == "reflected key pair":  # orthogonal and absorbed by q and k alike, but RoPE does not commute
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
        rows, source = slice(8 * new, 8 * new + 8), slice(8 * old, 8 * old + 8)
        turns = torch.stack([torch.tensor([[u.real, -u.imag], [u.imag, u.real]]) for u in keys[new]])
        R_K, Q_V = paper.eq_14(turns.double()), values[new]
        for name, equation, rotation in (("q_proj", paper.eq_15, R_K), ("k_proj", paper.eq_16, R_K),
                                         ("v_proj", paper.eq_12, Q_V)):
            for part, parameter in getattr(attention, name).named_parameters():
                rotated = equation(rotation, before[f"{name}.{part}"][source])
                torch.testing.assert_close(parameter[rows], rotated)
        columns = paper.eq_13(before["o_proj.weight"][:, source], Q_V)
        torch.testing.assert_close(attention.o_proj.weight[:, rows], columns)
    assert torch.equal(attention.o_proj.bias, before["o_proj.bias"])


@torch.no_grad()
def test_each_query_head_follows_its_key_value_head():
    """Of a source that is GQA already: query heads 2 i and 2 i + 1 move and rotate with key/value head i."""
    attention = tiny_model(bias=True, num_key_value_heads=4).double().model.layers[0].self_attn
    before = {name: p.clone() for name, p in attention.named_parameters()}
    values, keys = random_rotations(4, 8)
    order = [2, 0, 3, 1]
    fuse_layer(attention, order, values, keys)
    for new, old in enumerate(order):
        for query in range(2):
            rows, source = (slice(8 * (2 * head + query), 8 * (2 * head + query) + 8) for head in (new, old))
            expected = rotate_pairs(before["q_proj.weight"][source][None], keys[new][None])[0]
            torch.testing.assert_close(attention.q_proj.weight[rows], expected)
            expected = before["o_proj.weight"][:, source] @ values[new].T
            torch.testing.assert_close(attention.o_proj.weight[:, rows], expected)
