"""The weights of a checkpoint directory: which files hold them, reading single tensors, checking them."""

import hashlib
import json
import os
import re
import zipfile

import torch
from safetensors import safe_open

from common.cli import UserError
from common.records import FILE_NAME, STRING, mismatch, shown

WEIGHT_FILES = (  # where transformers looks for weights, in its order
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)
# older releases store these, which are computed from the config
IGNORED_TENSORS = re.compile(r".*rotary_emb\.inv_freq")


def weight_files(directory: str) -> list[str]:
    """Names of the files that transformers reads a checkpoint's weights from; an index, if any, comes first.

    Raises UserError when there are none, or when the index cannot be read or names files elsewhere.
    """
    present = [name for name in WEIGHT_FILES if os.path.isfile(os.path.join(directory, name))]
    if not present:
        raise UserError(f"{directory}: expected weights (one of {', '.join(WEIGHT_FILES)}), found none")
    name = present[0]
    if not name.endswith(".index.json"):
        return [name]
    path = os.path.join(directory, name)
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected an index of weight files, found none that can be read") from error
    fault = mismatch(index, {"weight_map": {STRING: FILE_NAME}}, "index")
    if fault:
        raise UserError(f"{path}: {fault}")
    shards = sorted(set(index["weight_map"].values()))
    for shard in shards:
        if "/" in shard or not os.path.isfile(os.path.join(directory, shard)):
            raise UserError(f"{path}: expected names of files beside it, found {shown(shard)}")
    return [name, *shards]


def fingerprint(path: str) -> str:
    """A sha256 over config.json and 64 slices of each weight file that is read.

    Slices suffice, because a training step changes all weights, and 13 GB take no time.
    """
    digest = hashlib.sha256()
    for name in ["config.json", *weight_files(path)]:
        size = os.path.getsize(os.path.join(path, name))
        digest.update(f"{name} {size}\n".encode())
        with open(os.path.join(path, name), "rb") as file:
            for offset in range(0, size, max(size // 64, 1 << 16)):
                file.seek(offset)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()


def open_checkpoint(directory: str) -> dict:
    """Tensor name -> an object that reads its rows when sliced, for each tensor that transformers would load.

    Raises UserError for files that are damaged or hold more than tensors.
    """
    tensors = {}
    for name in weight_files(directory):
        path = os.path.join(directory, name)
        try:
            if name.endswith(".safetensors"):
                file = safe_open(path, framework="pt")
                tensors |= {key: file.get_slice(key) for key in file.keys()}
            elif name.endswith(".bin"):  # an older release; weights_only refuses pickles that would run code
                mapped = zipfile.is_zipfile(path)
                tensors |= torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except Exception as error:  # each kind of damage to a file raises its own class
            raise UserError(f"{path}: expected a file of tensors, found none that can be read: "
                            f"{first_line(error)}") from error
    return tensors


def check_names(path: str, missing, unexpected) -> None:
    """Raise UserError naming the first tensor that a checkpoint lacks, or that its model has no place for."""
    if missing:
        raise UserError(f"{path}: expected a tensor {min(missing)}, found none")
    unexpected = [name for name in unexpected if not IGNORED_TENSORS.fullmatch(name)]
    if unexpected:
        raise UserError(f"{path}: expected the tensors of its config alone, "
                        f"found also {shown(min(unexpected))}")


def check_finite(tensors, where: str) -> None:
    """Raise UserError naming the first tensor that holds a NaN or Inf."""
    for name, tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise UserError(f"{where}: NaN or Inf in {name}")


def first_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
