"""What passes between stages: tensors or JSON, each with a record of where it came from.

X.safetensors has a sidecar X.json; a directory artifact holds its record in stage.json. The sidecar is renamed into
place last and carries the sha256 of the tensors, so a pair that does not match is a write that was cut off.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import subprocess

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.cli import UserError

PACKAGES = ("torch", "transformers", "datasets", "numpy", "tqdm", "safetensors")
RECORD = "stage.json"  # the record inside a directory artifact
DTYPES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.bool: "BOOL"}


def sha256(path: str) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record(stage: str, args, model: dict, inputs: list[str], summary: dict, seconds: float) -> dict:
    """The sidecar of an artifact: who made it, from what, with which settings and versions, and its key figures."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=os.path.dirname(__file__), capture_output=True, text=True, check=False
    )
    return {
        "stage": stage,
        "arguments": {name: value for name, value in vars(args).items() if name != "force"},
        "model": model,
        "inputs": {os.path.relpath(path, args.run): sha256(path) for path in inputs},
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": commit.stdout.strip() or None,
        "seconds": seconds,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "summary": summary,
    }


def refuse_overwrite(path: str, force: bool) -> None:
    """Raise UserError when path exists and force is off. Call it before any work."""
    if os.path.exists(path) and not force:
        raise UserError(f"{path} exists already; give --force to replace it")


def write_text(path: str, text: str) -> None:
    """Text, written aside and renamed."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".tmp", path)


def write_json(path: str, value: dict) -> None:
    """JSON, written aside and renamed."""
    write_text(path, json.dumps(value, indent=1))


def write_tensors(path: str, tensors: dict, sidecar: dict) -> None:
    """Tensors and their sidecar; either both are whole under their names, or the reader sees that they are not."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path + ".tmp")
    publish(path, sidecar)


def publish(path: str, sidecar: dict) -> None:
    """Give path.tmp its name, then write its sidecar."""
    digest = sha256(path + ".tmp")
    os.rename(path + ".tmp", path)
    write_json(sidecar_path(path), sidecar | {"sha256": digest})


class TensorFile:
    """A safetensors file written tensor by tensor, in any order, so that they need not be in memory together.

    layout: name -> (dtype, shape) of all it will hold. The bytes are those that safetensors' own save_file writes.
    Leaving its block before all are written raises RuntimeError; a block that ends with an error leaves no file.
    """

    def __init__(self, path: str, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None = None):
        header, end = {"__metadata__": metadata} if metadata else {}, 0
        for name in sorted(layout, key=lambda name: (list(DTYPES).index(layout[name][0]), name)):  # as safetensors does
            dtype, shape = layout[name]
            start, end = end, end + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.layout, self.header, self.begin, self.missing = layout, header, 8 + len(text), set(layout)
        self.file = open(path, "wb")
        self.file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put these tensors, of the dtypes and shapes that were said, in their places."""
        for name, tensor in tensors.items():
            dtype, shape = self.layout[name]
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
                raise ValueError(f"{name}: expected {dtype} {tuple(shape)}, found {tensor.dtype} {tuple(tensor.shape)}")
            self.file.seek(self.begin + self.header[name]["data_offsets"][0])
            self.file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            self.missing.discard(name)

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind is None and not self.missing:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            return
        self.file.close()
        os.remove(self.file.name)
        if kind is None:
            raise RuntimeError(f"{self.file.name}: {len(self.missing)} tensors were not written, {min(self.missing)} first")


@contextlib.contextmanager
def write_directory(path: str):
    """A directory to fill; it takes its name only when the block ends without an error, and goes when it does not."""
    shutil.rmtree(path + ".tmp", ignore_errors=True)
    os.makedirs(path + ".tmp")
    try:
        yield path + ".tmp"
    except BaseException:
        shutil.rmtree(path + ".tmp", ignore_errors=True)
        raise
    if os.path.exists(path):
        os.rename(path, path + ".old")
    os.rename(path + ".tmp", path)
    shutil.rmtree(path + ".old", ignore_errors=True)


def sidecar_path(path: str) -> str:
    """X.safetensors -> X.json; a directory -> its stage.json."""
    return os.path.join(path, RECORD) if os.path.isdir(path) else os.path.splitext(path)[0] + ".json"


def read_record(path: str, stage: str, model: dict | None = None) -> dict:
    """The record of an artifact, checked: it exists, that stage wrote it, and for this model when one is given.

    path: a .safetensors file, a .json artifact or a directory. Raises UserError with file, expected and found.
    """
    if not os.path.exists(path):
        raise UserError(f"{path} not found; run {stage} first")
    sidecar = sidecar_path(path)
    try:
        with open(sidecar, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{sidecar}: expected the record of {stage}, found none that can be read; "
                        f"run {stage} again") from error
    if found.get("stage") != stage:
        raise UserError(f"{path}: expected an artifact of {stage}, found one of {found.get('stage')}")
    if model is not None:
        check_same_model(path, model, found["model"])
    return found


def check_same_model(path: str, expected: dict, found: dict) -> None:
    """Raise UserError when an artifact was made from another model."""
    if expected["fingerprint"] != found["fingerprint"]:
        raise UserError(f"{path}: expected an artifact of model {expected['path']} ({expected['fingerprint'][:12]}), "
                        f"found one of {found['path']} ({found['fingerprint'][:12]})")


def read_tensors(path: str, stage: str, model: dict | None = None):
    """An open safetensors file and its record. Raises UserError when truncated, foreign or missing."""
    found = read_record(path, stage, model)
    if sha256(path) != found.get("sha256"):
        raise UserError(f"{path}: its content is not what {sidecar_path(path)} records (a write was cut off, or the "
                        f"file was changed); run {stage} again with --force")
    try:
        return safe_open(path, framework="pt"), found
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file: {error}") from error


def read_layer(path: str, index: int) -> dict[str, torch.Tensor]:
    """Copies of one layer's tensors in a calibration, by name, and the file closed again: what was read of an open one stays in
    memory, and a tensor in a file lies at a multiple of 8 bytes, where torch's complex kernels expect 16."""
    prefix = f"layers.{index}."
    with safe_open(path, framework="pt") as file:
        return {name.removeprefix(prefix): file.get_tensor(name).clone() for name in file.keys() if name.startswith(prefix)}
