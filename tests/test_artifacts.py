"""What passes between stages is whole or refused, and an interrupted write costs nothing."""

import argparse
import json
import os

import pytest
import torch

from common import artifacts
from common.cli import UserError
from common.models import (
    check_kv_heads,
    describe,
    load_config,
    load_model,
    require_convertible,
)
from common.weights import check_finite, fingerprint
from conftest import save_tiny, tiny_model

MODEL = {"name": "m", "path": "m", "fingerprint": "f" * 64,
         "layers": 2, "heads": 8, "kv_heads": 8, "head_dim": 4, "hidden": 32}
MEANS = {f"{head}.{criterion}.{when}": 0.5
         for head in ("key", "value") for criterion in ("cos", "dist") for when in ("before", "after")}


def write(path, value: float, stage: str = "02_similarity.py") -> str:
    written = artifacts.record(stage, argparse.Namespace(run=".", seed=0, force=False), MODEL, [], MEANS, 0.1)
    artifacts.write_tensors(str(path), {"x": torch.full((100,), value)}, written)
    return str(path)


def test_round_trip_and_record(tmp_path):
    path = write(tmp_path / "a.safetensors", 2.0)
    file, record = artifacts.read_tensors(path, "02_similarity.py")
    assert torch.equal(file.get_tensor("x"), torch.full((100,), 2.0))
    assert record["arguments"] == {"run": ".", "seed": 0} and record["summary"] == MEANS
    assert set(record["packages"]) == set(artifacts.PACKAGES) and record["model"] == MODEL


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no sidecar", "sidecar cut off"])
def test_damaged_artifacts_are_refused(tmp_path, damage):
    path = write(tmp_path / "a.safetensors", 2.0)
    raw = bytearray((tmp_path / "a.safetensors").read_bytes())
    if damage == "truncated":
        (tmp_path / "a.safetensors").write_bytes(raw[:-40])
    if damage == "flipped":
        raw[-1] ^= 1
        (tmp_path / "a.safetensors").write_bytes(raw)
    if damage == "no sidecar":
        os.remove(tmp_path / "a.json")
    if damage == "sidecar cut off":
        (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text()[:30])
    with pytest.raises(UserError, match="02_similarity.py again"):
        artifacts.read_tensors(path, "02_similarity.py")


def test_foreign_artifacts_are_refused_naming_both_sides(tmp_path):
    path = write(tmp_path / "a.safetensors", 2.0)
    with pytest.raises(
        UserError, match="expected an artifact of 01_calibrate.py, found one of 02_similarity.py"
    ):
        artifacts.read_tensors(path, "01_calibrate.py")
    with pytest.raises(UserError, match=r"expected an artifact of model other .*found one of m \(ffff"):
        artifacts.read_record(path, "02_similarity.py", MODEL | {"path": "other", "fingerprint": "0" * 64})
    with pytest.raises(UserError, match="not found; run 02_similarity.py first"):
        artifacts.read_tensors(str(tmp_path / "b.safetensors"), "02_similarity.py")


def test_a_failed_write_keeps_what_was_there(tmp_path, monkeypatch):
    path = write(tmp_path / "a.safetensors", 2.0)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(artifacts, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "a.safetensors", 3.0)
    assert artifacts.read_tensors(path, "02_similarity.py")[0].get_tensor("x")[0] == 2


def test_a_directory_takes_its_name_only_when_whole(tmp_path):
    target = str(tmp_path / "d")
    for content, fails in (("old", False), ("new", True)):
        try:
            with artifacts.write_directory(target) as aside:
                with open(os.path.join(aside, "f"), "w") as file:
                    file.write(content)
                if fails:
                    raise RuntimeError
        except RuntimeError:
            pass
        assert (tmp_path / "d" / "f").read_text() == "old"


def test_overwriting_needs_force(tmp_path):
    path = write(tmp_path / "a.safetensors", 2.0)
    artifacts.refuse_overwrite(path, force=True)
    with pytest.raises(UserError, match="--force"):
        artifacts.refuse_overwrite(path, force=False)


def test_fingerprint_follows_the_weights(tmp_path):
    first, again, other = (
        save_tiny(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    assert describe(first)["fingerprint"] == fingerprint(first) and describe(first)["heads"] == 8


def test_models_the_method_does_not_apply_to(tmp_path):
    path = save_tiny(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(
        UserError, match=r"expected model_type in \['llama', 'mistral', 'qwen2', 'qwen3'\], found 'gpt2'"
    ):
        require_convertible(path, load_config(path))
    for changes, message in (
        ({"quantization_config": {"quant_method": "fp8"}}, "found a quantized checkpoint"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "found partial_rotary_factor 0.5",
        ),
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=message):
            require_convertible(path, load_config(path))
    with pytest.raises(UserError, match="at least 2 key/value heads, found 1"):
        require_convertible("m", tiny_model(num_key_value_heads=1).config)
    for wrong in (3, 4, 8):
        with pytest.raises(
            UserError, match=rf"expected one of \[1, 2\] for 4 key/value heads, found {wrong}"
        ):
            check_kv_heads(4, wrong)


def test_nan_and_truncated_weights_are_named(tmp_path):
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"NaN or Inf in model\.layers\.1\.mlp\.up_proj\.weight"):
        check_finite(model.named_parameters(), "m")
    path = save_tiny(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cannot load the weights"):
        load_model(path)
