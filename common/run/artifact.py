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
FORMAT = 1  # of records; one that readers of another cannot take has another number
REMOVED = ".removed"  # at the end of the name of what is being removed
LEFT = re.compile(rf"\.(.+)\.\d+-\d+({UNFINISHED}|{REMOVED})")  # by killed processes
RUN = "RUN/"  # what paths in the run directory begin with in records, as the directory may be moved
SCORED = ("README.md", ".eval_results")  # of a checkpoint: stage 7 writes into them
PATH_FLAGS = ("run", "calibration", "similarity", "groups")  # flags that name artifacts: their digests count
GROUPS, TRAINING = "03_group.py", "05_prune_train.py"
KEPT = (GROUPS, TRAINING)  # stages whose output is never removed: it was edited, or took days
EXCLUSIVE_STAGES = {"04_align.py": TRAINING, TRAINING: "04_align.py"}  # never at the same time
PACKAGES = ("torch", "transformers", "datasets", "numpy", "tqdm", "safetensors")


@dataclass(frozen=True)
class Started:
    """A stage at work: its flags as they were given and as it completes them, and what it reads."""

    stage: str
    args: object  # the flags, frozen
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
            "packages": package_versions(),
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
    started = Started(stage, args, flags, inputs or {}, Clock())
    if os.environ.get("RANK", "0") != "0":
        return started
    errors.cleanup.enter_context(locked(args.run, lock or os.path.basename(stage)))
    if stage in EXCLUSIVE_STAGES:
        with locked(args.run, EXCLUSIVE_STAGES[stage]):
            pass
    for output in outputs:
        sweep(*os.path.split(os.path.abspath(output)))
    found = [find(started, output) for output in outputs]
    if outputs and all(found):
        raise Complete(f"{', '.join(outputs)}: complete, by this command and from these inputs; --force "
                       "starts over")
    return started


def find(started: Started, output: str) -> bool:
    """Whether `started` has made an output, completely. Raises UserError for one that it may not replace."""
    if not os.path.lexists(output):
        return False
    record = load_record(output)
    if record is None or record.get("stage") != started.stage:
        raise UserError(f"{output}: expected nothing or what {started.stage} wrote, found something else; "
                        "move it away first")
    if started.args.force:
        return False
    fault = find_fault(output, record)
    if fault:
        raise UserError(f"{fault}; pass --force to replace {output}")
    other = difference(started, record)
    if other and not getattr(started.args, "update", False):
        raise UserError(f"{output} already exists, {other}; pass --force to replace it")
    return other is None


def difference(started: Started, record: dict) -> str | None:
    """How what `started` would make differs from an output with this record; None if it does not."""
    for name, value in record["flags"].items():
        asked = started.flags.get(name, value)
        if asked != value:
            return f"made with {as_flag(name, value)}, not {as_flag(name, asked)}"
    for name, digest in started.inputs.items():
        if digest not in record["inputs"].values():
            return f"made from another {os.path.basename(name)}"
    return None


def as_flag(name: str, value) -> str:
    """A flag and its value in words."""
    flag = f"--{name.replace('_', '-')}"
    return f"no {flag}" if value is None else f"{flag} {value!r}"


def within(run: str, value):
    """A value for a record, in which paths in the run directory begin with RUN."""
    homes = (os.path.join(run, ""), os.path.join(os.path.abspath(run), ""))

    def recorded(text: str) -> str:
        home = next(filter(text.startswith, homes), None)
        return text if home is None else RUN + text.removeprefix(home)

    return with_texts(value, recorded)


def resolved(run: str, value):
    """A value of a record, in which paths that begin with RUN are in this run directory."""

    def found(text: str) -> str:
        return os.path.join(run, text.removeprefix(RUN)) if text.startswith(RUN) else text

    return with_texts(value, found)


def with_texts(value, change):
    """A JSON value with change(text) in place of each of its strings but names."""
    if isinstance(value, dict):
        return {name: with_texts(each, change) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_texts(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


@contextlib.contextmanager
def write_directory(path: str):
    """Context manager: an empty directory to fill, with write_record last, which then gets its name.

    It takes the place of an earlier one as by take_name. Raises UserError where it cannot be written.
    """
    aside = beside(path)
    os.makedirs(aside)
    try:
        yield aside
        take_name(aside, path)
    except UserError as error:
        raise UserError(str(error).replace(aside, path)) from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written: {error}".replace(aside, path)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_record(directory: str, record: dict) -> None:
    """Flush the files of a directory and write its record, with a stamp of each. Call it last."""
    flush(directory)
    files = {name: None if name.startswith(SCORED) else stamp(os.path.join(directory, name))
             for name in own_files(directory) if name != RECORD}
    write_json(os.path.join(directory, RECORD), record | {"format": FORMAT, "files": files})


def load_record(directory: str) -> dict | None:
    """The record of an artifact or a part; None without one that this version can read."""
    record = read_json(os.path.join(directory, RECORD))
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


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
    record = load_record(path)
    again = record is not None and record.get("stage") not in KEPT and is_exact(path, record)
    old = beside(path, REMOVED) if again else free_name(path)
    try:
        os.rename(path, old)
        os.rename(aside, path)
    except BaseException:  # interrupted in between
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
    for entry in os.listdir(home) if os.path.isdir(home) else ():
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
    record = load_record(path)
    made = record is not None and json.loads(json.dumps(command)).items() <= record.items()
    return record if made and find_fault(path, record) is None else None


def read_record(path: str, stage: str, model: dict | None = None) -> dict:
    """The record of a stage's artifact, of `model` if one is given. Paths in RUN are where it is today.

    Raises UserError for a missing one, and for one of another stage or model.
    """
    if not os.path.exists(path):
        raise UserError(f"{path} not found; run {stage} first")
    record = load_record(path)
    if record is None:
        raise UserError(f"{path}/{RECORD}: expected the record of {stage}, found none that this version can "
                        f"read; run {stage} again")
    if record.get("stage") != stage:
        raise UserError(f"{path}: expected an artifact of {stage}, found one of {record.get('stage')}")
    record = resolved(os.path.dirname(os.path.normpath(path)), record)
    if model is not None:
        check_same_model(path, model, record["model"])
    return record


def check_same_model(path: str, expected: dict, actual: dict) -> None:
    """Raise UserError if an artifact belongs to another model."""
    if expected["fingerprint"] != actual["fingerprint"]:
        raise UserError(f"{path}: expected an artifact of model {expected['path']} "
                        f"({expected['fingerprint'][:12]}), "
                        f"found one of {actual['path']} ({actual['fingerprint'][:12]})")


def verify_files(path: str, record: dict) -> None:
    """Raise UserError unless an artifact has the files in its record, as they were written."""
    fault = find_fault(path, record)
    if fault:
        raise UserError(f"{fault}; run {record['stage']} again with --force")


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
    if os.path.getsize(file) != expected["size"] or "sha256" not in expected:
        return os.path.getsize(file) == expected["size"]
    remember({file: expected})
    return stamp(file)["sha256"] == expected["sha256"]


def read_tensors(directory: str, name: str, record: dict) -> dict:
    """The tensors of a safetensors file of an artifact. Raises UserError unless it is as its record says.

    They are copies, because those of `load_file` are 8-byte aligned; complex kernels need 16.
    """
    verify_files(directory, record | {"files": {name: record["files"][name]}})
    return {key: tensor.clone() for key, tensor in load_file(os.path.join(directory, name)).items()}


def digest(path: str) -> str:
    """sha256 of an artifact's record, which has those of its files."""
    return sha256(os.path.join(path, RECORD))


def input_digests(run: str, paths: list[str]) -> dict[str, str]:
    """Path as in records -> digest, of those artifacts that exist: reading another says what to do."""
    return {within(run, path): digest(path) for path in paths if os.path.exists(os.path.join(path, RECORD))}


def remember_inputs(run: str) -> None:
    """Take over the stamps of the files that the calibration in a run directory has read."""
    record = load_record(os.path.join(run, "calibration"))
    read = resolved(run, record.get("read", [])) if record else []
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


def package_versions() -> dict[str, str]:
    """Name -> version of those PACKAGES that are installed; stages run without datasets, for one."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def source_commit() -> str | None:
    """The git commit of this source, with -dirty if it was edited since; None if it has no repository."""
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    own = ("git", "--git-dir=.git", "--work-tree=.")  # not a repository around it
    try:
        done = subprocess.run((*own, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
                              cwd=source, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None
