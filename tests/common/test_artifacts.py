"""Tensors with a sidecar come back as written, or are refused."""

import argparse
import os
from pathlib import Path

import pytest
import torch

from common import artifacts, files
from common.cli import UserError

MODEL = {"name": "m", "path": "m", "fingerprint": "f" * 64,
         "layers": 2, "heads": 8, "kv_heads": 8, "head_dim": 4, "hidden": 32}
MEANS = {f"{head}.{criterion}.{when}": 0.5
         for head in ("key", "value") for criterion in ("cos", "dist") for when in ("before", "after")}


def write(path: Path, value: float, inputs: tuple = ()) -> str:
    args = argparse.Namespace(run=str(path.parent), seed=0, force=False)
    digests = artifacts.input_digests(args.run, list(inputs))
    record = artifacts.make_record("02_similarity.py", args, MODEL, digests, MEANS, 0.1)
    artifacts.write_tensors(str(path), {"x": torch.full((100,), value)}, record)
    return str(path)


def test_round_trip_and_record(tmp_path):
    path = write(tmp_path / "a.safetensors", 2.0)
    file, record = artifacts.read_tensors(path, "02_similarity.py")
    assert torch.equal(file.get_tensor("x"), torch.full((100,), 2.0))
    assert record["arguments"] == {"run": str(tmp_path), "seed": 0}
    assert record["summary"] == MEANS and record["model"] == MODEL and record["inputs"] == {}
    assert set(record["packages"]) == set(artifacts.PACKAGES) and record["seconds"] == 0.1
    assert artifacts.read_record(path, "02_similarity.py", MODEL) == record


def test_a_record_is_written_without_git_and_without_packages_that_are_not_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "PACKAGES", ("torch", "a-package-that-is-not-there"))
    monkeypatch.setenv("PATH", str(tmp_path))
    _, record = artifacts.read_tensors(write(tmp_path / "a.safetensors", 2.0), "02_similarity.py")
    assert record["packages"] == {"torch": torch.__version__} and record["commit"] is None


def test_inputs_are_recorded_by_path_and_digest(tmp_path):
    first = write(tmp_path / "a.safetensors", 2.0)
    second = write(tmp_path / "b.safetensors", 3.0, inputs=(first,))
    record = artifacts.read_record(second, "02_similarity.py")
    assert record["inputs"] == {"a.safetensors": files.sha256(first)}
    artifacts.check_input(record, first)
    write(tmp_path / "a.safetensors", 2.5)
    with pytest.raises(UserError, match=r"\(its inputs: a.safetensors\), found a different one; run 02"):
        artifacts.check_input(record, first)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no sidecar", "sidecar cut off"])
def test_damaged_artifacts_are_refused(tmp_path, damage):
    path, sidecar = tmp_path / "a.safetensors", tmp_path / "a.json"
    write(path, 2.0)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-40])
    elif damage == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "no sidecar":
        os.remove(sidecar)
    else:
        sidecar.write_text(sidecar.read_text()[:30])
    with pytest.raises(UserError, match="02_similarity.py again"):
        artifacts.read_tensors(str(path), "02_similarity.py")


def test_calibration_that_is_not_finite_is_refused(tmp_path):
    artifacts.write_layer(str(tmp_path), 0, {"key.raw": torch.tensor([1.0, torch.nan])})
    with pytest.raises(UserError, match=r"layer-00000\.safetensors: NaN or Inf in key\.raw"):
        artifacts.read_layer(str(tmp_path), 0)


def test_foreign_artifacts_are_refused_naming_both_sides(tmp_path):
    path = write(tmp_path / "a.safetensors", 2.0)
    with pytest.raises(UserError, match="an artifact of 01_calibrate.py, found one of 02_similarity.py$"):
        artifacts.read_record(path, "01_calibrate.py")
    other = MODEL | {"path": "other", "fingerprint": "0" * 64}
    with pytest.raises(UserError, match=r"an artifact of model other \(0{12}\), found one of m \(f{12}\)"):
        artifacts.read_record(path, "02_similarity.py", other)
    with pytest.raises(UserError, match="b.safetensors not found; run 02_similarity.py first"):
        artifacts.read_tensors(str(tmp_path / "b.safetensors"), "02_similarity.py")
