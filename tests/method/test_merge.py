"""Merged projections against the sums of their definition, and heads that lose nothing by merging."""

import pytest
import torch

from common.method.merge import Merge, behind_norm, first_merge, mean_merge, merged_state
from conftest import tiny_model
from students import merge_model


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


def test_the_first_head_of_a_group_is_retained():
    attention = tiny_model(bias=True).model.layers[0].self_attn
    state = merged_state(attention, first_merge(source_kv_heads=8, kv_heads=2, head_dim=8))
    for name, parameter in attention.named_parameters():
        if name[0] in "kv":
            first = parameter.detach().view(2, 4, 8, -1)[:, 0].reshape(state[name].shape)
            assert torch.equal(state[name], first)
        elif name in state:
            assert torch.equal(state[name], parameter)


def test_shared_keys_of_zero_stay_zero_behind_a_norm():
    merged = {"k_proj.weight": torch.zeros(2, 8, 5)}
    behind_norm(merged, "k", torch.zeros(2, 8, 1), None)
    assert not merged["k_proj.weight"].any() and merged["k_norm.weight"].isfinite().all()


@torch.no_grad()
def test_merging_equal_heads_changes_nothing():
    """If the heads of every group already share keys and values, the stock GQA model is the same function."""
    model = tiny_model(bias=True)
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for parameter in projection.parameters():
                blocks = parameter.data.view(2, 4, 8, -1)
                blocks[:] = blocks[:, :1].clone()
    merged = merge_model(model, 2)
    assert merged.config.num_key_value_heads == 2
    assert merged.model.layers[0].self_attn.k_proj.out_features == 16
    tokens = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("source_kv_heads", [8, 4])
def test_merging_writes_the_sums_of_its_definition(source_kv_heads):
    """v~ = sum value_in v, k~ = sum key_in k, W_O,i <- W_O,i value_out_i, q_i <- key_out_i^T q_i."""
    attention = tiny_model(bias=True, num_key_value_heads=source_kv_heads).double().model.layers[0].self_attn
    members, repeats = source_kv_heads // 2, 8 // source_kv_heads
    value_in, value_out, key_in, key_out = torch.randn(4, 2, members, 8, 8, dtype=torch.float64)
    state = merged_state(attention, Merge(value_in, value_out, key_in, key_out))
    assert "o_proj.bias" not in state

    for kind in ("weight", "bias"):
        value, key, query = (getattr(getattr(attention, f"{name}_proj"), kind) for name in "vkq")
        for group in range(2):
            heads = range(group * members, (group + 1) * members)
            rows = {head: slice(8 * head, 8 * head + 8) for head in range(8)}
            shared = sum(value_in[group, i] @ value[rows[head]] for i, head in enumerate(heads))
            torch.testing.assert_close(state[f"v_proj.{kind}"][rows[group]], shared)
            shared = sum(key_in[group, i] @ key[rows[head]] for i, head in enumerate(heads))
            torch.testing.assert_close(state[f"k_proj.{kind}"][rows[group]], shared)
            for i, head in enumerate(heads):
                for reader in range(head * repeats, (head + 1) * repeats):
                    absorbed = key_out[group, i].T @ query[rows[reader]]
                    torch.testing.assert_close(state[f"q_proj.{kind}"][rows[reader]], absorbed)
                    columns = attention.o_proj.weight[:, rows[reader]] @ value_out[group, i]
                    torch.testing.assert_close(state["o_proj.weight"][:, rows[reader]], columns)
