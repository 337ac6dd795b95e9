"""DHA's heads in closed form, head counts by measured loss, and heads aligned before fusion."""

import itertools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from common.artifacts import read_grams
from common.cli import UserError
from common.evaluate import max_difference
from common.layers import Layers
from common.models import load_model
from conftest import byte_tokenizer, expect_error, run, tiny_model
from dha_models import GROUPS, SMALL, tokens
from related.dha import closed_form, rotate
from related.dha.training import all_logits


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def share_heads(model) -> None:
    """Values of each group in GROUPS span one space; keys are equal up to a complex factor per RoPE pair."""
    for index, layer in enumerate(model.model.layers):
        members = torch.tensor(GROUPS["value"][index])
        maps = normal(*members.shape, 8, 8, seed=index)
        for parameter in layer.self_attn.v_proj.parameters():
            heads = parameter.view(8, 8, -1)
            heads[members] = maps @ heads[members[:, :1]]
        members = torch.tensor(GROUPS["key"][index])
        factor = torch.complex(*normal(2, *members.shape, 4, 1, seed=9 + index))
        for parameter in layer.self_attn.k_proj.parameters():
            heads = parameter.view(8, 8, -1)
            pairs = torch.complex(heads[:, :4], heads[:, 4:])[members[:, :1]] * factor
            heads[members] = torch.cat((pairs.real, pairs.imag), 2)


@pytest.fixture(scope="module")
def calibrated(inputs, tmp_path_factory):
    """A run with a calibrated model whose heads share what they can, and that model as a Source."""
    home = tmp_path_factory.mktemp("closed-form")
    model = tiny_model(bias=True)
    share_heads(model)
    model.save_pretrained(home / "model")
    byte_tokenizer().save_pretrained(home / "model")
    run("01_calibrate.py", "--run", home, "--model", home / "model", "--text", inputs["text"],
        "--sequences", 8, "--length", 64)
    layers = Layers(str(home / "model"), torch.float32, "cpu")
    return home, closed_form.Source(layers, partial(read_grams, str(home / "calibration"), 8, "cpu"), 64)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.slow
def test_keys_and_values_are_merged_exactly_in_groups_of_their_own(calibrated):
    """To 1e-4 of the largest logit, since statistics are float32 products."""
    _, source = calibrated
    merged, expected = source.merged(GROUPS), logits_of(source.layers.model)
    assert merged.config.key_groups == GROUPS["key"] and merged.config.value_groups == GROUPS["value"]
    assert float((logits_of(merged) - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    swapped = source.merged({"key": GROUPS["value"], "value": GROUPS["key"]})
    assert float((logits_of(swapped) - expected).abs().max()) > 1e-2 * float(expected.abs().max())


@pytest.mark.slow
def test_groups_of_least_energy_are_those_that_lose_none(calibrated):
    _, source = calibrated
    losses = [closed_form.energy_losses(source.grams_of(index), 64) for index in range(3)]
    for kind, groups in GROUPS.items():
        counts = [len(layer) for layer in groups]
        assert closed_form.energy_groups([loss[kind] for loss in losses], counts) == groups
        for loss, layer in zip(losses, groups, strict=True):
            assert max(loss[kind][np.ix_(group, group)].max() for group in layer) < 1e-6


@pytest.mark.slow
def test_layers_keep_the_heads_that_they_need(calibrated):
    """With as many heads as its groups in all, each layer gets those it shares without loss."""
    _, source = calibrated
    losses = [closed_form.energy_losses(source.grams_of(index), 64) for index in range(3)]
    losses = {kind: [loss[kind] for loss in losses] for kind in closed_form.KINDS}
    needed = {kind: [len(layer) for layer in GROUPS[kind]] for kind in closed_form.KINDS}
    total = sum(map(sum, needed.values()))
    counts, costs = closed_form.measure_counts(source, losses, [1, 2, 4, 8], total, tokens(4, 64))
    assert counts == needed
    for kind, index in itertools.product(needed, range(3)):
        below = [cost for heads, cost in costs[kind][index].items() if heads < needed[kind][index]]
        assert costs[kind][index][needed[kind][index]] < 1e-6 < min(below, default=1)
        assert costs[kind][index][8] == 0


def test_the_cheapest_counts_are_those_of_all():
    costs = [dict(zip((1, 2, 4, 8), (3 * torch.rand(4, generator=torch.Generator().manual_seed(layer))
                                     ).tolist(), strict=True)) for layer in range(5)]
    for total in range(5, 41):
        every = [heads for heads in itertools.product((1, 2, 4, 8), repeat=5) if sum(heads) == total]
        if not every:
            with pytest.raises(UserError, match=f"sum to {total}"):
                closed_form.cheapest_counts(costs, total)
            continue
        cost = [sum(costs[layer][number] for layer, number in enumerate(heads)) for heads in every]
        chosen = closed_form.cheapest_counts(costs, total)
        assert sum(chosen) == total
        assert sum(costs[layer][number] for layer, number in enumerate(chosen)) == pytest.approx(min(cost))


@pytest.mark.slow
def test_closed_forms_and_aligned_heads_as_commands(inputs, tmp_path):
    """From one search: what its groups cost in steps, refits, and fusion of heads that were aligned."""
    expect_error("expected --counts search with it, found measured", "related/dha/closed_form.py", "--run",
                 tmp_path, "--groups", "search")
    heldout = tmp_path / "heldout.txt"
    heldout.write_text(Path(json.__file__).read_text())
    source = ["--model", inputs["model"], "--text", inputs["text"], "--heldout", heldout]
    run("related/dha/search.py", "--run", tmp_path, *source, *SMALL)
    search = json.loads((tmp_path / "search.json").read_text())
    text, length = search["summary"]["data"]["text"], search["summary"]["data"]["length"]
    calibrate = ["--text", text, "--length", length, "--sequences", 8]
    run("01_calibrate.py", "--run", tmp_path, "--model", inputs["model"], *calibrate)
    kl = {}
    for name, steps, flags in (
        ("uniform", 0, ["--counts", "uniform"]), ("measured", 0, ["--ladder", 1, 2, 4]),
        ("output", 0, ["--counts", "uniform", "--refit", "output"]),
        ("groups", 4, ["--counts", "search", "--groups", "search"]),
    ):
        run("related/dha/closed_form.py", "--run", tmp_path, "--name", name, *flags, "--sequences", 8,
            "--refit-sequences", 8)
        summary = json.loads((tmp_path / f"start-{name}" / "stage.json").read_text())["summary"]
        assert summary["steps_so_far"] == steps
        assert sum(map(sum, summary["heads"].values())) == 2 * 3 * search["summary"]["kv_heads"]
        kl[name] = summary["kl"]
    assert kl["output"] < kl["uniform"] > kl["measured"]
    run("related/dha/pretrain.py", "--run", tmp_path, "--name", "groups", "--checkpoint",
        tmp_path / "start-groups", "--steps", 5, "--heldout-every", 2)

    home = tmp_path / "rotated"
    expect_error("run 01_calibrate.py first", "related/dha/rotate.py", "--run", tmp_path)
    run("01_calibrate.py", "--run", home, "--model", tmp_path / "searched", *calibrate)
    run("related/dha/rotate.py", "--run", tmp_path)
    rotated = json.loads((home / "search.json").read_text())
    assert rotated["groups"] == search["groups"] and rotated["summary"] == search["summary"]
    before, after = (all_logits(load_model(str(path / "searched")), tokens()) for path in (tmp_path, home))
    assert max_difference(before, after) < 1e-4
    run("related/dha/pool.py", "--run", home, "--weights", "searched")
    starts = {"measured": tmp_path / "start-measured", "pooled": home / "start-unfused"}
    run("related/dha/starts.py", "--run", tmp_path, "--models",
        *(f"{name}={path}" for name, path in starts.items()))
    rows = json.loads((tmp_path / "starts.json").read_text())["summary"]["rows"]
    assert list(rows) == ["source", *starts] and rows["source"]["lost"] == rows["source"]["kl"] == 0
    for row in rows.values():
        assert row["lost"] == pytest.approx(row["loss"] - rows["source"]["loss"])
    assert rows["measured"]["kl"] < rows["pooled"]["kl"]
    assert rows["measured"]["cache_bytes_per_token"] == rows["pooled"]["cache_bytes_per_token"]


@torch.no_grad()
@pytest.mark.slow
def test_rotated_heads_are_nearer_to_their_own_groups(calibrated):
    """Heads equal up to rotations, keys and values in groups of their own, become equal; nothing else is."""
    home, _ = calibrated
    model = tiny_model()
    spin = [torch.linalg.qr(normal(8, 8, seed=head))[0] for head in range(8)]
    angle = torch.polar(torch.ones(8, 4), normal(8, 4, seed=3))
    for index, layer in enumerate(model.model.layers):
        values, keys = (getattr(layer.self_attn, name).weight.view(8, 8, -1) for name in ("v_proj", "k_proj"))
        for group in GROUPS["value"][index]:
            first = values[group[0]].clone()
            for head in group:
                values[head] = spin[head] @ first
        for group in GROUPS["key"][index]:
            first = torch.complex(keys[group[0], :4], keys[group[0], 4:])
            for head in group:
                turned = angle[head][:, None] * first
                keys[head] = torch.cat((turned.real, turned.imag))
    model.save_pretrained(home / "spun")
    byte_tokenizer().save_pretrained(home / "spun")
    text = json.loads((home / "calibration" / "stage.json").read_text())["arguments"]["text"]
    run("01_calibrate.py", "--run", home / "spin", "--model", home / "spun", "--text", text,
        "--sequences", 8, "--length", 64)
    expected = logits_of(model)
    for index, layer in enumerate(model.model.layers):
        grams = read_grams(str(home / "spin" / "calibration"), 8, "cpu", index)
        rotate.rotate_layer(layer.self_attn, grams, GROUPS["key"][index], GROUPS["value"][index])
        for kind, name in (("value", "v_proj"), ("key", "k_proj")):
            heads = getattr(layer.self_attn, name).weight.view(8, 8, -1)
            for group in GROUPS[kind][index]:
                torch.testing.assert_close(heads[group], heads[group[:1]].expand(len(group), -1, -1),
                                           rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-4)
