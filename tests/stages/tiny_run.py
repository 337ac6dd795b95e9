"""The shape of the model of `inputs`, the stages by number, and what a run of them has written."""

import hashlib
import json
from pathlib import Path

from helpers import ROOT

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
    return {file.name: tensors_digest(file) for file in tensors}


def tensors_digest(file: Path) -> str:
    """sha256 of a safetensors file, whatever the order of its metadata, which is any."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:start]), sort_keys=True)
    return hashlib.sha256(header.encode() + content[start:]).hexdigest()
