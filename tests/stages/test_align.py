"""Stage 4 against its functions one by one, plain transformers and deliberate faults."""

import importlib
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.closed_form.layer import closed_form_layer
from common.method.procrustes import align_layer, within_group_cosine
from common.method.stats import LayerGrams
from common.models import edits as fuse
from common.models import layers, refit
from common.models.calibration import Calibration
from common.models.proof import attach_pairs
from common.run.artifact import read_record
from common.run.errors import UserError
from models import save_tiny, tiny_model
from reference import merge_model
from runs import align, calibrated_layer, checkpoint_digests, copy_run, expect_error, read, run

stage4 = importlib.import_module("04_align")
NORM = "layernorm"


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(("criterion", "flags", "context"), [
    ("dist", ["--merge", "closed-form", "--key-context", 20], 20),
    pytest.param("cos", ["--merge", "mean"], None, marks=pytest.mark.slow),
])
def test_aligned_and_merged_are_what_the_calibration_asks_for(
    aligned_run, tmp_path, criterion, flags, context
):
    """From the artifacts alone: the source's weights fused with align_layer's rotations, then merged."""
    home = copy_run(aligned_run, tmp_path / "run")
    run("04_align.py", "--run", home, "--force", "--rotate", criterion, *flags)
    record = read(home / "groups" / "stage.json")
    groups = torch.tensor(record["groups"])
    source, merges, cosines = AutoModelForCausalLM.from_pretrained(record["model"]["path"]), [], []
    attach_pairs(source)
    for index, layer in enumerate(source.model.layers):
        grams = LayerGrams(calibrated_layer(home / "calibration", index), 8)
        value_rotation, key_rotation = rotation = align_layer(grams, groups[index], criterion)
        order = groups[index].flatten().tolist()
        fuse.fuse_layer(layer.self_attn, order, value_rotation.flatten(0, 1), key_rotation.flatten(0, 1))
        found = within_group_cosine(grams, groups[index], *rotation)
        cosines.append({name: round(number, 6) for name, number in found.items()})
        if context:
            merges.append(closed_form_layer(grams, groups[index], *rotation, context))
    for kind, expected in (("aligned", source), ("merged", merge_model(source, 2, merges))):
        torch.testing.assert_close(weights(home / kind), dict(expected.state_dict()), rtol=1e-5, atol=1e-5)
    summary = read_record(str(home / "merged"), "04_align.py")["summary"]
    expected = {"key_context": context, "within_group_cosine": cosines, "rotate": criterion,
                "merge": flags[1], "refit": None, "refit_layers": None, "kv_heads": 2, "by": "value",
                "criterion": "dist"}
    assert {name: summary[name] for name in expected} == expected


@pytest.mark.slow
def test_layer_by_layer_and_again_the_same_bytes(aligned_run, tmp_path, monkeypatch):
    """The refit reads texts of 64 tokens at distances up to the key context."""
    home, written, seen, gapped = copy_run(aligned_run, tmp_path / "run"), [], set(), refit.gapped_positions
    monkeypatch.setattr(refit, "gapped_positions", lambda *read: seen.add(read[1:]) or gapped(*read))
    for flags in ([], ["--layerwise"]):
        run("04_align.py", "--run", home, "--force", "--merge", "closed-form", "--key-context", 100,
            "--refit", "attention", *flags)
        written.append(checkpoint_digests(home))
    assert written[0] == written[1] and seen == {(64, 100)}


def test_refit_brings_merged_nearer(aligned_run, tmp_path):
    """Only W_O changes, and the recorded errors fall in every layer."""
    home = copy_run(aligned_run, tmp_path / "run")
    run("04_align.py", "--run", home, "--force", "--refit")
    summary, before = (read(path / "merged/stage.json")["summary"] for path in (home, aligned_run))
    assert summary["refit"] == "output"  # --refit without a value
    assert summary["kl_merged"] < before["kl_merged"]
    assert len(summary["refit_layers"]) == 3
    assert all(row["output"] < row["merged"] and "attention" not in row for row in summary["refit_layers"])
    refitted, plain = weights(home / "merged"), weights(aligned_run / "merged")
    changed = [name for name in plain if not torch.equal(refitted[name], plain[name])]
    assert len(changed) == 3 and all(name.endswith("self_attn.o_proj.weight") for name in changed)


@pytest.mark.parametrize(("asked", "expected"), [
    ([], [0, 1, 2, 3, 4, 5, 6, 7]), (["--refit-sequences", "999"], [0, 1, 2, 3, 4, 5, 6, 7]),
    (["--refit-sequences", "6"], [0, 1, 2, 4, 5, 6]), (["--refit-sequences", "1"], [0, 4])])
def test_the_refit_reads_what_the_calibration_did_or_an_even_part_of_it(
    aligned_run, monkeypatch, asked, expected
):
    """At least two sequences; of texts and chats, which come one after the other, the same share."""
    monkeypatch.setattr(sys, "argv", ["04_align", "--run", str(aligned_run), "--refit", *asked])
    tokens = Calibration(str(aligned_run / "calibration")).tokens()
    assert torch.equal(stage4.read_inputs(stage4.parse()).refit_tokens, tokens[expected])


def test_nothing_is_written_when_the_model_changed(aligned_run, tmp_path, monkeypatch):
    """On its way to the disk: in memory it is the source model."""
    home, write = copy_run(aligned_run, tmp_path / "run"), layers.CheckpointWriter.write
    before = checkpoint_digests(home)

    def written(self, name, module):
        if name == "model.norm" and "/.aligned." in self.directory:
            module = type(module)(module.weight.shape[0])
        write(self, name, module)

    monkeypatch.setattr(layers.CheckpointWriter, "write", written)
    expect_error("the aligned model is not the source model", "04_align.py", "--run", home, "--force")
    assert checkpoint_digests(home) == before and not list(home.glob(".*.unfinished"))


@pytest.mark.parametrize("largest", [1, 1000])
@pytest.mark.parametrize(("off", "rounding", "refused"), [
    (0.5, 0, False), (2, 0, True), (2, 0.5, False), (9, 1, True), (math.nan, 0, True)])
def test_the_check_allows_rounding(monkeypatch, off, rounding, refused, largest):
    """1e-4, a share of the largest logit, or eight times what the source rounds; nothing that overflows."""
    tokens = torch.zeros(2, 3, dtype=int)
    rows, step = -torch.linspace(0.1, 1, 15).view(3, 5), max(1e-4, 1e-5 * largest)
    source = [rows, largest * rows]
    shifted = [rows + off * step for rows in source]

    def exact(path, dtype, device, layerwise):
        assert dtype == torch.float64
        return SimpleNamespace(logits=lambda _: [rows + rounding * step for rows in source])

    monkeypatch.setattr(stage4, "Layers", exact)
    loaded = SimpleNamespace(logits=lambda _: shifted, device="cpu")
    inputs = SimpleNamespace(tokens=tokens, dtype="float32", source={"path": ""})
    for rotated in (source, shifted):  # off when it is loaded back, or in memory already
        allowed = pytest.raises(UserError, match="is not the source model") if refused else nullcontext()
        with allowed:
            stage4.check_aligned(inputs, source, rotated, rotated, loaded)


@pytest.mark.slow
def test_a_16_bit_checkpoint_is_the_rotated_model_rounded_and_its_kl_is_recorded(
    inputs, tmp_path, monkeypatch
):
    """Of a bfloat16 checkpoint that has the layers' norms in float32."""
    model, home = save_tiny(tmp_path / "model", dtype=torch.bfloat16, bias=True), tmp_path / "run"
    norms = {name: tensor for name, tensor in tiny_model(bias=True).state_dict().items() if NORM in name}
    save_file(weights(tmp_path / "model") | norms, f"{model}/model.safetensors", {"format": "pt"})
    align(home, inputs | {"model": model})
    summary = read(home / "aligned/stage.json")["summary"]
    assert summary["max_logit_difference"] <= 1e-4 and 1e-7 < summary["kl"] < 1e-2
    stored = {name: weights(home / name) for name in ("aligned", "merged")}
    run("04_align.py", "--run", home, "--force", "--dtype", "float32")
    assert read(home / "aligned/stage.json")["summary"]["kl"] < 1e-7
    for name, tensor in weights(home / "aligned").items():
        dtype = torch.float32 if NORM in name else torch.bfloat16
        assert stored["aligned"][name].dtype is stored["merged"][name].dtype is dtype
        assert torch.equal(stored["aligned"][name], tensor.to(dtype))
    name = "model.layers.1.self_attn.k_proj.weight"
    mean = stored["aligned"][name].double().view(2, 4, 8, -1).mean(1).view(16, -1).bfloat16()
    assert torch.equal(stored["merged"][name], mean)  # the mean of what aligned/ holds
    monkeypatch.setattr("common.models.equivalence.mean_kl", lambda first, second: 0.011)
    message = "expected a KL of at most 0.01 from the source, found 1.10e-02"
    expect_error(message, "04_align.py", "--run", home, "--force")
