"""Fused and merged projections against their equations, and models that stay the same function."""

import pytest
import torch

import paper
from common.method.merge import Merge
from common.models.edits import fuse_groups, merged_state
from models import tiny_model
from reference import plain_merge, random_rotations


@torch.no_grad()
@pytest.mark.parametrize("repeats", [1, 2])
def test_fusing_writes_equations_12_to_16(repeats):
    """Query heads 2 i and 2 i + 1 of a source that is GQA already move and rotate with key/value head i."""
    heads = 8 // repeats
    attention = tiny_model(bias=True, num_key_value_heads=heads).double().model.layers[0].self_attn
    before = {name: p.clone() for name, p in attention.named_parameters()}
    values, keys = random_rotations(attention, torch.Generator().manual_seed(0))
    order, grouped = torch.randperm(heads), (2, heads // 2)
    fuse_groups(attention, order.view(grouped), values.unflatten(0, grouped), keys.unflatten(0, grouped))
    rows = [slice(8 * head, 8 * head + 8) for head in range(8)]
    for new, old in enumerate(order.tolist()):
        turns = torch.stack([torch.tensor([[u.real, -u.imag], [u.imag, u.real]]) for u in keys[new]])
        R_K, Q_V = paper.eq_14(turns.double()), values[new]
        readers = [(new * repeats + query, old * repeats + query) for query in range(repeats)]
        moved = [("k_proj", new, old, paper.eq_16, R_K), ("v_proj", new, old, paper.eq_12, Q_V)]
        moved += [("q_proj", *reader, paper.eq_15, R_K) for reader in readers]
        for name, to, source, equation, rotation in moved:
            for part, parameter in getattr(attention, name).named_parameters():
                rotated = equation(rotation, before[f"{name}.{part}"][rows[source]])
                torch.testing.assert_close(parameter[rows[to]], rotated)
        for to, source in readers:
            columns = paper.eq_13(before["o_proj.weight"][:, rows[source]], Q_V)
            torch.testing.assert_close(attention.o_proj.weight[:, rows[to]], columns)
    assert torch.equal(attention.o_proj.bias, before["o_proj.bias"])


def test_keys_and_values_are_the_mean_of_equations_25_and_26():
    attention = tiny_model(bias=True).model.layers[0].self_attn
    state = merged_state(attention, plain_merge(8, 2, 8))
    for name, parameter in attention.named_parameters():
        if name[0] in "kv":
            expected = parameter.detach().view(2, 4, 8, -1).double().mean(1).float()
            torch.testing.assert_close(state[name], expected.reshape(state[name].shape), rtol=0, atol=1e-7)
        elif name in state:
            assert torch.equal(state[name], parameter)  # queries and outputs are as they were


@torch.no_grad()
def test_norms_of_single_heads_get_one_scale_for_all_of_them():
    """Of keys before the norm and queries behind it; plain merges leave both as they are."""
    attention = tiny_model(model_type="qwen3", num_key_value_heads=4).double().model.layers[0].self_attn
    maps, variance = torch.randn(4, 2, 2, 8, 8).double(), torch.rand(8).double() + 1
    key_energy, query_energy = torch.rand(2, 8).double() + 1, torch.rand(2, 2, 8).double() + 1
    state = merged_state(attention, Merge(*maps, key_energy, query_energy, variance))
    scale = ((key_energy / variance).mean() * variance).sqrt()
    torch.testing.assert_close(state["k_norm.weight"], scale)
    keys = (maps[2] @ attention.k_proj.weight.view(2, 2, 8, -1)).sum(1) / scale[:, None]
    torch.testing.assert_close(state["k_proj.weight"], keys.flatten(0, 1))
    weight, read = attention.q_norm.weight, maps[3].flatten(0, 1).mT
    variance = (read.square() @ weight.square()).mean(0)
    scale = ((query_energy.flatten(0, 1) / 2 / variance).mean() * variance).sqrt()  # two queries a key
    torch.testing.assert_close(state["q_norm.weight"], scale)
    queries = weight[:, None] * attention.q_proj.weight.view(4, 2, 8, -1)
    queries = read[:, None] @ queries / scale[:, None]
    torch.testing.assert_close(state["q_proj.weight"], queries.flatten(0, 2))
    plain = merged_state(attention, plain_merge(4, 2, 8))
    assert not [name for name in plain if "norm" in name]
    assert torch.equal(plain["q_proj.weight"], attention.q_proj.weight)


@torch.no_grad()
@pytest.mark.parametrize("source_kv_heads", [8, 4])
def test_merging_writes_the_sums_of_its_definition(source_kv_heads):
    """v~ = sum value_in v, k~ = sum key_in k, W_O,i <- W_O,i value_out_i, q_i <- key_out_i^T q_i."""
    attention = tiny_model(bias=True, num_key_value_heads=source_kv_heads).double().model.layers[0].self_attn
    members = source_kv_heads // 2
    value_in, value_out, key_in, key_out = torch.randn(4, 2, members, 8, 8, dtype=torch.float64)
    state = merged_state(attention, Merge(value_in, value_out, key_in, key_out))
    assert "o_proj.bias" not in state
    for name, parameter in attention.named_parameters():
        if name.startswith("o"):
            continue
        heads = parameter.view(2, members, -1, 8, parameter[0].numel())  # group, member, query head, row
        if name.startswith("q"):
            expected = torch.einsum("giba,girbn->giran", key_out, heads)
        else:
            expected = torch.einsum("giab,girbn->gan", value_in if name.startswith("v") else key_in, heads)
        torch.testing.assert_close(state[name], expected.reshape(state[name].shape))
    columns = attention.o_proj.weight.view(48, 2, members, -1, 8)
    expected = torch.einsum("ngira,giab->ngirb", columns, value_out)
    torch.testing.assert_close(state["o_proj.weight"], expected.reshape(48, 64))
