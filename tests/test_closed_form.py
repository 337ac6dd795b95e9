"""Closed-form merging against the definitions: exact where it can be, the singular value decomposition where it cannot."""

import copy
import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.layers import Spool, run_layer
from common.method import closed_form
from common.method.fuse import fuse_layer, merge_model
from common.method.procrustes import align_keys, align_values
from common.method.refit import Moments, Refit, best_fit
from common.method.stats import unpack_half
from common.models import geometry
from conftest import tiny_model

TOKENS = torch.randint(0, 256, (6, 40), generator=torch.Generator().manual_seed(0))


def doubled(**options):
    return tiny_model(bias=True, **options).double()


@torch.no_grad()
def statistics(model):
    """What stage 1 keeps of every layer, on TOKENS; sums in float64 throughout."""
    stage, shape = importlib.import_module("01_calibrate"), geometry(model.config)
    collectors = [stage.Collector(layer, index, shape, torch.arange(4), "cpu") for index, layer in enumerate(model.model.layers)]
    for collector in collectors:
        collector.begin(0, TOKENS.numel())
    model.model(input_ids=TOKENS, use_cache=False)
    for index, collector in enumerate(collectors):
        tensors, stats = collector.finish(), collector.stats
        yield (unpack_half(stats.value["raw"], shape.kv_heads), tensors[f"layers.{index}.output.gram"], stats.key["raw"], stats.query)


def blocks(gram, groups):
    return gram[groups[:, :, None], groups[:, None, :]]


def merged_by(model, kv_heads: int):
    groups, merges = torch.arange(geometry(model.config).kv_heads).view(kv_heads, -1), []
    for value, output, key, query in statistics(model):
        merges.append(closed_form.closed_form(blocks(value, groups), output[groups], blocks(key, groups), closed_form.key_weights(query)[groups]))
    return merge_model(model, kv_heads, merges)


def difference(a, b) -> float:
    with torch.no_grad():
        return float((a(TOKENS).logits - b(TOKENS).logits).abs().max())


@pytest.mark.parametrize("source_heads", [8, 4])
def test_groups_of_one_head_are_exact(source_heads):
    """Of a source that is GQA already, with what its query heads make of a shared head, too."""
    model = doubled(num_key_value_heads=source_heads)
    assert difference(model, merged_by(model, source_heads)) < 1e-9


def test_weights_of_a_gqa_source_are_sums_over_the_query_heads_of_each_key_value_head():
    model = doubled(num_key_value_heads=4)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, given, output: seen.append(output.detach().view(-1, 8, 8)))
    for (_, output, _, query), layer, queries in zip(list(statistics(model)), model.model.layers, seen, strict=True):
        columns = layer.self_attn.o_proj.weight.detach().view(48, 8, 8)
        energy = queries[..., :4].square().sum(0) + queries[..., 4:].square().sum(0)
        for head in range(4):
            readers = (2 * head, 2 * head + 1)
            torch.testing.assert_close(output[head], sum(columns[:, h].T @ columns[:, h] for h in readers))
            torch.testing.assert_close(query[head], sum(energy[h] for h in readers), rtol=1e-5, atol=0)


def share_heads(model, groups: int) -> None:
    """Within each group of adjacent heads: values that span one space, keys equal up to scale and rotation per RoPE pair."""
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        attention = layer.self_attn
        for parameter in attention.v_proj.parameters():
            heads = parameter.data.view(groups, -1, 8, *parameter.shape[1:])
            maps = torch.randn(groups, heads.shape[1], 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
            heads.copy_((maps @ heads[:, :1].reshape(groups, 1, 8, -1)).view_as(heads))
        factor = torch.complex(*torch.randn(2, groups, 8 // groups, 4, dtype=torch.float64, generator=generator))
        for parameter in attention.k_proj.parameters():
            heads = parameter.data.view(groups, -1, 8, *parameter.shape[1:])
            first = heads[:, :1].reshape(groups, 1, 8, -1)
            pairs = torch.complex(first[:, :, :4], first[:, :, 4:]) * factor[..., None]
            heads.copy_(torch.cat((pairs.real, pairs.imag), 2).view_as(heads))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_that_share_what_they_can_share_are_merged_exactly(kv_heads):
    """Statistics come from float32 products, so what is exact in theory is so to 1e-5 of the logits; means and rotations are far off."""
    model = doubled()
    share_heads(model, kv_heads)
    merged = merged_by(model, kv_heads)
    assert difference(model, merged) < 1e-4 < 1e-1 < difference(model, merge_model(model, kv_heads))
    groups, faulty = torch.arange(8).view(kv_heads, -1), []
    for value, output, key, query in statistics(model):
        merge = closed_form.closed_form(blocks(value, groups), output[groups], blocks(key, groups), closed_form.key_weights(query)[groups])
        faulty.append(replace(merge, key_out=merge.key_out.conj()))  # the fault: queries turned the wrong way
    assert difference(model, merge_model(model, kv_heads, faulty)) > 1e-1


def test_rotations_cannot_merge_what_differs_in_scale():
    """Heads that are twice each other: a rotation and a mean lose something, the closed form nothing."""
    model = doubled()
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for parameter in projection.parameters():
                heads = parameter.data.view(2, 4, 8, -1)
                heads.copy_(heads[:, :1] * torch.tensor([1.0, 2.0, 0.5, 3.0]).double()[None, :, None, None])
    groups = torch.arange(8).view(2, 4)
    rotated = copy.deepcopy(model)
    for layer, (value, _, key, _) in zip(rotated.model.layers, statistics(model), strict=True):
        fuse_layer(layer.self_attn, list(range(8)), align_values(blocks(value, groups)).flatten(0, 1), align_keys(blocks(key, groups)).flatten(0, 1))
    assert difference(model, rotated) < 1e-9
    assert difference(model, merged_by(model, 2)) < 1e-4 < 1e-1 < difference(model, merge_model(rotated, 2))


@pytest.mark.parametrize("members", [1, 2, 4])
def test_values_are_the_truncated_svd_of_the_stacked_maps(members):
    """W_O,i read_i sum_j combine_j W_V,j S^(1/2) is the best approximation of rank d of the stacked W_O,i W_V,i S^(1/2)."""
    generator = torch.Generator().manual_seed(1)
    values, outputs = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((members, 8, 30), (members, 30, 8)))
    factor = torch.randn(30, 30, dtype=torch.float64, generator=generator) / 5  # S = factor factor^T stands for S^(1/2) up to a rotation
    seen = values @ factor
    combine, read = closed_form.merge_values(torch.einsum("ian,jbn->ijab", seen, seen)[None], (outputs.mT @ outputs)[None])
    stacked = (outputs @ seen).reshape(-1, 30).numpy()
    left, singular, right = np.linalg.svd(stacked, full_matrices=False)
    best = (left[:, :8] * singular[:8]) @ right[:8]
    shared = torch.einsum("jab,jbn->an", combine[0], seen)
    ours = (outputs @ read[0] @ shared).reshape(-1, 30).numpy()
    np.testing.assert_allclose(ours, best, atol=1e-10 * np.abs(best).max())
    assert float(shared.square().sum()) == pytest.approx(float(seen.square().sum()) / members)  # the mean of the heads' energies


@pytest.mark.parametrize("members", [1, 2, 4])
def test_keys_are_the_truncated_svd_of_each_pair(members):
    generator = torch.Generator().manual_seed(2)
    keys = torch.complex(*torch.randn(2, members, 50, 4, dtype=torch.float64, generator=generator))
    weights = torch.rand(members, 4, dtype=torch.float64, generator=generator)
    gram = torch.einsum("inp,jnp->ijp", keys.conj(), keys)
    combine, factor = (part[0] for part in closed_form.merge_keys(gram[None], weights[None]))
    shared = torch.einsum("jp,jnp->np", combine, keys)
    for pair in range(4):
        weighted = (weights[:, None, pair] * keys[:, :, pair]).numpy()
        left, singular, right = np.linalg.svd(weighted, full_matrices=False)
        best = singular[0] * np.outer(left[:, 0], right[0])
        ours = (weights[:, pair, None] * factor[:, pair, None] * shared[None, :, pair]).numpy()
        np.testing.assert_allclose(ours, best, atol=1e-10)
    np.testing.assert_allclose(shared.abs().square().sum(0).numpy(), keys.abs().square().sum(1).mean(0).numpy(), rtol=1e-10)
    mean = keys.mean(0)
    assert (torch.einsum("np,np->p", shared.conj(), mean).real > 0).all()  # the phase of the mean


def test_a_query_that_never_looks_does_not_blow_its_factor_up():
    keys = torch.complex(*torch.randn(2, 3, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    energy = torch.ones(3, 4, dtype=torch.float64)
    energy[1] = 1e-300
    energy[2, 0] = 0
    keys[:, :, 3] = 0  # a pair whose keys are zero
    weights = closed_form.key_weights(energy)
    combine, factor = (part[0] for part in closed_form.merge_keys(torch.einsum("inp,jnp->ijp", keys.conj(), keys)[None], weights[None]))
    shared = torch.einsum("jp,jnp->np", combine, keys)
    bound = (keys.abs().square().sum(1) / shared.abs().square().sum(0).clamp(min=1e-300)).sqrt()
    assert torch.isfinite(factor.abs()).all() and (factor.abs()[:, :3] <= bound[:, :3] + 1e-9).all() and (factor[:, 3] == 1).all()
    assert torch.isfinite(combine.abs()).all() and (closed_form.key_weights(torch.zeros(2, 4)) == 1).all()


def test_energy_scores_are_what_merging_the_pair_loses():
    value, output, key, query = next(iter(statistics(doubled())))
    weights = closed_form.key_weights(query)
    value_loss, key_loss = closed_form.value_loss(value, output), closed_form.key_loss(key, weights)
    forward = closed_form.symmetric_root(output)[0]
    total = sum(float(torch.trace(forward[i] @ value[i, i] @ forward[i])) for i in range(8))
    total_key = float((torch.einsum("iip->ip", key).real * weights.square()).sum())
    for i, j in ((0, 1), (2, 7), (5, 3)):
        pair = torch.tensor([[i, j]])
        combine, read = closed_form.merge_values(blocks(value, pair), output[pair])
        lost = 0.0
        for place, head in enumerate((i, j)):  # sum_n |W_O (v - read v~)|^2, written out
            take = torch.zeros(8, 16, dtype=torch.float64)
            take[:, 8 * place : 8 * place + 8] = torch.eye(8)
            rest = take - read[0, place] @ torch.cat(list(combine[0]), 1)
            lost += float(torch.trace(rest @ blocks(value, pair)[0].permute(0, 2, 1, 3).reshape(16, 16) @ rest.T @ output[head]))
        assert float(value_loss[i, j]) == pytest.approx(lost / total, rel=1e-6)
        combine, factor = closed_form.merge_keys(blocks(key, pair), weights[pair])
        lost = 0.0
        for place, head in enumerate((i, j)):
            rest = torch.eye(2, dtype=torch.complex128)[place][:, None] - factor[0, place] * combine[0]  # [2, P]
            lost += float((torch.einsum("ip,ijp,jp->p", rest.conj(), blocks(key, pair)[0], rest).real * weights[head].square()).sum())
        assert float(key_loss[i, j]) == pytest.approx(lost / total_key, rel=1e-6)
    for loss in (value_loss, key_loss):
        assert torch.equal(loss, loss.T) and (loss.diagonal() == 0).all() and (loss + torch.eye(8) > 0).all()


def test_best_fit_is_ridge_regression():
    generator = torch.Generator().manual_seed(4)
    h, weight = torch.randn(300, 6, dtype=torch.float64, generator=generator), torch.randn(5, 6, dtype=torch.float64, generator=generator)
    y = h @ torch.randn(6, 5, dtype=torch.float64, generator=generator) + 0.1 * torch.randn(300, 5, dtype=torch.float64, generator=generator)
    parts = [Moments(a.T @ a, b.T @ a, float(b.square().sum())) for a, b in ((h[:200], y[:200]), (h[200:], y[200:]))]
    found, ridge, before, after = best_fit(weight, *parts)
    strength = ridge * float(parts[0].inputs.diagonal().mean())
    rows = np.vstack((h[:200].numpy(), np.sqrt(strength) * np.eye(6)))
    expected = np.linalg.lstsq(rows, np.vstack((y[:200].numpy(), np.sqrt(strength) * weight.numpy().T)), rcond=None)[0].T
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-10)
    assert before == pytest.approx(float((y[200:] - h[200:] @ weight.T).square().sum() / y[200:].square().sum()))
    assert after == pytest.approx(float((y[200:] - h[200:] @ found.T).square().sum() / y[200:].square().sum()))
    exact = torch.linalg.solve(parts[1].inputs, parts[1].cross.T).T  # what held-out text itself would choose: no fit can do better
    kept, ridge, before, after = best_fit(exact, *parts)
    assert ridge is None and torch.equal(kept, exact) and before == after


def refit(model, merged, batch: int) -> list[dict]:
    """Every layer of `merged` refitted on TOKENS, in place."""
    wanted, ours = (Spool(model.model.embed_tokens(part) for part in TOKENS.split(batch)) for _ in range(2))
    steps = Refit(lambda layer, hidden: run_layer(model, layer, hidden), wanted, ours)
    for layers in zip(model.model.layers, merged.model.layers, strict=True):
        steps.layer(*layers)
    return steps.figures


def test_refit_brings_every_layer_nearer_and_an_exact_model_stays():
    model = tiny_model()
    merged = merge_model(model, 2)
    with torch.no_grad():
        apart = float((model(TOKENS).logits - merged(TOKENS).logits).square().mean())
        figures = refit(model, merged, batch=2)
        assert len(figures) == 3 and all(layer["after"] <= layer["before"] for layer in figures) and figures[0]["after"] < figures[0]["before"]
        assert float((model(TOKENS).logits - merged(TOKENS).logits).square().mean()) < apart
        same = merge_model(model, 8)
        refit(model, same, batch=4)
        torch.testing.assert_close(same(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-3)
