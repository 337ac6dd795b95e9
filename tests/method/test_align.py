"""Stage 4 and the rotations it finds, against explicit vectors, plain transformers and deliberate faults."""

import hashlib
import importlib
import json
import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common import layers
from common.artifacts import check_input, read_record
from common.cli import UserError
from common.method import merge as fuse
from common.method import refit as refitting
from common.method.closed_form import closed_form_layer, energy_lost
from common.method.procrustes import align_keys, align_layer, align_values, within_group_cosine
from common.method.rope import rotate_pairs
from common.method.stats import LayerGrams, LayerStats, group_blocks, key_gram, to_unit
from helpers import ROOT, calibrated_layer, copy_run, expect_error, run, save_tiny
from students import merge_model
from test_procrustes import correlated, value_gram

H, D = 6, 8
GROUPS = torch.tensor([[4, 1, 3], [5, 0, 2]])


@pytest.fixture
def vectors() -> dict[str, torch.Tensor]:
    return {"value": correlated(1, H, 1.0), "key": correlated(2, H, 1.0)}


@pytest.fixture
def grams(vectors) -> LayerGrams:
    stats = LayerStats(H, D)
    stats.update_values(vectors["value"])
    stats.update_keys(vectors["key"])
    return LayerGrams(stats.tensors() | {"key.free": torch.ones(D // 2, dtype=torch.bool)}, H)


def test_group_blocks_are_the_groups_own_blocks(vectors):
    blocks = group_blocks(value_gram(vectors["value"]), GROUPS)
    for group, heads in enumerate(GROUPS.tolist()):
        expected = value_gram(vectors["value"][:, heads])
        assert torch.equal(blocks[group], expected)
        assert not torch.equal(expected, expected.transpose(0, 1))


@pytest.mark.parametrize("criterion", ["cos", "dist"])
def test_cos_aligns_unit_norm_vectors_and_dist_raw_ones(vectors, grams, criterion):
    value_rotation, key_rotation = align_layer(grams, GROUPS, criterion)
    for group, heads in enumerate(GROUPS.tolist()):
        chosen = {kind: heads_of[:, heads] for kind, heads_of in vectors.items()}
        if criterion == "cos":
            chosen = {kind: to_unit(part) for kind, part in chosen.items()}
        values = align_values(value_gram(chosen["value"]))
        keys = align_keys(key_gram(chosen["key"]))
        torch.testing.assert_close(value_rotation[group], values, rtol=0, atol=1e-2)
        torch.testing.assert_close(key_rotation[group], keys, rtol=0, atol=1e-2)
    other, _ = align_layer(grams, GROUPS, "dist" if criterion == "cos" else "cos")
    assert (other - value_rotation).abs().max() > 0.1


def test_no_rotation_is_the_identity(grams):
    value_rotation, key_rotation = align_layer(grams, GROUPS, "none")
    identity = torch.eye(D, dtype=torch.float64).expand(2, 3, D, D)
    ones = torch.ones(2, 3, D // 2, dtype=torch.complex128)
    torch.testing.assert_close((value_rotation, key_rotation), (identity, ones), rtol=0, atol=0)  # and dtypes


def test_only_sign_flips_where_pairs_are_not_free(grams):
    grams.free = torch.tensor([True, False, True, False])
    _, rotation = align_layer(grams, GROUPS, "dist")
    assert (rotation[..., [1, 3]].abs() == 1).all() and not rotation[..., [1, 3]].imag.any()
    assert rotation[..., [0, 2]].imag.any()


def test_cosine_within_groups_is_that_of_the_rotated_vectors(vectors, grams):
    """By rotations far from any alignment, so that a conjugate or a transpose would show."""
    value_rotation = torch.linalg.qr(torch.randn(2, 3, D, D, dtype=torch.float64)).Q
    angles = 6.3 * torch.rand(2, 3, D // 2, dtype=torch.float64)
    key_rotation = torch.polar(torch.ones_like(angles), angles)
    cosine = within_group_cosine(grams, GROUPS, value_rotation, key_rotation)
    values, keys = (to_unit(vectors[kind])[:, GROUPS] for kind in ("value", "key"))  # [N, G, D, d]
    turned = rotate_pairs(keys.permute(1, 2, 3, 0).flatten(0, 1), key_rotation.flatten(0, 1))
    rotated = {
        "value_before": values,
        "value_after": torch.einsum("giab,ngib->ngia", value_rotation, values),
        "key_before": keys,
        "key_after": turned.unflatten(0, GROUPS.shape).permute(3, 0, 1, 2),
    }
    for name, heads in rotated.items():
        pairs = [(heads[:, :, i] * heads[:, :, j]).sum(-1).mean() for i, j in ((0, 1), (0, 2), (1, 2))]
        assert cosine[name] == pytest.approx(float(sum(pairs)) / 3, abs=1e-6)


def weights(path: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def digests(home: Path) -> dict[str, str]:
    return {str(file.relative_to(home)): hashlib.sha256(file.read_bytes()).hexdigest()
            for name in ("aligned", "merged") for file in (home / name).rglob("*")}


@pytest.mark.parametrize(("criterion", "flags", "context"), [
    ("cos", ["--merge", "mean"], None),
    ("dist", ["--merge", "closed-form"], 256),  # the model's positions
    ("dist", ["--merge", "closed-form", "--key-context", 20], 20),
    ("dist", ["--merge", "closed-form", "--merge-keys", "pairs"], None),
])
def test_aligned_and_merged_are_what_the_calibration_asks_for(
    aligned_run, tmp_path, criterion, flags, context
):
    """From the artifacts alone: the source's weights fused with align_layer's rotations, then merged."""
    home = copy_run(aligned_run, tmp_path / "run")
    run("04_align.py", "--run", home, "--force", "--rotate", criterion, *flags)
    record = read_record(str(home / "groups.json"), "03_group.py")
    groups = torch.tensor(record["groups"])
    source, merges, lost = AutoModelForCausalLM.from_pretrained(record["model"]["path"]), [], []
    cosines = []
    for index, layer in enumerate(source.model.layers):
        grams = LayerGrams(calibrated_layer(home / "calibration", index), 8)
        value_rotation, key_rotation = rotation = align_layer(grams, groups[index], criterion)
        order = groups[index].flatten().tolist()
        fuse.fuse_layer(layer.self_attn, order, value_rotation.flatten(0, 1), key_rotation.flatten(0, 1))
        found = within_group_cosine(grams, groups[index], *rotation)
        cosines.append({name: round(number, 6) for name, number in found.items()})
        merges.append(closed_form_layer(grams, groups[index], *rotation, context))
        if context:
            lost.append(energy_lost(merges[-1], grams, groups[index], *rotation, context))
    aligned = weights(home / "aligned")
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(aligned[name], tensor, rtol=1e-6, atol=1e-6)
    merged = weights(home / "merged")
    summary = read_record(str(home / "merged"), "04_align.py")["summary"]
    assert summary["key_context"] == context and summary["energy_lost"] == (lost or None)
    assert summary["within_group_cosine"] == cosines
    assert merged.keys() == aligned.keys()
    for index in range(3):
        name = f"model.layers.{index}.self_attn.v_proj.weight"
        mean = aligned[name].view(2, 4, 8, -1).mean(1).view(16, -1)
        assert torch.allclose(merged[name], mean, atol=1e-6) == ("mean" in flags)
    if "mean" not in flags:
        for name, tensor in merge_model(source, 2, merges).state_dict().items():
            torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)


def test_layer_by_layer_and_again_the_same_bytes(aligned_run, tmp_path):
    home, written = copy_run(aligned_run, tmp_path / "run"), []
    for flags in ([], ["--layerwise"]):
        run("04_align.py", "--run", home, "--force", "--merge", "closed-form", "--refit", "attention", *flags)
        written.append({file: sha for file, sha in digests(home).items() if not file.endswith("stage.json")})
    assert written[0] == written[1]


def test_the_refit_reads_text_at_distances_up_to_the_key_context(aligned_run, tmp_path, monkeypatch):
    home, asked = copy_run(aligned_run, tmp_path / "run"), set()
    monkeypatch.setattr(refitting, "spread", lambda number, *sizes: asked.add(sizes))
    for flags, context in (["--merge", "closed-form", "--key-context", 100], 100), ([], None):
        asked.clear()
        run("04_align.py", "--run", home, "--force", "--refit", *flags)
        assert asked == {(64, context)}


def test_refit_brings_merged_nearer(aligned_run, tmp_path):
    """Only W_O changes, and the recorded errors fall in every layer."""
    home = copy_run(aligned_run, tmp_path / "run")
    done = run("04_align.py", "--run", home, "--force", "--refit")
    summary, before = (json.loads((path / "merged" / "stage.json").read_text())["summary"]
                       for path in (home, aligned_run))
    assert summary["refit"] == "output"  # --refit without a value
    assert summary["perplexity_merged_before_refit"] == before["perplexity_merged"]
    assert "check   aligned/ loaded back as torch.float32: max |logit difference|" in done.stdout
    assert "refit   perplexity of merged" in done.stdout and len(summary["refit_layers"]) == 3
    assert all(row["output"] < row["merged"] and "attention" not in row for row in summary["refit_layers"])
    refitted, plain = weights(home / "merged"), weights(aligned_run / "merged")
    changed = [name for name in plain if not torch.equal(refitted[name], plain[name])]
    assert len(changed) == 3 and all(name.endswith("self_attn.o_proj.weight") for name in changed)


def test_the_refit_reads_as_many_sequences_as_calibration_unless_told(aligned_run, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    for flags, sequences in (([], 8), (["--refit-sequences", 6], 6), (["--refit-sequences", 999], 8)):
        done = run("04_align.py", "--run", home, "--force", "--refit", *flags)
        assert f"; {sequences * 64} tokens, for the refit" in done.stdout


@pytest.mark.parametrize("moved", [("aligned", 0), ("aligned", 1), ("merged", 0), ("merged", 1)])
def test_an_interrupted_force_leaves_no_mixed_pair_unnoticed(aligned_run, tmp_path, monkeypatch, moved):
    """At each of the four renames, from a name and to it: the pair is the old one, or does not match."""
    home = copy_run(aligned_run, tmp_path / "run")
    (name, place), rename, interrupted = moved, os.rename, []

    def interrupt(*paths):
        if paths[place] == str(home / name) and not interrupted:
            interrupted.append(paths)
            raise KeyboardInterrupt
        rename(*paths)

    monkeypatch.setattr(os, "rename", interrupt)
    monkeypatch.setattr(sys, "argv", ["04_align.py", "--run", str(home), "--rotate", "none", "--force"])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        runpy.run_path("04_align.py", run_name="__main__")
    assert interrupted
    if name == "aligned":
        assert digests(home) == digests(aligned_run)
    else:
        with pytest.raises(UserError, match="expected the artifact that 04_align.py read"):
            check_input(read_record(str(home / "merged"), "04_align.py"), str(home / "aligned"))


@pytest.mark.parametrize(("dtype", "fault"), [("float32", "reflected"), ("bfloat16", "reflected"),
                                              ("float32", "overflowing")])
def test_nothing_is_written_when_the_model_changed(
    aligned_run, bf16_run, tmp_path, monkeypatch, dtype, fault
):
    """A reflected key pair is orthogonal and absorbed by queries, but RoPE does not commute."""
    source, fuse_layer = aligned_run if dtype == "float32" else bf16_run, fuse.fuse_layer
    home = copy_run(source, tmp_path / "run")

    def faulty(attention, *arguments):
        fuse_layer(attention, *arguments)
        if fault == "overflowing":
            attention.o_proj.weight.fill_(3e38)  # finite, but logits are not
        else:
            attention.q_proj.weight[0] *= -1
            attention.k_proj.weight[0] *= -1

    before = digests(home)
    monkeypatch.setattr(fuse, "fuse_layer", faulty)
    done = run("04_align.py", "--run", home, "--force", fails=True)
    assert "the aligned model is not the source model" in done.stderr
    assert ("found nan" in done.stderr) == (fault == "overflowing")
    assert digests(home) == before and not list(home.glob(".*.unfinished"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_reads_what_was_written(aligned_run, bf16_run, tmp_path, monkeypatch, dtype):
    """A writer that damages one tensor on its way to the disk is noticed, whatever the model in memory."""
    source = aligned_run if dtype == "float32" else bf16_run
    home, write = copy_run(source, tmp_path / "run"), layers.CheckpointWriter.write

    def damaged(self, name, module):
        if name == "model.norm" and self.directory.endswith("/aligned"):
            module = type(module)(module.weight.shape[0])
        write(self, name, module)

    monkeypatch.setattr(layers.CheckpointWriter, "write", damaged)
    expect_error("the aligned model is not the source model", "04_align.py", "--run", home, "--force")
    assert digests(home) == digests(source)


@pytest.mark.parametrize("largest", [1, 1000])
@pytest.mark.parametrize(("off", "off_cached", "rounding", "refused"), [
    (0.5, 0.5, 0, False), (2, 0, 0, True), (0, 2, 0, True), (2, 2, 0.5, False), (9, 0, 1, True)])
def test_the_check_allows_rounding(monkeypatch, off, off_cached, rounding, refused, largest):
    """With and without a cache: 1e-4, a share of the largest logit, or eight times what the source rounds."""
    stage4, tokens = importlib.import_module("04_align"), torch.zeros(2, 3, dtype=int)
    rows, step = -torch.linspace(0.1, 1, 15).view(3, 5), max(1e-4, 1e-5 * largest)
    source = [rows, largest * rows]
    shifted = [[rows + shift * step for rows in source] for shift in (off, off_cached)]

    def exact(path, dtype, device, layerwise):
        assert dtype == torch.float64
        return SimpleNamespace(logits=lambda _: [rows + rounding * step for rows in source])

    monkeypatch.setattr(stage4, "Layers", exact)
    loaded = SimpleNamespace(logits=lambda _, cached=False: shifted[cached], device="cpu")
    inputs = SimpleNamespace(tokens=tokens, dtype="float32", source={"path": ""})
    allowed = pytest.raises(UserError, match="is not the source model") if refused else nullcontext()
    with allowed:
        stage4.check_aligned(inputs, {"source": source, "cached": source}, loaded)


@pytest.fixture(scope="module")
def bf16_run(inputs, tmp_path_factory) -> Path:
    """Stages 1-4 on a bfloat16 checkpoint."""
    home = tmp_path_factory.mktemp("bf16")
    model = save_tiny(home / "model", dtype=torch.bfloat16, bias=True)
    text = ["--text", inputs["text"], "--sequences", 4, "--length", 64]
    run("01_calibrate.py", "--run", home, "--model", model, *text)
    run("02_similarity.py", "--run", home)
    run("03_group.py", "--run", home, "--kv-heads", 2, "--by", "none")
    run("04_align.py", "--run", home)
    return home


def test_a_16_bit_checkpoint_is_the_rotated_model_rounded_and_its_kl_is_recorded(bf16_run, tmp_path):
    home = copy_run(bf16_run, tmp_path / "run")
    summary = json.loads((home / "aligned" / "stage.json").read_text())["summary"]
    assert summary["max_logit_difference"] <= 1e-4 and 1e-7 < summary["kl"] < 1e-2
    stored = {name: weights(home / name) for name in ("aligned", "merged")}
    run("04_align.py", "--run", home, "--force", "--dtype", "float32")
    assert json.loads((home / "aligned" / "stage.json").read_text())["summary"]["kl"] < 1e-7
    for name, tensor in weights(home / "aligned").items():
        assert stored["aligned"][name].dtype is torch.bfloat16
        assert torch.equal(stored["aligned"][name], tensor.bfloat16())
    name = "model.layers.1.self_attn.k_proj.weight"
    mean = stored["aligned"][name].double().view(2, 4, 8, -1).mean(1).view(16, -1).bfloat16()
    assert torch.equal(stored["merged"][name], mean)  # the mean of what aligned/ holds


def test_a_16_bit_checkpoint_too_far_from_the_source_is_refused(bf16_run, tmp_path, monkeypatch):
    home = copy_run(bf16_run, tmp_path / "run")
    monkeypatch.setattr("common.evaluate.mean_kl", lambda first, second: 0.011)
    message = "expected a KL of at most 0.01 from the source, found 1.10e-02"
    expect_error(message, "04_align.py", "--run", home, "--force")
    run("04_align.py", "--run", home, "--force", "--dtype", "float32")


@pytest.mark.parametrize(("flags", "message"), [
    (["--length", 257], "--length: expected 2 to 256 tokens"),
    (["--text", "missing.txt"], "missing.txt"),
    (["--key-context", 20], "--key-context: expected --merge closed-form --merge-keys rope with it, found"),
])
def test_mistakes_in_the_flags(aligned_run, flags, message):
    before = digests(aligned_run)
    expect_error(message, "04_align.py", "--run", aligned_run, "--force", *flags)
    assert digests(aligned_run) == before
