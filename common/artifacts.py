"""Artifacts, the files passed between stages: tensors, JSON or directories, each with a record of its origin.

X.safetensors has a sidecar X.json with its sha256; a directory artifact has its record in stage.json, with
the sha256 of every other file. The record is written last, so an artifact whose record is missing or does not
match was truncated or modified. common/records.py specifies the fields.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import socket
import subprocess

import filelock
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from common import cli
from common.cli import UserError
from common.files import files_in, read_json, refuse_overwrite, sha256, write_file, write_json
from common.method.stats import LayerGrams
from common.records import find_fault, layer_file, shown
from common.weights import check_finite

APART = {"04_align.py": "05_prune_train.py", "05_prune_train.py": "04_align.py"}  # never at the same time
PACKAGES = ("torch", "transformers", "datasets", "numpy", "tqdm", "safetensors")
RECORD = "stage.json"  # the record inside a directory artifact


def claim(stage: str, args, *outputs: str) -> None:
    """Start a stage: refuse existing outputs, and lock the stage in its run directory until run_stage ends.

    outputs: in the order in which they get their names. A directory artifact without the last of them is of a
    run that was killed in between, and may be replaced. Under torchrun only rank 0 does so. Raises UserError
    if another process is running the stage in args.run, or the one that must stay APART from it, if another
    output exists without --force, or if an output is a symbolic link.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for output in outputs:
        unfinished = os.path.isfile(os.path.join(output, RECORD)) and not os.path.lexists(outputs[-1])
        refuse_overwrite(output, args.force or unfinished)
    created = not os.path.isdir(args.run)
    os.makedirs(args.run, exist_ok=True)
    lock = lock_stage(args.run, stage)
    cli.cleanup.callback(release, lock, created)
    if stage in APART:
        release(lock_stage(args.run, APART[stage]), False)
    started = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    with open(lock.lock_file, "w", encoding="utf-8") as file:
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {started}")


def lock_stage(run: str, stage: str) -> filelock.FileLock:
    """The lock that a stage holds while it runs in a run directory. Raises UserError if it is held."""
    path = os.path.join(run, f".{os.path.splitext(os.path.basename(stage))[0]}.lock")
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout as error:
        with open(path, encoding="utf-8", errors="replace") as file:
            holder = file.read(200) or "another process"
        raise UserError(f"{run}: expected no {stage} running there, found {holder}") from error
    return lock


def release(lock, created: bool) -> None:
    """Release a lock and remove its file, and the run directory if `created` for it and still empty."""
    with contextlib.suppress(OSError):
        os.remove(lock.lock_file)
    lock.release()
    if not created:
        return
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(lock.lock_file))


def digest(path: str) -> str:
    """sha256 that identifies an artifact: that of the file, or of a directory's record."""
    return sha256(os.path.join(path, RECORD) if os.path.isdir(path) else path)


def input_digests(run: str, paths: list[str]) -> dict[str, str]:
    """Path relative to the run directory -> digest of the artifact, if there is one."""
    digests = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # reading it says what to do
            digests[os.path.relpath(path, run)] = digest(path)
    return digests


def check_input(record: dict, path: str) -> None:
    """Raise UserError unless the artifact at `path` is among the inputs in this record."""
    if digest(path) not in record["inputs"].values():
        inputs = ", ".join(record["inputs"]) or "none"
        stage = record["stage"]
        raise UserError(f"{path}: expected the artifact that {stage} read (its inputs: {inputs}), "
                        f"found a different one; run {stage} again with --force")


def make_record(
    stage: str, args, model: dict, inputs: dict[str, str], summary: dict, seconds: float
) -> dict:
    """The record of an artifact: stage, arguments, inputs, versions and key figures.

    inputs: from input_digests, called before they were read: what lies there since may be another artifact.
    """
    return {
        "stage": stage,
        "arguments": {name: value for name, value in vars(args).items() if name != "force"},
        "model": model,
        "inputs": inputs,
        "packages": package_versions(PACKAGES),
        "commit": source_commit(),
        "seconds": seconds,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "summary": summary,
    }


def package_versions(names) -> dict[str, str]:
    """Name -> version of those packages that are installed; stages run without datasets, for one."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def source_commit() -> str | None:
    """The git commit of this source; None without a repository, or without git."""
    command, source = ["git", "rev-parse", "HEAD"], os.path.dirname(__file__)
    try:
        commit = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return commit.stdout.strip() or None


def write_tensors(path: str, tensors: dict, sidecar: dict) -> None:
    """Write tensors and their sidecar with the sha256. The tensors get their name last."""
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    with write_file(path) as file:  # save_file would leave it unreadable to others
        file.write(content)
        write_json(sidecar_path(path), sidecar | {"sha256": hashlib.sha256(content).hexdigest()})


def write_layer(directory: str, index: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write one layer's file of a calibration directory."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, os.path.join(directory, layer_file(index)))


def write_record(directory: str, record: dict) -> None:
    """Write stage.json with the sha256 of every other file in the directory. Call it last."""
    names = [name for name in files_in(directory) if name != RECORD]
    files = {name: sha256(os.path.join(directory, name)) for name in names}
    write_json(os.path.join(directory, RECORD), record | {"files": files})


def sidecar_path(path: str) -> str:
    """X.safetensors -> X.json; a directory -> its stage.json."""
    return os.path.join(path, RECORD) if os.path.isdir(path) else os.path.splitext(path)[0] + ".json"


def read_record(path: str, stage: str, model: dict | None = None) -> dict:
    """The record of an artifact of `stage`, with every field validated; for `model` if one is given.

    path: a .safetensors file, a .json artifact or a directory. Raises UserError.
    """
    if not os.path.exists(path):
        raise UserError(f"{path} not found; run {stage} first")
    sidecar = sidecar_path(path)
    record = read_json(sidecar)
    if record is None:
        raise UserError(f"{sidecar}: expected the record of {stage}, found none that can be read; "
                        f"run {stage} again")
    if isinstance(record, dict) and isinstance(record.get("stage"), str) and record["stage"] != stage:
        other = shown(record["stage"])[1:-1]
        raise UserError(f"{path}: expected an artifact of {stage}, found one of {other}")
    fault = find_fault(record, stage)
    if fault:
        raise UserError(f"{sidecar}: {fault}; run {stage} again")
    if model is not None:
        check_same_model(path, model, record["model"])
    return record


def check_same_model(path: str, expected: dict, actual: dict) -> None:
    """Raise UserError if an artifact belongs to another model or its record has another geometry."""
    if expected["fingerprint"] != actual["fingerprint"]:
        raise UserError(f"{path}: expected an artifact of model {expected['path']} "
                        f"({expected['fingerprint'][:12]}), "
                        f"found one of {actual['path']} ({actual['fingerprint'][:12]})")
    for name in ("layers", "heads", "kv_heads", "head_dim", "hidden"):
        if expected[name] != actual[name]:
            raise UserError(f"{path}: expected {name} {expected[name]} in its record, found {actual[name]}")


def verify_files(path: str, record: dict) -> None:
    """Raise UserError unless a directory artifact has the files in its record, as recorded, and no others.

    Others would be read, too: transformers prefers model.safetensors to shards. Hidden files and a README.md
    may be anyone's.
    """
    names = {name for name in files_in(path) if "/." not in f"/{name}"}
    others = names - {*record["files"], RECORD, "README.md"}
    if others:
        raise UserError(f"{path}: expected only the files in its {RECORD}, found also {min(others)}; "
                        "remove it")
    for name, expected in record["files"].items():
        file, stage = os.path.join(path, name), record["stage"]
        if not os.path.isfile(file):
            raise UserError(f"{file}: expected the file written by {stage}, found none; "
                            f"run {stage} again with --force")
        if sha256(file) != expected:
            raise UserError(f"{file}: its content does not match {RECORD} (truncated or modified); "
                            f"run {stage} again with --force")


def read_tensors(path: str, stage: str):
    """An open safetensors file and its record. Raises UserError if missing, damaged or of another stage."""
    record = read_record(path, stage)
    if sha256(path) != record["sha256"]:
        raise UserError(f"{path}: its content does not match {sidecar_path(path)} (truncated or modified); "
                        f"run {stage} again with --force")
    return open_tensors(path), record


def read_calibration(path: str) -> dict:
    """The record of a calibration directory, after verifying its files and their shapes."""
    record = read_record(path, "01_calibrate.py")
    verify_files(path, record)
    model = record["model"]
    kv_heads, size = model["kv_heads"], model["head_dim"]
    expected = [kv_heads * (kv_heads + 1) // 2, size, size]
    for index in range(model["layers"]):
        shape = open_tensors(os.path.join(path, layer_file(index))).get_slice("key.raw").get_shape()
        if shape != expected:
            raise UserError(f"{path}: expected key.raw of shape {expected} for the model in its record, "
                            f"found {shape}")
    return record


def read_layer(path: str, index: int) -> dict[str, torch.Tensor]:
    """Copies of one layer's calibration tensors, by name ("value.raw", "key.raw", "sample.key", ...).

    Copies, because memory-mapped tensors stay resident and are 8-byte aligned; complex kernels need 16.
    """
    name = os.path.join(path, layer_file(index))
    file = open_tensors(name)
    tensors = {key: file.get_tensor(key).clone() for key in file.keys()}
    check_finite(tensors.items(), name)
    return tensors


def read_grams(path: str, source_kv_heads: int, device: str, index: int) -> LayerGrams:
    """One layer's Grams from a calibration directory, on `device`."""
    tensors = {name: tensor.to(device) for name, tensor in read_layer(path, index).items()}
    return LayerGrams(tensors, source_kv_heads)


def open_tensors(path: str):
    """An open safetensors file. Raises UserError if it cannot be read as one."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: expected a safetensors file, found none that can be read: "
                        f"{error}") from error
