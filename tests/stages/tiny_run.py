"""The shape of the model of `inputs`, the stages by number, and what a run of them has written."""

import json
from pathlib import Path

from common.files import sha256
from conftest import ROOT

LAYERS, HEADS, SIZE = 3, 8, 8
STAGES = {path.name[:2]: path.name for path in ROOT.glob("0*_*.py")}


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def digests(path: Path) -> dict[str, str]:
    """sha256 of an artifact's tensors, or of what groups.json says."""
    if path.name == "groups.json":
        return {"groups": str(read(path)["groups"])}
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    tensors = [file for file in files if file.suffix == ".safetensors"]
    return {file.name: sha256(str(file)) for file in tensors}
