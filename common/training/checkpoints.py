"""Training checkpoints: sharded; each gets its name when it is complete, and lists its files and their sizes.

A checkpoint step-N/ holds weights.X for each parameter X of the trainee and optimizer.state.X.Y for its AdamW
state, in safetensors files that each rank writes by itself. Learning rates and the like follow from the step
and are not stored. The last two checkpoints are kept and, of a GQA student, the one with the lowest held-out
KL. A training's directory has its name from the first step; settings.json says what must match to go on.
"""

import contextlib
import logging
import os
import re
import shutil
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from common.models.load import kept_tensors
from common.run.artifact import RECORD, find_fault, remove, sweep, take_name
from common.run.errors import UserError
from common.run.files import beside, files_in, move_aside, read_json, sync, write_json
from common.training.lines import METRICS, heldout_kl, read_metrics

KEPT = 2
SETTINGS = "settings.json"  # the settings that training started with
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def refuse_foreign(directory: str, ranks) -> None:
    """Raise UserError if a training's directory has something else. All ranks call it."""
    if ranks.first:
        sweep(directory)
    found = sorted(os.listdir(directory)) if ranks.first and os.path.isdir(directory) else []
    if of_first_rank(bool(found) and SETTINGS not in found):
        raise UserError(f"{directory}: expected nothing or a training with its {SETTINGS}, found other "
                        "files; move it away first")


def begin(directory: str, settings: dict, ranks) -> None:
    """Record the settings of a training run in its directory. All ranks call it.

    Raises UserError if a run with other settings was started there, or as refuse_foreign.
    """
    refuse_foreign(directory, ranks)
    before = of_first_rank(read_settings(directory))
    if not before and ranks.first:
        write_json(os.path.join(directory, SETTINGS), settings)
    if before and (changes := changes_of(before, settings)):
        raise UserError(f"{directory} was started with other settings ({changes}): pass the same, or --force "
                        "to start over")


def changes_of(before: dict, settings: dict) -> str:
    """The settings that were others before, for an error message; empty if none was."""
    return ", ".join(f"{name} {before.get(name)} -> {value}" for name, value in settings.items()
                     if before.get(name) != value)


def start_anew(directories: list[str], ranks) -> None:
    """--force: move earlier trainings aside. They may be days of work, so nothing is deleted."""
    dist.barrier()
    if ranks.first:
        for path in filter(os.path.lexists, directories):
            print(f"moved   {path} to {move_aside(path)}", flush=True)
    dist.barrier()


def remove_training(directory: str) -> None:
    """Remove a training whose result is written: its checkpoints first, then what else it wrote."""
    for path in saved_checkpoints(directory):
        remove(path)
    shutil.rmtree(os.path.join(directory, "tensorboard"), ignore_errors=True)
    for name in (METRICS, SETTINGS):
        os.remove(os.path.join(directory, name))
    with contextlib.suppress(OSError):  # it has other files
        os.rmdir(directory)


def read_settings(directory: str) -> dict:
    """The settings of the training that was begun in a directory, or none. Raises UserError."""
    path = os.path.join(directory, SETTINGS)
    if not os.path.exists(path):
        return {}
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected the settings of a training run, found none that can be read; "
                        "--force starts over")
    return settings


def saved_checkpoints(directory: str) -> list[str]:
    """Checkpoints in a directory, oldest first: step-00000040, ..."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return [os.path.join(directory, name) for name in sorted(names) if re.fullmatch(r"step-\d{8}", name)]


def best(directory: str) -> str | None:
    """The saved checkpoint whose GQA student had the lowest held-out KL on text and chats, or None."""
    saved = {step_of(path): path for path in saved_checkpoints(directory)}
    measured = {line["step"]: kl for line in read_metrics(os.path.join(directory, METRICS))
                if (kl := heldout_kl(line)) is not None and "mask_target" not in line}
    steps = saved.keys() & measured.keys()
    return saved[min(steps, key=lambda step: (measured[step], -step))] if steps else None


def path_of(directory: str, step: int) -> str:
    """The checkpoint after `step` steps in a directory."""
    return os.path.join(directory, f"step-{step:08d}")


def step_of(path: str) -> int:
    """The number of completed steps at a checkpoint."""
    return int(path.rsplit("-", 1)[1])


def save(job) -> None:
    """Save the weights, replicated parameters and optimizer state of a Job. All ranks call it.

    Raises UserError if it cannot be written (disk full); earlier checkpoints stay intact.
    """
    directory, rank = job.directory, dist.get_rank()
    path = path_of(directory, job.step)
    aside = of_first_rank(beside(path))
    tensors = job_tensors(job)
    files = {name: file_number(name) for name in tensors}
    try:
        if rank == 0:
            os.makedirs(aside, exist_ok=True)  # another rank's writer may have made it
            if os.path.exists(os.path.join(directory, METRICS)):
                sync(os.path.join(directory, METRICS))
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(aside, files, save_distributed=True))
        for name in os.listdir(aside):
            if name.startswith(f"shard-{rank + 1:05d}-"):
                sync(os.path.join(aside, name))
        dist.barrier()
        if rank == 0:
            sizes = {name: {"size": os.path.getsize(os.path.join(aside, name))} for name in files_in(aside)}
            write_json(os.path.join(aside, RECORD), {"step": job.step, "files": sizes})
    except (CheckpointException, OSError) as error:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(directory).free / 2**30
        raise UserError(f"{path}: cannot be written ({_reason(error)}; {free:.1f} GiB free there); "
                        "earlier checkpoints are intact, and the same command resumes from the last"
                        ) from error
    if rank == 0:
        take_name(aside, path)
        for old in set(saved_checkpoints(directory)[:-KEPT]) - {best(directory)}:
            remove(old)
    dist.barrier()


def job_tensors(job, stored_name=lambda name: name) -> dict[str, torch.Tensor]:
    """A Job's weights, replicated parameters and optimizer state themselves, by their names in a checkpoint.

    Of a parameter with two names, an output head that is the embedding, a checkpoint has the first.
    """
    weights, states = get_state_dict(job.trainee, job.optimizer, options=FLAT)
    first = kept_tensors(job.trainee)
    tensors = {f"weights.{stored_name(name)}": tensor for name, tensor in weights.items() if name in first}
    return tensors | {f"optimizer.{stored_name(name)}": tensor for name, tensor in states.items()
                      if name.startswith("state.")}


def file_number(name: str) -> int:
    """A tensor's file among those of its rank: one a decoder layer, which is built in memory."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return int(layer[1]) + 2 if layer else 1


def _reason(error: Exception) -> str:
    """First line of an error's message; of errors gathered from all ranks, an OSError's if there is one."""
    failures = [failure for failure, _ in getattr(error, "failures", {}).values()] or [error]
    told = next((failure for failure in failures if isinstance(failure, OSError)), failures[0])
    return str(told).split("\n")[0]


def damage(path: str) -> str | None:
    """What is wrong with a checkpoint's files; None if they have their sizes and can be opened."""
    record = read_json(os.path.join(path, RECORD))
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        return f"its {RECORD} is missing or cannot be read"
    fault = find_fault(path, record)
    for name in record["files"] if fault is None else ():
        try:
            if name.endswith(".safetensors"):
                with safe_open(os.path.join(path, name), framework="pt"):
                    pass
        except SafetensorError as error:
            return f"{name} cannot be read ({error})"
    return fault


def of_first_rank(value):
    """The first rank's value, on every rank: nodes may see a shared disk in different states."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def newest(directory: str, ranks) -> str | None:
    """The newest intact checkpoint, to resume from; None if there are no checkpoints. All ranks call it.

    Damaged ones are renamed to step-N.damaged-1 and reported. Raises UserError if all are damaged.
    """
    saved = of_first_rank(saved_checkpoints(directory))
    for path in reversed(saved):
        fault = of_first_rank(damage(path) if ranks.first else None)
        if fault is None:
            ranks.say(f"resumes {directory} after step {step_of(path)}")
            return path
        if ranks.first:
            name = os.path.basename(move_aside(path, "damaged"))
            ranks.say(f"damaged {path}: {fault}; moved to {name}; using the one before it")
    if saved:
        raise UserError(f"{directory}: expected an intact checkpoint, found {len(saved)} damaged; "
                        "--force starts over")
    return None


def _read(tensors: dict, path: str, **options) -> None:
    """Fill tensors from a checkpoint. Raises UserError if its files cannot be read into them."""
    logging.disable(logging.CRITICAL)  # torch logs what is said below
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path), **options)
    except CheckpointException as error:
        raise UserError(f"{path}: its tensors cannot be read ({_reason(error)})") from error
    finally:
        logging.disable(logging.NOTSET)


def load(job, path: str | None, stored_name=lambda name: name) -> None:
    """Load a Job's weights, replicated parameters, optimizer state and step from a checkpoint.

    path: of one from any world size; None leaves the job at its first step. stored_name: a parameter's name
    in the trainee -> its name in the checkpoint. Tensors that the trainee lacks are not read. Raises
    UserError if one it needs is missing.
    """
    if path:
        _read(job_tensors(job, stored_name), path)  # in place
        job.step = step_of(path)


class TrainedWeights:
    """The weights of a checkpoint, unsharded, read a few tensors at a time.

    part: "net" for the language model, "replicated" for the parameters that every rank holds unsharded.
    Raises UserError if the checkpoint is damaged.
    """

    def __init__(self, path: str, part: str = "net"):
        fault = damage(path)
        if fault:
            raise UserError(f"{path}: expected an intact training checkpoint, found that {fault}")
        self.path, self.prefix = path, f"weights.{part}."
        entries = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
        self.stored = {key.removeprefix(self.prefix): entry for key, entry in entries.items()
                       if key.startswith(self.prefix)}

    def names(self) -> set[str]:
        """Names of the stored tensors."""
        return set(self.stored)

    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill tensors on the CPU by name. Raises UserError for one that has another shape."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
            _read({self.prefix + name: tensor for name, tensor in tensors.items()}, self.path, no_dist=True)


def whole_weights(path: str, part: str = "net") -> dict[str, torch.Tensor]:
    """All weights of a checkpoint by name. path, part: as for TrainedWeights."""
    weights = TrainedWeights(path, part)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
               for name, entry in weights.stored.items()}
    weights.read(tensors)
    return tensors
