"""Training checkpoints: sharded, written aside and renamed, the last two kept, each file with its sha256.

A checkpoint step-N/ holds one tensor per name: weights.X for a parameter X of the trainee,
optimizer.state.X.Y for what AdamW remembers of it. Learning rates and the like are not in it: they follow
from the step.

torch.distributed.checkpoint describes its shards in a pickle, .metadata. Ours is unpickled with the few
classes that describe tensors and nothing else, so reading a checkpoint never runs code that lies in it.
"""

import json
import os
import pickle
import re
import shutil
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from common.artifacts import move_aside, sha256, write_json
from common.cli import UserError

KEPT = 2
DIGESTS = "sha256.json"  # file name -> digest, of every other file of a checkpoint
SETTINGS = "plan.json"  # what a training was begun with
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
METADATA = {  # all that .metadata needs; its tensors carry dtypes, which are attributes of torch
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "StorageMeta", "ChunkStorageMetadata",
        "MetadataIndex", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


def begin(directory: str, settings: dict, ranks) -> None:
    """Note the settings of a training in its directory. All ranks call it.

    Raises UserError where one was begun there with other settings: it is refused, not continued.
    """
    path = os.path.join(directory, SETTINGS)
    if os.path.exists(path):
        before = _read_settings(path)
        changed = [name for name, value in settings.items() if before.get(name) != value]
        if changed:
            changes = ", ".join(f"{name} {before.get(name)} -> {settings[name]}" for name in changed)
            raise UserError(f"{directory} was begun with other settings ({changes}): give the same, or "
                            "--force to start anew")
    elif ranks.first:
        write_json(path, settings)
    dist.barrier()


def _read_settings(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except ValueError as error:
        raise UserError(f"{path}: expected the settings of a training, found no JSON ({error}); "
                        "--force starts anew") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected the settings of a training, found {type(settings).__name__}; "
                        "--force starts anew")
    return settings


def steps_saved(directory: str) -> list[str]:
    """Checkpoints in a directory, oldest first: step-00000040, ..."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return [os.path.join(directory, name) for name in sorted(names) if re.fullmatch(r"step-\d{8}", name)]


def step_of(path: str) -> int:
    """Steps done when it was written."""
    return int(path.rsplit("-", 1)[1])


def save(job) -> None:
    """Save the weights, replicated parameters and optimizer of a Job after its step. All ranks call it.

    Raises UserError when it cannot be written (disk full); the checkpoints before it are whole.
    """
    directory, rank = job.directory, dist.get_rank()
    path = os.path.join(directory, f"step-{job.step:08d}")
    aside = path + ".tmp"
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()
    weights, optimizer_state = get_state_dict(job.trainee, job.optimizer, options=FLAT)
    tensors = {f"weights.{name}": tensor for name, tensor in weights.items()}
    for name, tensor in optimizer_state.items():
        if name.startswith("state."):
            tensors[f"optimizer.{name}"] = tensor
    try:
        dcp.save(tensors, checkpoint_id=aside)
        _write_digests(aside, rank)
    except (CheckpointException, OSError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = _reason(error)
        free = shutil.disk_usage(directory).free / 2**30
        raise UserError(f"{path}: cannot be written ({reason}; {free:.1f} GiB free there); the checkpoints "
                        f"before it are whole, and the same command resumes from the last") from error
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)  # of a run that fell back to an earlier step: the same bytes
        os.rename(aside, path)
        for old in steps_saved(directory)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def _reason(error: Exception) -> str:
    """The first line of an error; of all ranks' errors, where torch gathered them, one of the system's."""
    failures = [failure for failure, _ in getattr(error, "failures", {}).values()] or [error]
    told = next((failure for failure in failures if isinstance(failure, OSError)), failures[0])
    return str(told).split("\n")[0]


def _write_digests(path: str, rank: int) -> None:
    """Each rank hashes the files it wrote; the first writes all digests, its own of .metadata among them."""
    written = [name for name in os.listdir(path) if name.startswith(f"__{rank}_")]
    digests = {name: sha256(os.path.join(path, name)) for name in written}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digests)
    if rank == 0:
        merged = {".metadata": sha256(os.path.join(path, ".metadata"))}
        for part in gathered:
            merged |= part
        write_json(os.path.join(path, DIGESTS), merged)


def damage(path: str, rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with a checkpoint's files (each rank reads a share of them); None when all are as they
    were written.
    """
    try:
        with open(os.path.join(path, DIGESTS), encoding="utf-8") as file:
            digests = dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return f"{DIGESTS} is missing or cannot be read"
    for name in sorted({".metadata", *digests})[rank::world]:
        file = os.path.join(path, name)
        if os.path.basename(name) != name:
            return f"{DIGESTS} names {name!r}, which is not a file of it"
        if not os.path.isfile(file):
            return f"{name} is missing"
        if sha256(file) != digests.get(name):
            return f"{name} is not what was written (cut off, or changed on the disk)"
    return None


def newest(directory: str, ranks) -> str | None:
    """The newest whole checkpoint, None where there are none. All ranks call it.

    A damaged one is renamed to step-N.damaged-1 with a line that says so. Raises UserError when all are
    damaged.
    """
    saved = steps_saved(directory)
    dist.barrier()
    for path in reversed(saved):
        faults = [None] * ranks.world
        dist.all_gather_object(faults, damage(path, ranks.rank, ranks.world))
        fault = next(filter(None, faults), None)
        if fault is None:
            return path
        if ranks.first:
            name = os.path.basename(move_aside(path, "damaged"))
            ranks.say(f"damaged {path}: {fault}; moved to {name}, the one before it is used")
    if saved:
        raise UserError(f"{directory}: expected a whole checkpoint, found {len(saved)} damaged; "
                        "--force starts anew")
    return None


class _Unpickler(pickle.Unpickler):
    """Knows the classes of METADATA and torch's dtypes. Anything else is refused before it is imported."""

    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """torch's reader of checkpoint files, with .metadata unpickled by _Unpickler; shards it reads with
    weights_only.
    """

    def read_metadata(self, *args, **kwargs):
        """The checkpoint's metadata. Raises UserError for a file that holds more than descriptions of
        tensors.
        """
        path = os.path.join(self.path, ".metadata")
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            for entry in metadata.storage_data.values():
                name = entry.relative_path
                if os.path.basename(name) != name or entry.transform_descriptors:
                    raise ValueError(f"it names {name!r}, which is not a plain file of this checkpoint")
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # a damaged pickle raises whatever it likes
            raise UserError(f"{path}: expected the description of a training checkpoint, found that "
                            f"{error}") from error
        return metadata


def _read(tensors: dict, reader: Reader, **options) -> None:
    """Fill tensors from a checkpoint. Raises UserError for files that hold something else."""
    try:
        dcp.load(tensors, storage_reader=reader, **options)
    except CheckpointException as error:
        raise UserError(f"{reader.path}: its tensors cannot be read ({_reason(error)})") from error


def load(job, path: str, stored_name=lambda name: name) -> None:
    """Fill weights, replicated parameters, optimizer and step of a Job from a checkpoint written at any
    world size.

    stored_name: a parameter's name in the trainee -> its name in the checkpoint. What the trainee does not
    have is not read. Raises UserError for a checkpoint without a tensor that it does have.
    """
    trainee, optimizer = job.trainee, job.optimizer
    weights, optimizer_state = get_state_dict(trainee, optimizer, options=FLAT)
    states = {name: tensor for name, tensor in optimizer_state.items() if name.startswith("state.")}
    stored = {f"weights.{stored_name(name)}": tensor for name, tensor in weights.items()}
    stored |= {f"optimizer.{stored_name(name)}": tensor for name, tensor in states.items()}
    reader = Reader(path)
    missing = stored.keys() - reader.read_metadata().state_dict_metadata.keys()
    if missing:
        raise UserError(f"{path}: expected a tensor {min(missing)}, found none")
    _read(stored, reader)
    weights = {name: stored[f"weights.{stored_name(name)}"] for name in weights}
    states = {name: stored[f"optimizer.{stored_name(name)}"] for name in states}
    set_state_dict(trainee, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state | states,
                   options=FLAT)
    job.step = step_of(path)


def whole_weights(path: str, part: str = "net") -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, unsharded, on the CPU: those of the language model under its own names,
    or, with part="replicated", the parameters beside it. Raises UserError for a damaged checkpoint.
    """
    fault = damage(path)
    if fault:
        raise UserError(f"{path}: expected a whole training checkpoint, found that {fault}")
    reader, prefix = Reader(path), f"weights.{part}."
    tensors = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(prefix):
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
        _read(tensors, reader, no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
