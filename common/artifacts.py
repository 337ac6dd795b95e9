"""Artifacts, which stages exchange: a directory, or X.json and files next to it, each with one record.

The record is stage.json in a directory, else X.json itself. It has the command and inputs that made the
artifact (common/records.py specifies the fields) and the sha256 of each of its files. So it answers: is the
artifact complete, is it ours, and did this command make it from these inputs? Only files that a record names
are ever replaced or removed.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from common import cli
from common.cli import Clock
from common.errors import Complete, UserError
from common.files import (
    RECORD,
    files_in,
    flush,
    lock,
    named_files,
    open_bytes,
    read_json,
    sha256,
    sweep,
    unfinished,
    write_json,
)
from common.records import find_fault, shown

# never at the same time
EXCLUSIVE_STAGES = {"04_align.py": "05_prune_train.py", "05_prune_train.py": "04_align.py"}
CARD = "README.md"  # of a checkpoint
SCORES, END_OF_SCORES = "<!-- scores -->", "<!-- /scores -->"  # stage 7 writes between them
PACKAGES = ("torch", "transformers", "datasets", "numpy", "tqdm", "safetensors")
WITH_RECORD = (".json", ".safetensors")  # artifacts that are files
PATH_FLAGS = ("run", "calibration", "similarity", "groups")  # flags that name artifacts: their digests count
CHECKPOINT_SUFFIXES = (".safetensors", ".bin", ".json", ".py", ".jinja", ".model", ".tiktoken",
                       "merges.txt", "vocab.txt")


@dataclass(frozen=True)
class Claim:
    """A stage at work: its flags as they were given and as it completes them, and what it reads."""

    stage: str
    args: object
    flags: dict
    inputs: dict[str, str]  # from input_digests, before they were read: files may have been replaced since
    clock: Clock

    def record(self, model: dict, summary: dict) -> dict:
        """The record of an artifact: stage, flags, inputs, versions and key metrics."""
        return {
            "stage": self.stage,
            "directory": os.path.abspath(self.args.run),
            "flags": self.flags,
            "arguments": {name: value for name, value in vars(self.args).items() if name != "force"},
            "model": model,
            "inputs": self.inputs,
            "packages": package_versions(PACKAGES),
            "commit": source_commit(),
            "seconds": self.clock(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "summary": summary,
        }


def begin_stage(stage: str, args, *outputs: str, inputs: dict | None = None, beside=(), lock="") -> Claim:
    """Start a stage: lock it in its run directory until run_stage ends, and look at what its outputs hold.

    outputs: directories in the order in which they get their names, or one X.json, which may name the files
    `beside` it. Raises Complete if this command has made all of them from these inputs, which have to be
    known. Raises UserError if another process is running the stage in args.run, or the one that excludes it
    (EXCLUSIVE_STAGES); if outputs of another command exist without --force (or --update); or if anything lies
    in the way that no record of the stage names. Incomplete outputs are of a run that was killed, and are
    replaced. lock: its name, where it is not the stage that may run once at a time. Under torchrun only rank
    0 does so.
    """
    flags = {name: within(args.run, value) for name, value in vars(args).items()
             if name not in (*PATH_FLAGS, "force", "update")}
    started = Claim(stage, args, json.loads(json.dumps(flags)), inputs or {}, Clock())
    update = getattr(args, "update", False)
    if os.environ.get("RANK", "0") != "0":
        return started
    cli.cleanup.enter_context(stage_lock(args.run, lock or stage))
    for home in {args.run, *map(os.path.dirname, outputs)}:
        sweep(home or ".")
    if stage in EXCLUSIVE_STAGES:
        with stage_lock(args.run, EXCLUSIVE_STAGES[stage]):
            pass
    if outputs and not args.force:
        refuse_other(started, outputs, update, known=inputs is not None)
    for output in outputs:
        refuse_foreign(output, stage, beside)
    return started


def as_flag(name: str, value) -> str:
    """A flag and its value in words."""
    flag = f"--{name.replace('_', '-')}"
    return f"no {flag}" if value is None else f"{flag} {shown(value)}"


def within(run: str, value):
    """A flag's value; of a path in the run directory what it is from there, as the directory may be moved."""
    if isinstance(value, (list, tuple)):
        return [within(run, each) for each in value]
    inside = isinstance(value, str) and value.startswith(os.path.join(run, ""))
    return f"RUN/{os.path.relpath(value, run)}" if inside else value


def refuse_own_source(model: dict, *outputs: str) -> None:
    """Raise UserError if an output would replace the source model itself. model: from a record."""
    for output in outputs:
        if os.path.realpath(model["path"]) == os.path.realpath(output):
            raise UserError(f"{output}: expected another directory than that of the source model; pass "
                            "another --run")


def refuse_other(started: Claim, outputs, update: bool, known: bool) -> None:
    """Raise Complete if the outputs are those of `started`, whose inputs are known; UserError for others."""
    faults = [find_fault_of_files(output) for output in outputs]
    modified = next((fault for fault in faults if fault and fault[0] == "modified"), None)
    if modified:
        raise UserError(f"{modified[1]} was modified after {started.stage} wrote it; pass --force to "
                        "replace it")
    if any(faults):
        return
    differences = filter(None, (difference(started, output) for output in outputs))
    found = next(differences, None)
    if found is None and known:
        raise Complete(f"{', '.join(outputs)}: complete, by this command and from these inputs; --force "
                       "starts over")
    if not update:
        state = f"already exists, {found}" if found else "already exists"
        raise UserError(f"{outputs[-1]} {state}; pass --force to replace it")


def difference(started: Claim, output: str) -> str | None:
    """How the output `started` would make differs from the existing one's record; None if it does not."""
    record = read_json(record_path(output))
    if find_fault(record, started.stage):
        return f"with a record that is not one of {started.stage}"
    flags, asked = record.get("flags") or {}, started.flags
    for name, value in flags.items():
        if name in asked and asked[name] != value:
            return f"made with {as_flag(name, value)}, not {as_flag(name, asked[name])}"
    now, before = started.inputs, record["inputs"]
    for name, digest in now.items():
        moved = name not in before and digest in before.values()  # an artifact, whose content counts
        newer = len(digest) == len(before.get(name, "")) == 40  # a commit of the same data set of the hub
        if before.get(name) != digest and not moved and not newer:
            return f"made from another {os.path.basename(name)}"
    for name, digest in before.items():
        kept = name in now or os.path.exists(os.path.join(started.args.run, name))
        if not kept and digest not in now.values():
            return f"made from {name}, which is gone"
    return None if flags else "made by an earlier version"


def find_fault_of_files(output: str) -> tuple[str, str] | None:
    """("missing" or "modified", path) of the first such file of an artifact; None if it is complete."""
    record = record_path(output)
    missing = None if os.path.isfile(record) else ("missing", record)
    for name, expected in named_files(record).items():
        path = os.path.join(os.path.dirname(record), name)
        if not os.path.isfile(path):
            missing = missing or ("missing", path)
        elif file_digest(path) != expected:
            return "modified", path
    return missing


def refuse_foreign(output: str, stage: str, beside) -> None:
    """Raise UserError for a file in the way of an artifact that no record of this stage names."""
    path = record_path(output)
    home, name = os.path.split(path)
    record, named = read_json(path), set()
    if isinstance(record, dict) and record.get("stage") == stage:
        named = {name, *named_files(path)}
    present = {name, *beside}
    if os.path.isdir(output) and not os.path.islink(output):
        present = set(files_in(output))
    elif output != path:
        home, present = os.path.split(output)[0], {os.path.basename(output)}  # a file or a link
    for path in sorted(os.path.join(home, name) for name in present - named):
        if os.path.lexists(path):
            kind = "symbolic link" if os.path.islink(path) else "file"
            raise UserError(f"{path}: expected nothing or what {stage} wrote, found a {kind} that no record "
                            "of it names; move it away first")


@contextlib.contextmanager
def stage_lock(run: str, stage: str):
    """Context manager: a stage's lock in a run directory, which is made, and removed if it is still empty.

    Raises UserError if the lock is held.
    """
    created = not os.path.isdir(run)
    os.makedirs(run, exist_ok=True)
    path = os.path.join(run, f".{os.path.splitext(os.path.basename(stage))[0]}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        holder = lock_holder(descriptor)
        if holder is None:
            os.close(descriptor)
            raise UserError(f"{path}: expected nothing or a lock, found another file; move it away first")
        try:
            if not lock(descriptor):
                print(f"warning: {run}: its file system has no locks: nothing stops a second {stage} there",
                      file=sys.stderr)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UserError(f"{run}: expected no {stage} running there, found "
                            f"{holder or 'another process'}") from error
        links = os.fstat(descriptor).st_nlink
        if links == 1:
            break
        os.close(descriptor)  # its holder has removed it meanwhile
        if links:  # or a copy of the run directory has it as a hard link
            os.remove(path)
    since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
        os.close(descriptor)
        if created:
            with contextlib.suppress(OSError):
                os.rmdir(run)


def lock_holder(descriptor: int) -> str | None:
    """What an open lock says of its holder, "" for a new one; None if the file is no lock."""
    status, text = os.fstat(descriptor), ""
    if stat.S_ISREG(status.st_mode):
        text = os.pread(descriptor, 200, 0).decode(errors="replace")
    new = not text and stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    return text if new or text.startswith("process ") else None


def record_path(path: str) -> str:
    """Where the record of an artifact is: stage.json in a directory, X.json of X.safetensors or X.json."""
    beside = path.endswith(WITH_RECORD) and not os.path.isdir(path)
    return f"{os.path.splitext(path)[0]}.json" if beside else os.path.join(path, RECORD)


def digest(path: str) -> str:
    """sha256 that identifies an artifact: that of its record, which has those of its files, or of a file."""
    return sha256(record_path(path) if os.path.isdir(path) or path.endswith(WITH_RECORD) else path)


def file_digest(path: str) -> str:
    """sha256 of a file; of a model card without the scores that stage 7 puts in."""
    if os.path.basename(path) != CARD:
        return sha256(path)
    with open_bytes(path) as file:
        whole, _, after = file.read().rpartition(END_OF_SCORES.encode())
    return hashlib.sha256(whole.rpartition(SCORES.encode())[0] + after).hexdigest()


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


def package_versions(names) -> dict[str, str]:
    """Name -> version of those packages that are installed; stages run without datasets, for one."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def source_commit() -> str | None:
    """The git commit of this source, with -dirty if it was edited since; None if it has no repository."""
    source = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

    def git(*command: str) -> str:
        done = subprocess.run(("git", *command), cwd=source, capture_output=True, text=True, check=False)
        return done.stdout

    with contextlib.suppress(OSError):  # git is not installed
        if git("rev-parse", "--show-toplevel").rstrip("\n") == source:  # not a repository around it
            return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip() or None
    return None


@contextlib.contextmanager
def write_beside(path: str):
    """Context manager: an empty directory to fill with X.json, by write_record, and the files next to it.

    path: that of X.json, which takes its name first: if the process is killed then, X.json says which files
    are ours, and sweep() goes on. Files next to it that an earlier X.json named, and this one does not, are
    removed, unless they were modified.
    """
    home, name = os.path.split(path)
    with unfinished(path) as aside:
        os.mkdir(aside)
        yield aside
        flush(aside)
        before = named_files(path)
        files = [name, *named_files(os.path.join(aside, name))]
        for file in files:
            os.rename(os.path.join(aside, file), os.path.join(home, file))
    for file in before.keys() - files:
        other = os.path.join(home, file)
        if os.path.basename(file) == file and os.path.isfile(other) and sha256(other) == before[file]:
            os.remove(other)


def write_record(directory: str, record: dict, name: str = RECORD, of: list[str] | None = None) -> None:
    """Write a record with the sha256 of these files, by default of all others there. Call it last."""
    names = [other for other in of or files_in(directory) if other != name]
    files = {other: file_digest(os.path.join(directory, other)) for other in names}
    write_json(os.path.join(directory, name), record | {"files": files})


def read_record(path: str, stage: str, model: dict | None = None) -> dict:
    """The record of an artifact of `stage`, with every field validated; for `model` if one is given.

    path: a .safetensors file, a .json artifact or a directory. Raises UserError.
    """
    if not os.path.exists(path):
        raise UserError(f"{path} not found; run {stage} first")
    where = record_path(path)
    record = read_json(where)
    if record is None:
        raise UserError(f"{where}: expected the record of {stage}, found none that can be read; "
                        f"run {stage} again")
    if isinstance(record, dict) and isinstance(record.get("stage"), str) and record["stage"] != stage:
        other = shown(record["stage"])[1:-1]
        raise UserError(f"{path}: expected an artifact of {stage}, found one of {other}")
    fault = find_fault(record, stage)
    if fault:
        raise UserError(f"{where}: {fault}; run {stage} again")
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
    """Raise UserError unless a directory artifact has the files in its record, as recorded.

    Nor may a checkpoint have others that transformers would load with them, as it prefers model.safetensors
    to shards. Its README.md may be anyone's.
    """
    others = {name for name in files_in(path)
              if name.endswith(CHECKPOINT_SUFFIXES) and "/." not in f"/{name}"}
    others -= {*record["files"], RECORD}
    if others and "config.json" in record["files"]:
        raise UserError(f"{path}: expected only the files in its {RECORD}, found also {min(others)}; "
                        "remove it")
    for name in record["files"].keys() - {CARD}:
        check_content(path, name, record, sha256)


def check_content(directory: str, name: str, record: dict, digest_of) -> None:
    """Raise UserError unless digest_of(a file's path) is what the record says of this name."""
    path, stage = os.path.join(directory, name), record["stage"]
    if not os.path.isfile(path):
        raise UserError(f"{path}: expected the file written by {stage}, found none; "
                        f"run {stage} again with --force")
    if digest_of(path) != record["files"].get(name):
        raise UserError(f"{path}: its content does not match its record (truncated or modified); "
                        f"run {stage} again with --force")


def read_verified(directory: str, name: str, record: dict) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that an artifact's record names, as they were written.

    They are copies, because those of `load` are 8-byte aligned; complex kernels need 16. Raises UserError.
    """
    content = b""

    def digest_of(path: str) -> str:
        nonlocal content
        with open(path, "rb") as file:
            content = file.read()
        return hashlib.sha256(content).hexdigest()

    check_content(directory, name, record, digest_of)
    try:
        return {key: tensor.clone() for key, tensor in load(content).items()}
    except SafetensorError as error:
        raise UserError(f"{os.path.join(directory, name)}: expected a safetensors file, found none that can "
                        f"be read: {error}") from error


def read_tensors(path: str, stage: str) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors of X.safetensors and their record. Raises UserError if missing, damaged or foreign."""
    record = read_record(path, stage)
    return read_verified(*os.path.split(path), record), record
