"""Closed-form merging by definition: exact where possible, a singular value decomposition elsewhere."""

from dataclasses import astuple

import numpy as np
import pytest
import torch

from common.closed_form.keys import alternate, merge_keys, start_by_pairs
from common.closed_form.layer import (
    RIDGE,
    before_norms,
    closed_form_layer,
    key_fit,
    merging_loss,
    with_energies,
)
from common.closed_form.values import merge_values, value_loss
from common.method.merge import Merge
from common.method.rope import rotate_pairs, to_matrix
from common.method.stats import LayerGrams, LayerStats, group_blocks
from common.models.calibration import Collector
from common.models.families import geometry
from models import tiny_model
from reference import merge_model, normal

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
TOKENS = torch.randint(0, 256, (6, 40), generator=torch.Generator().manual_seed(0))


def doubled(**options):
    return tiny_model(bias=True, **options).double()


@torch.no_grad()
def statistics(model) -> list[LayerGrams]:
    """Every layer's Grams on TOKENS, by stage 1."""
    shape, nothing_sampled = geometry(model.config), torch.arange(0)
    collectors = [Collector(layer, "", shape, nothing_sampled, "cpu") for layer in model.model.layers]
    for collector in collectors:
        collector.begin(0, 0)
    model.model(input_ids=TOKENS, use_cache=False)
    frequencies = {"rope.frequencies": model.model.rotary_emb.inv_freq.double()}
    return [LayerGrams(collector.finish() | frequencies, shape.kv_heads) for collector in collectors]


def grams_of(values, keys, queries, outputs) -> LayerGrams:
    """Those of six heads of eight coordinates: [n, 6, 8], and outputs [6, hidden, 8]."""
    stats = LayerStats(6, 8)
    stats.update_values(values)
    stats.update_keys(keys)
    stats.update_queries(queries)
    tensors = {"output.gram": outputs.mT @ outputs, "rope.frequencies": FREQUENCIES}
    return LayerGrams(stats.tensors() | tensors, 6)


def unrotated_merge(grams: LayerGrams, groups: torch.Tensor) -> Merge:
    value_rotation = torch.eye(8).double().expand(*groups.shape, 8, 8)
    key_rotation = torch.ones(*groups.shape, 4, dtype=torch.complex128)
    return closed_form_layer(grams, groups, value_rotation, key_rotation, 64)


def merged_by(model, kv_heads: int):
    groups = torch.arange(model.config.num_key_value_heads).view(kv_heads, -1)
    merges = [unrotated_merge(grams, groups) for grams in statistics(model)]
    return merge_model(model, kv_heads, merges)


def difference(a, b) -> float:
    with torch.no_grad():
        return float((a(TOKENS).logits - b(TOKENS).logits).abs().max())


def share_heads(model, groups: int) -> None:
    """In each group of adjacent heads: values of one space, keys equal up to a factor per RoPE pair."""
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        attention = layer.self_attn
        for parameter in attention.v_proj.parameters():
            heads = parameter.data.view(groups, -1, 8, *parameter.shape[1:])
            maps = normal(groups, heads.shape[1], 8, 8, seed=7)
            heads.copy_((maps @ heads[:, :1].reshape(groups, 1, 8, -1)).view_as(heads))
        shape = 2, groups, 8 // groups, 4
        factor = torch.complex(*torch.randn(*shape, dtype=torch.float64, generator=generator))
        for parameter in attention.k_proj.parameters():
            heads = parameter.data.view(groups, -1, 8, *parameter.shape[1:])
            first = heads[:, :1].reshape(groups, 1, 8, -1)
            pairs = torch.complex(first[:, :, :4], first[:, :, 4:]) * factor[..., None]
            heads.copy_(torch.cat((pairs.real, pairs.imag), 2).view_as(heads))


@pytest.mark.parametrize("source_heads, kv_heads", [(8, 8), (4, 4), (8, 2)])
def test_heads_that_share_what_they_can_share_are_merged_exactly(source_heads, kv_heads):
    """To 1e-5 of the logits, since statistics are float32 products; means and rope_rotations are far off.

    Groups of one head are exact, also of a source that is GQA already: with what its query heads make of it.
    """
    model, alone = doubled(num_key_value_heads=source_heads), kv_heads == source_heads
    if not alone:
        share_heads(model, kv_heads)
    assert difference(model, merged_by(model, kv_heads)) < (1e-9 if alone else 1e-4)
    assert alone or difference(model, merge_model(model, kv_heads)) > 1e-1


@pytest.mark.parametrize(("model_type", "joint"), [("llama", False), ("qwen3", False), ("olmo2", True)])
def test_statistics_know_a_norm_over_all_heads_and_leave_no_hook(model_type, joint):
    model = tiny_model(model_type=model_type, num_key_value_heads=4).double()
    for grams in statistics(model):
        assert grams.joint_norm == joint and grams.output.shape == (4, 8, 8)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("strength", [1e-5, 0.0])
@pytest.mark.parametrize("members", [1, 2, 4])
def test_values_are_the_truncated_svd_of_the_stacked_maps(members, strength):
    """W_O,i decode_i sum_j encode_j W_V,j S^(1/2): of rank d, the best for the stacked W_O,i W_V,i S^(1/2).

    A direction of the values that outputs read at 1e-5 of the others' strength counts, too; one that none of
    them reads does not blow the map up. Of all orthogonal coordinates those nearest to the mean of the heads:
    sum_n <mean, v~> is largest where sum_n mean v~^T is symmetric and not negative.
    """
    values, outputs = normal(members, 8, 30, seed=1), normal(members, 30, 8, seed=2)
    outputs[..., 0] *= strength
    outputs = outputs @ torch.linalg.qr(normal(8, 8, seed=4)).Q
    seen = values @ (normal(30, 30, seed=3) / 5)  # the factor is S^(1/2) up to a rotation
    gram = torch.einsum("ian,jbn->ijab", seen, seen)
    encode, decode = merge_values(gram[None], (outputs.mT @ outputs)[None])
    tiny = merge_values(1e-9 * gram[None], (outputs.mT @ outputs)[None])
    torch.testing.assert_close(tiny, (encode, decode))  # whatever the values' scale is
    mean, read = merge_values(0 * gram[None], (outputs.mT @ outputs)[None])  # of values that are zero
    assert (mean == torch.eye(8) / members).all() and (read == torch.eye(8)).all()
    stacked = (outputs @ seen).reshape(-1, 30).numpy()
    left, singular, right = np.linalg.svd(stacked, full_matrices=False)
    best = (left[:, :8] * singular[:8]) @ right[:8]
    shared = torch.einsum("jab,jbn->an", encode[0], seen)
    ours = (outputs @ decode[0] @ shared).reshape(-1, 30).numpy()
    np.testing.assert_allclose(ours, best, atol=1e-10 * np.abs(best).max())
    assert strength or decode.abs().max() < 10
    assert float(shared.square().sum()) == pytest.approx(float(seen.square().sum()) / members)
    product = seen.mean(0) @ shared.mT
    torch.testing.assert_close(product, product.mT, rtol=0, atol=1e-9)
    assert (torch.linalg.eigvalsh(product) > (0 if strength else -1e-9)).all()


@pytest.mark.parametrize("members", [1, 2, 4])
def test_keys_are_the_truncated_svd_of_each_pair(members):
    generator = torch.Generator().manual_seed(2)
    keys = torch.complex(*torch.randn(2, members, 50, 4, dtype=torch.float64, generator=generator))
    weights = torch.rand(members, 4, dtype=torch.float64, generator=generator)
    gram = torch.einsum("inp,jnp->ijp", keys.conj(), keys)
    encode, factor = (part[0] for part in merge_keys(gram[None], weights[None]))
    shared = torch.einsum("jp,jnp->np", encode, keys)
    for pair in range(4):
        weighted = (weights[:, None, pair] * keys[:, :, pair]).numpy()
        left, singular, right = np.linalg.svd(weighted, full_matrices=False)
        best = singular[0] * np.outer(left[:, 0], right[0])
        ours = (weights[:, pair, None] * factor[:, pair, None] * shared[None, :, pair]).numpy()
        np.testing.assert_allclose(ours, best, atol=1e-10)
    mean_energy = keys.abs().square().sum(1).mean(0)
    torch.testing.assert_close(shared.abs().square().sum(0), mean_energy, rtol=1e-10, atol=0)
    assert ((shared.conj() * keys.mean(0)).sum(0).real > 0).all()  # the phase of the mean
    torch.testing.assert_close(merge_keys(1e-9 * gram[None], weights[None])[0][0], encode)
    mean, read = (part[0] for part in merge_keys(0 * gram[None], weights[None]))  # of pairs that are zero
    assert (mean == 1 / members).all() and (read == 1).all()


def test_energy_scores_are_what_merging_the_pair_loses():
    grams = statistics(doubled(num_key_value_heads=4))[0]
    value, output = grams.value("raw"), grams.output
    of_values, both = value_loss(value, output), merging_loss(grams, 64)
    total = sum(float(torch.trace(output[i] @ value[i, i])) for i in range(4))
    alone = key_fit(grams, torch.arange(4)[:, None], None, 64)
    total_key = float((alone.query * alone.variance).sum())
    for i, j in ((0, 1), (1, 3), (3, 2)):
        pair = torch.tensor([[i, j]])
        encode, decode = merge_values(group_blocks(value, pair), output[pair])
        stacked = group_blocks(value, pair)[0].permute(0, 2, 1, 3).reshape(16, 16)
        lost = 0.0
        for place, head in enumerate((i, j)):  # sum_n |W_O (v - decode v~)|^2, written out
            rest = torch.zeros(8, 16, dtype=torch.float64)
            rest[:, 8 * place : 8 * place + 8] = torch.eye(8)
            rest -= decode[0, place] @ torch.cat(list(encode[0]), 1)
            lost += float(torch.trace(rest @ stacked @ rest.T @ output[head]))
        assert float(of_values[i, j]) == pytest.approx(lost / total, rel=1e-6)
        fit = key_fit(grams, pair, None, 64)
        first, best = (float(alternate(fit, *start_by_pairs(fit), rounds)[2]) for rounds in (2, 50))
        assert float(both[i, j] - of_values[i, j]) == pytest.approx(first / total_key, rel=1e-9)
        assert best < first < 1.5 * best
    assert not value_loss(0 * value, output).any()
    for loss in (of_values, both):
        assert loss.dtype == torch.float64 and torch.equal(loss, loss.T)
        assert (loss.diagonal() == 0).all() and (loss + torch.eye(4) > 0).all()


def test_the_merge_of_a_rotated_layer_is_that_of_its_rotated_vectors():
    """closed_form_layer against vectors: all rotated first, then their Grams."""
    groups = torch.tensor([[4, 1, 3], [5, 0, 2]])
    mix = normal(6, 8, 8, seed=9)  # heads that differ in more than a rotation
    values, keys = (torch.einsum("nzd,hde->nhe", normal(50, 1, 8, seed=seed), mix) for seed in (1, 2))
    values, keys = values + normal(50, 6, 8, seed=3), keys + normal(50, 6, 8, seed=4)
    queries, outputs = normal(50, 6, 8, seed=5) * torch.arange(1, 9), normal(6, 20, 8, seed=6)

    grams = grams_of(values, keys, queries, outputs)
    value_rotation = torch.linalg.qr(normal(2, 3, 8, 8, seed=7)).Q
    key_rotation = torch.polar(torch.ones(2, 3, 4).double(), 3 * normal(2, 3, 4, seed=8))
    merge = closed_form_layer(grams, groups, value_rotation, key_rotation, 64)
    after = [tensor.clone() for tensor in (values, keys, queries, outputs)]
    for place, head in np.ndenumerate(groups.numpy()):
        for heads in (after[0].transpose(0, 1), after[3]):
            heads[head] = heads[head] @ value_rotation[place].T
        for heads in after[1:3]:
            heads[:, head] = rotate_pairs(heads[:, head].T[None], key_rotation[place][None])[0].T
    expected = unrotated_merge(grams_of(*after), groups)
    for ours, theirs in zip(astuple(merge)[:4], astuple(expected)[:4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    fit, close = key_fit(grams, groups, to_matrix(key_rotation), 64), {"rtol": 1e-4, "atol": 1e-4}
    keys, queries = (tensor[:, groups] for tensor in after[1:3])  # rotated, [n, G, D, d]
    torch.testing.assert_close(fit.mean, keys.mean(0), **close)
    torch.testing.assert_close(fit.gram, torch.einsum("ngia,ngjb->gijab", keys, keys) / 50, **close)
    torch.testing.assert_close(fit.query, torch.einsum("ngia,ngib->giab", queries, queries) / 50, **close)
    energies = with_energies(merge, grams, groups, key_rotation, queries=True)
    shared = torch.einsum("giab,ngib->nga", merge.key_in, keys)
    torch.testing.assert_close(energies.key_energy, shared.square().mean(0), **close)
    mapped = torch.einsum("giba,ngib->ngia", merge.key_out, queries)
    torch.testing.assert_close(energies.query_energy, mapped.square().mean(0), **close)
    assert with_energies(merge, grams, groups, key_rotation, queries=False).query_energy is None


def test_shared_keys_before_norms_of_single_heads_are_regressions_of_those_behind_them():
    """Ridge regressions on keys over their level, around each coordinate's own, group by group."""
    keys = normal(60, 4, 8) * (1 + normal(60, 1, 1, seed=1).abs()) @ normal(8, 8, seed=2)
    queries, weight = normal(60, 4, 8, seed=4), normal(8, seed=3)
    normed = weight * keys / keys.square().mean(-1, keepdim=True).sqrt()
    stats = LayerStats(4, 8, head_norms=True)
    for part in zip(keys.split(25), normed.split(25), strict=True):
        stats.update_keys(part[0])
        stats.update_normed_keys(*part)
    stats.update_queries(queries)
    groups, signs = torch.tensor([[2, 0], [1, 3]]), normal(2, 2, 4, seed=5).sign()
    merge = Merge(*normal(4, 2, 2, 8, 8, seed=6))
    ones = torch.ones(4).double()
    grams = LayerGrams(stats.tensors() | {"rope.frequencies": ones, "rope.scale": 2 * ones}, 4)
    expected = torch.einsum("nia,njb->ijab", normed, normed)
    torch.testing.assert_close(grams.rope_key, expected, rtol=1e-5, atol=1e-3)
    found = before_norms(merge, grams, groups, signs.to(torch.complex128))
    level = keys / keys.square().mean((1, 2), keepdim=True).sqrt()
    flip, close = torch.cat((signs, signs), -1), {"rtol": 1e-4, "atol": 1e-4}
    source, behind, query = (flip * vectors[:, groups] for vectors in (level, normed, queries))
    own = (behind * source).sum(0) / source.square().sum(0)
    for group in range(2):
        x = source[:, group].flatten(1)
        goal = torch.einsum("jab,njb->na", merge.key_in[group], behind[:, group])
        start = torch.cat([*(merge.key_in[group] * own[group, :, None])], -1)
        ridge = RIDGE * x.square().sum(0).mean() * torch.eye(16).double()
        best = start + torch.linalg.solve(x.T @ x + ridge, x.T @ (goal - x @ start.T)).T
        torch.testing.assert_close(torch.cat([*found.key_in[group]], -1), best, **close)
        torch.testing.assert_close(found.key_energy[group], (x @ best.T).square().mean(0), **close)
    spread = source.square().mean((0, 3))[..., None, None]
    variance = (found.key_in.square() * spread).sum((1, 3)).mean(0)
    torch.testing.assert_close(found.key_variance, variance, **close)
    mapped = torch.einsum("giba,ngib->ngia", merge.key_out, query)
    torch.testing.assert_close(found.query_energy, mapped.square().mean(0), **close)
    fit = key_fit(grams, groups, None, 64)  # what all keys share counts
    assert not fit.mean.any() and (fit.turns.gain == 4).all()
