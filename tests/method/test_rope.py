"""RoPE pairs against Hugging Face's own rotation, and which pairs a Qwen3 attention lets rotate."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from common.method.rope import rotate_pairs, to_complex, to_real
from common.models.families import free_pairs
from models import tiny_model


def test_rope_multiplies_pairs_by_unit_numbers():
    """Of transformers: to_complex(RoPE(k)) = to_complex(k) e^(i angle), of position 3 and each pair."""
    config = tiny_model().config
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[3]]))
    keys = torch.randn(1, 1, 1, 8)
    _, rotated = apply_rotary_pos_emb(keys, keys, cos, sin)
    frequencies = 10000.0 ** -(torch.arange(4) / 4)
    expected = to_complex(keys) * torch.polar(torch.ones(4), 3 * frequencies)
    torch.testing.assert_close(to_complex(rotated), expected, rtol=1e-5, atol=1e-5)
    assert to_real(to_complex(keys)).equal(keys)


def test_rotate_pairs_is_complex_multiplication():
    rows, factor = torch.randn(3, 8, 5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.complex128)
    expected = to_complex(rows.transpose(1, 2)) * factor[:, None]
    torch.testing.assert_close(to_complex(rotate_pairs(rows, factor).transpose(1, 2)), expected)
    flat = rotate_pairs(rows[..., 0], factor)  # a bias: no columns
    torch.testing.assert_close(flat, rotate_pairs(rows, factor)[..., 0])


@pytest.mark.parametrize(("weights", "free"), [
    ((1, 1, 1, 1), True), ((2, 2, 3, 3), True), ((1, 2, 2, 1), False),  # ac = be alone
    ((1, 2, 1, 2), False),  # ae = bc alone
    ((2, 2, 3, 4), False),  # a = b alone
])  # fmt: skip
def test_a_pair_is_free_where_every_rotation_commutes_with_the_norm_weights(weights, free):
    """The definition: q^T diag(a, b) RoPE diag(c, e) k does not change when q and k rotate by one angle."""
    attention = tiny_model(model_type="qwen3").model.layers[0].self_attn
    of_query, of_key = torch.tensor(weights).float().view(2, 2)
    with torch.no_grad():
        attention.q_norm.weight.copy_(torch.arange(1.0, 9.0))
        attention.k_norm.weight.copy_(torch.arange(8.0, 0.0, -1.0))
        attention.q_norm.weight[[1, 5]], attention.k_norm.weight[[1, 5]] = of_query, of_key
    assert free_pairs(attention).tolist() == [False, free, False, False]
    factors = torch.polar(torch.ones(2, 1), torch.tensor([[0.7], [1.1]]))
    rope, turn = rotate_pairs(torch.eye(2).expand(2, 2, 2), factors)
    scores = torch.diag(of_query) @ rope @ torch.diag(of_key)
    assert torch.allclose(turn.T @ scores @ turn, scores, atol=1e-5) == free
