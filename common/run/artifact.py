"""Artifacts, which stages exchange: a directory with a stage.json, its record.

The record has the stage, its flags and the digests of its inputs, and the size, time and sha256 of each file.
So it answers: is the artifact complete, and did this command make it from these inputs? A directory in a
directory that has a record of its own, such as a training's checkpoint, is a part. An artifact is written
next to its name and renamed once it is complete; what cannot be made again is moved, never deleted.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load_file

from common.run import errors
from common.run.errors import Complete, UserError
from common.run.files import (
    UNFINISHED,
    beside,
    files_in,
    flush,
    free_name,
    locked,
    read_json,
    remember,
    sha256,
    stamp,
    write_json,
)
from common.run.progress import Clock

RECORD = "stage.json"
REMOVED = ".removed"  # at the end of the name of what is being removed
LEFT = re.compile(rf"\.(.+)\.\d+-\d+({UNFINISHED}|{REMOVED})")  # by killed processes
RUN = "RUN/"  # what paths in the run directory begin with in records, as the directory may be moved
SCORED = ("README.md", ".eval_results")  # of a checkpoint: stage 7 writes into them
LOADED = (".safetensors", ".bin", ".json", ".jinja", ".model")  # files that transformers may load
PATH_FLAGS = ("run", "calibration", "similarity", "groups")  # flags that name artifacts: their digests count
GROUPS, TRAINING = "03_group.py", "05_prune_train.py"
KEPT = (GROUPS, TRAINING)  # stages whose output is never removed: it was edited, or took days
# never at the same time
EXCLUSIVE_STAGES = {"04_align.py": "05_prune_train.py", "05_prune_train.py": "04_align.py"}
PACKAGES = ("torch", "transformers", "datasets", "numpy", "tqdm", "safetensors")
FIELDS = ("flags", "arguments", "model", "inputs", "packages", "commit", "seconds", "date", "summary",
          "files")  # of every stage's record
# stage -> fields of its record and, behind a dot, of its summary, that others read
FIELDS_OF = {
    "01_calibrate.py": ("read", ".tokens", ".sequences", ".length", ".text", ".positions"),
    "03_group.py": ("groups", "calibration", ".kv_heads", ".by", ".criterion"),
    "04_align.py": ("groups", ".kv_heads", ".by", ".rotate", ".merge", ".refit", ".key_context",
                    ".perplexity_source", ".perplexity_merged"),
    "05_prune_train.py": (".steps", ".batch", ".lr", ".loss", ".tokens"),
    "06_export.py": (".dtype", ".class"),
    "07_eval.py": ("device", "results"),
}


@dataclass(frozen=True)
class Started:
    """A stage at work: its flags as they were given and as it completes them, and what it reads."""

    stage: str
    args: object
    flags: dict
    inputs: dict[str, str]  # from input_digests, before they were read: files may have been replaced since
    clock: Clock

    def record(self, model: dict, summary: dict, **others) -> dict:
        """The record of an artifact: stage, flags, inputs, versions and key metrics, and others."""
        return within(self.args.run, {
            "stage": self.stage,
            "flags": self.flags,
            "arguments": {name: value for name, value in vars(self.args).items() if name != "force"},
            "model": model,
            "model_from_run": os.path.relpath(model["path"], self.args.run),  # where both may have moved
            "inputs": self.inputs,
            "packages": package_versions(PACKAGES),
            "commit": source_commit(),
            "seconds": self.clock(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "summary": summary,
        } | others)


def begin_stage(stage: str, args, *outputs: str, inputs: dict | None = None, lock: str = "") -> Started:
    """Start a stage: lock it in its run directory until run_stage ends, and look at what its outputs hold.

    outputs: directories in the order in which they get their names. Raises Complete if this command has made
    all of them from these inputs. Raises UserError if another process is running the stage in args.run, or
    the one that excludes it; if an output is of another stage; and unless --force (or --update) replaces it,
    if it is another command's or not as it was written. lock: its name, if it is not the stage's. Under
    torchrun only rank 0 does so.
    """
    flags = within(args.run, {name: value for name, value in vars(args).items()
                              if name not in (*PATH_FLAGS, "force", "update")})
    started = Started(stage, args, json.loads(json.dumps(flags)), inputs or {}, Clock())
    if os.environ.get("RANK", "0") != "0":
        return started
    errors.cleanup.enter_context(locked(args.run, lock or os.path.basename(stage)))
    if stage in EXCLUSIVE_STAGES:
        with locked(args.run, EXCLUSIVE_STAGES[stage]):
            pass
    for output in outputs:
        sweep(*os.path.split(os.path.abspath(output)))
    found = [find(started, output, getattr(args, "update", False)) for output in outputs]
    if outputs and all(found):
        raise Complete(f"{', '.join(outputs)}: complete, by this command and from these inputs; --force "
                       "starts over")
    return started


def find(started: Started, output: str, update: bool = False) -> bool:
    """Whether `started` has made an output, completely. Raises UserError for one that it may not replace."""
    if not os.path.lexists(output):
        return False
    record = read_json(os.path.join(output, RECORD))
    if not isinstance(record, dict) or record.get("stage") != started.stage:
        raise UserError(f"{output}: expected nothing or what {started.stage} wrote, found something else; "
                        "move it away first")
    if started.args.force:
        return False
    fault = field_fault(record, started.stage) or find_fault(output, record)
    if fault:
        raise UserError(f"{fault}; pass --force to replace {output}")
    other = difference(started, record)
    if other and not update:
        raise UserError(f"{output} already exists, {other}; pass --force to replace it")
    return other is None


def difference(started: Started, record: dict) -> str | None:
    """How what `started` would make differs from an output with this record; None if it does not."""
    for name, value in record["flags"].items():
        asked = started.flags.get(name, value)
        if asked != value:
            return f"made with {as_flag(name, value)}, not {as_flag(name, asked)}"
    now, before = started.inputs, record["inputs"]
    for name, digest in now.items():
        commit = len(digest) == len(before.get(name, "")) == 40  # of a data set of the hub, which goes on
        if digest not in before.values() and not commit:
            return f"made from another {os.path.basename(name)}"
    for name in before.keys() - now.keys():
        gone = not os.path.exists(resolved(started.args.run, name))
        if gone and before[name] not in now.values():
            return f"made from {name}, which is gone"
    return None


def as_flag(name: str, value) -> str:
    """A flag and its value in words."""
    flag = f"--{name.replace('_', '-')}"
    return f"no {flag}" if value is None else f"{flag} {shown(value)}"


def shown(value) -> str:
    """A value for an error message, shortened and printable."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def within(run: str, value):
    """A value for a record, in which paths in the run directory begin with RUN."""
    if isinstance(value, dict):
        return {name: within(run, each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [within(run, each) for each in value]
    for home in (os.path.join(run, ""), os.path.join(os.path.abspath(run), "")):
        if isinstance(value, str) and value.startswith(home):
            return RUN + value.removeprefix(home)
    return value


def resolved(run: str, value):
    """A value of a record, in which paths that begin with RUN are in this run directory."""
    if isinstance(value, dict):
        return {name: resolved(run, each) for name, each in value.items()}
    if isinstance(value, list):
        return [resolved(run, each) for each in value]
    inside = isinstance(value, str) and value.startswith(RUN)
    return os.path.join(run, value.removeprefix(RUN)) if inside else value


@contextlib.contextmanager
def write_directory(path: str):
    """Context manager: an empty directory to fill, with write_record last, which then gets its name.

    It takes the place of an earlier one as by take_name. Raises UserError where it cannot be written.
    """
    aside = beside(path)
    created = not os.path.isdir(os.path.dirname(aside))
    os.makedirs(aside)
    try:
        yield aside
        take_name(aside, path)
    except (OSError, SafetensorError) as error:
        if aside not in f"{getattr(error, 'filename', None) or aside}":  # that of another file
            raise
        reason = getattr(error, "strerror", None) or str(error).replace(aside, path)
        raise UserError(f"{path}: cannot be written: {reason}") from error
    except UserError as error:
        raise UserError(str(error).replace(aside, path)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if created:
            with contextlib.suppress(OSError):  # not empty: the new one has its name
                os.rmdir(os.path.dirname(aside))


def write_record(directory: str, record: dict) -> None:
    """Flush the files of a directory and write its record, with a stamp of each. Call it last."""
    flush(directory)
    files = {name: None if name.startswith(SCORED) else stamp(os.path.join(directory, name))
             for name in own_files(directory) if name != RECORD}
    write_json(os.path.join(directory, RECORD), record | {"files": files})


def own_files(directory: str) -> list[str]:
    """The files in a directory; of a part in it only the record, which names its files."""
    files = files_in(directory)
    parts = [name.removesuffix(RECORD) for name in files if name.endswith(f"/{RECORD}")]
    return [name for name in files if name.endswith(RECORD) or not name.startswith(tuple(parts))]


def take_name(aside: str, path: str) -> None:
    """Give a complete directory its name, in place of an earlier one.

    That is removed if it can be made again: it has exactly the files that its record names, as they were
    written, and is no training, teacher or groups. Any other is renamed to NAME.old-N.
    """
    if not os.path.lexists(path):
        os.rename(aside, path)
        return
    record = read_json(os.path.join(path, RECORD))
    again = isinstance(record, dict) and record.get("stage") not in KEPT and is_exact(path, record)
    old = beside(path, REMOVED) if again else free_name(path)
    try:
        os.rename(path, old)
        os.rename(aside, path)
    except BaseException:
        if not os.path.lexists(path):
            os.rename(old, path)
        raise
    if again:
        shutil.rmtree(old)
    else:
        print(f"moved   {path} to {old}", flush=True)


def is_exact(path: str, record: dict) -> bool:
    """Whether a directory has the files that its record names, and no others."""
    others = {name for name in own_files(path) if not name.startswith(SCORED)} - {RECORD, *record["files"]}
    return not others and find_fault(path, record) is None


def remove(path: str) -> None:
    """Remove a directory, so that a process that is killed leaves none that looks complete."""
    removed = beside(path, REMOVED)
    os.rename(path, removed)
    shutil.rmtree(removed)


def sweep(home: str, name: str | None = None) -> None:
    """Finish what killed processes began in a directory, of one name or of all, whose lock this process
    holds: what has its record is complete and gets its name; the rest is removed.
    """
    for entry in sorted(os.listdir(home), reverse=True) if os.path.isdir(home) else ():  # unfinished first
        match, aside = LEFT.fullmatch(entry), os.path.join(home, entry)
        if not match or name not in (None, match[1]):
            continue
        if os.path.isfile(aside):
            os.remove(aside)
        elif match[2] == UNFINISHED and os.path.exists(os.path.join(aside, RECORD)):
            take_name(aside, os.path.join(home, match[1]))
        else:
            shutil.rmtree(aside)


class Parts:
    """Finished parts of an output that takes hours, in a directory `home`: a command that was stopped goes on
    from them. Those of another command are removed.
    """

    def __init__(self, home: str, command: dict):
        """command: fields of the parts' records."""
        self.home, self.command = home, command
        sweep(home)
        for name in os.listdir(home) if os.path.isdir(home) else ():
            if self.find(name) is None:
                shutil.rmtree(os.path.join(home, name))

    def find(self, name: str) -> tuple[str, dict] | None:
        """The directory and the metrics of a part, if this command has completed it."""
        path = os.path.join(self.home, name)
        record = find_part(path, self.command)
        return record and (path, record["metrics"])

    def add(self, name: str, fill) -> tuple[str, dict]:
        """Have fill(directory) write a part and return its metrics. Returns where it is, and the metrics."""
        path = os.path.join(self.home, name)
        with write_directory(path) as aside:
            metrics = fill(aside)
            write_record(aside, self.command | {"metrics": metrics})
        return path, metrics


def find_part(path: str, command: dict) -> dict | None:
    """The record of a part that this command has completed, or None. command: fields of the record."""
    record = read_json(os.path.join(path, RECORD))
    made = isinstance(record, dict) and json.loads(json.dumps(command)).items() <= record.items()
    return record if made and find_fault(path, record) is None else None


def read_record(path: str, stage: str, model: dict | None = None) -> dict:
    """The record of a stage's artifact, of `model` if one is given. Paths in RUN are where it is today.

    Raises UserError unless it has the fields that others read.
    """
    if not os.path.exists(path):
        raise UserError(f"{path} not found; run {stage} first")
    where = os.path.join(path, RECORD)
    record = read_json(where)
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected the record of {stage}, found none that can be read; "
                        f"run {stage} again")
    if record.get("stage") != stage:
        raise UserError(f"{path}: expected an artifact of {stage}, found one of {record.get('stage')}")
    fault = field_fault(record, stage)
    if fault:
        raise UserError(f"{where}: {fault}; run {stage} again with --force")
    record = resolved(os.path.dirname(os.path.normpath(path)), record)
    if model is not None:
        check_same_model(path, model, record["model"])
    return record


def field_fault(record: dict, stage: str) -> str | None:
    """The first field that a stage's record lacks, or an earlier version's way to name files."""
    summary = record.get("summary") or {}
    for field in (*FIELDS, *FIELDS_OF.get(stage, ())):
        if field.removeprefix(".") not in (summary if field.startswith(".") else record):
            return f"expected a field {f'summary{field}' if field.startswith('.') else field}, found none"
    if any(isinstance(known, str) for known in record["files"].values()):
        return "expected sizes and times of files, found the record of an earlier version"
    return None


def check_same_model(path: str, expected: dict, actual: dict) -> None:
    """Raise UserError if an artifact belongs to another model."""
    if expected["fingerprint"] != actual["fingerprint"]:
        raise UserError(f"{path}: expected an artifact of model {expected['path']} "
                        f"({expected['fingerprint'][:12]}), "
                        f"found one of {actual['path']} ({actual['fingerprint'][:12]})")


def verify_files(path: str, record: dict) -> None:
    """Raise UserError unless an artifact has the files in its record, as they were written.

    Nor may a checkpoint have others that transformers would load with them, as it prefers model.safetensors
    to shards.
    """
    fault = find_fault(path, record)
    if fault:
        raise UserError(f"{fault}; run {record['stage']} again with --force")
    others = {name for name in own_files(path) if name.endswith(LOADED)} - {RECORD, *record["files"]}
    if others and "config.json" in record["files"]:
        raise UserError(f"{path}: expected only the files in its {RECORD}, found also {min(others)}; "
                        "remove it")


def find_fault(path: str, record: dict) -> str | None:
    """The first file of an artifact, or of a part in it, that is missing or not as its record says."""
    for name, expected in record["files"].items():
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            return f"{file} is missing"
        if expected is not None and not is_as_stamped(file, expected):
            return f"{file} is not as it was written (truncated or modified)"
        part = read_json(file) if os.path.basename(name) == RECORD else None
        fault = part and find_fault(os.path.dirname(file), part)
        if fault:
            return fault
    return None


def is_as_stamped(file: str, expected: dict) -> bool:
    """Whether a file has the size of an earlier stamp and, if that has a sha256, its time or this sha256."""
    status = os.stat(file)
    same = status.st_size == expected["size"]
    if not same or "sha256" not in expected or status.st_mtime_ns == expected["time"]:
        return same
    return sha256(file) == expected["sha256"]


def read_tensors(directory: str, name: str, record: dict) -> dict:
    """The tensors of a safetensors file of an artifact. Raises UserError unless it is as its record says.

    They are copies, because those of `load_file` are 8-byte aligned; complex kernels need 16.
    """
    verify_files(directory, record | {"files": {name: record["files"].get(name, {"size": -1})}})
    path = os.path.join(directory, name)
    try:
        return {key: tensor.clone() for key, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise UserError(f"{path}: expected a safetensors file, found none that can be read "
                        f"({error})") from error


def digest(path: str) -> str:
    """sha256 of an artifact's record, which has those of its files."""
    return sha256(os.path.join(path, RECORD))


def input_digests(run: str, paths: list[str]) -> dict[str, str]:
    """The artifacts, as paths in records -> their digests, of those that there are."""
    digests = {}
    for path in paths:
        with contextlib.suppress(OSError):  # reading it says what to do
            digests[within(run, path)] = digest(path)
    return digests


def remember_inputs(run: str) -> None:
    """Take over the stamps of the files that the calibration in a run directory has read."""
    record = read_json(os.path.join(run, "calibration", RECORD))
    read = resolved(run, record.get("read", [])) if isinstance(record, dict) else []
    remember({each["path"]: {name: each[name] for name in ("size", "time", "sha256")} for each in read})


def check_input(record: dict, path: str) -> None:
    """Raise UserError unless the artifact at `path` is among the inputs in this record."""
    if digest(path) not in record["inputs"].values():
        inputs = ", ".join(record["inputs"]) or "none"
        stage = record["stage"]
        raise UserError(f"{path}: expected the artifact that {stage} read (its inputs: {inputs}), "
                        f"found a different one; run {stage} again with --force")


def refuse_own_source(model: dict, *outputs: str) -> None:
    """Raise UserError if an output would replace the source model itself. model: from a record."""
    for output in outputs:
        if os.path.realpath(model["path"]) == os.path.realpath(output):
            raise UserError(f"{output}: expected another directory than that of the source model; pass "
                            "another --run")


def package_versions(names) -> dict[str, str]:
    """Name -> version of those packages that are installed; stages run without datasets, for one."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def source_commit() -> str | None:
    """The git commit of this source, with -dirty if it was edited since; None if it has no repository."""
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

    def git(*command: str) -> str:
        done = subprocess.run(("git", *command), cwd=source, capture_output=True, text=True, check=False)
        return done.stdout

    with contextlib.suppress(OSError):  # git is not installed
        if git("rev-parse", "--show-toplevel").rstrip("\n") == source:  # not a repository around it
            return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip() or None
    return None
