"""Training checkpoints: sharded, written aside and renamed, the last two kept, each file under its sha256.

A checkpoint step-N/ holds one tensor per name: weights.X for a parameter X of the trainee, optimizer.state.X.Y for what
AdamW remembers of it. Learning rates and the like are not in it: they follow from the step.
"""

import glob
import json
import os
import shutil
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from common.artifacts import sha256, write_json
from common.cli import UserError

KEPT = 2
DIGESTS = "sha256.json"  # file name -> digest, of every other file of a checkpoint
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def steps_saved(directory: str) -> list[str]:
    """Checkpoints in a directory, oldest first: step-00000040, ..."""
    return sorted(path for path in glob.glob(os.path.join(directory, "step-*")) if path[-1].isdigit())


def step_of(path: str) -> int:
    """Steps done when it was written."""
    return int(path.rsplit("-", 1)[1])


def save(directory: str, step: int, trainee, optimizer) -> None:
    """Save weights, masks and optimizer after `step` steps. All ranks call it.

    Raises UserError when it cannot be written (disk full); the checkpoints before it are whole.
    """
    path, rank = os.path.join(directory, f"step-{step:08d}"), dist.get_rank()
    aside = path + ".tmp"
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()
    weights, optimizer_state = get_state_dict(trainee, optimizer, options=FLAT)
    tensors = {f"weights.{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_state.items() if name.startswith("state.")}
    try:
        dcp.save(tensors, checkpoint_id=aside)
        digests = {os.path.basename(file): sha256(file) for file in glob.glob(os.path.join(aside, f"__{rank}_*"))}
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, digests)
        if rank == 0:
            digests = {".metadata": sha256(os.path.join(aside, ".metadata"))}
            for own in gathered:
                digests |= own
            write_json(os.path.join(aside, DIGESTS), digests)
    except (CheckpointException, OSError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        failures = getattr(error, "failures", {}).values()
        reason = str(next(iter(failures))[0] if failures else error).split("\n")[0]
        free = shutil.disk_usage(directory).free / 2**30
        raise UserError(f"{path}: cannot be written ({reason}; {free:.1f} GiB free there); the checkpoints before it are "
                        f"whole, and the same command goes on from the last") from error
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)  # of a run that fell back to an earlier step: the same bytes
        os.rename(aside, path)
        for old in steps_saved(directory)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def damage(path: str, rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with a checkpoint's files (each rank reads a share of them); None when all are as they were written."""
    try:
        with open(os.path.join(path, DIGESTS), encoding="utf-8") as file:
            digests = json.load(file)
    except (OSError, ValueError):
        return f"{DIGESTS} is missing or cannot be read"
    for name in sorted(digests)[rank::world]:
        file = os.path.join(path, name)
        if not os.path.exists(file):
            return f"{name} is missing"
        if sha256(file) != digests[name]:
            return f"{name} is not what was written (cut off, or changed on the disk)"
    return None


def newest(directory: str, ranks) -> str | None:
    """The newest whole checkpoint, None where there are none. All ranks call it.

    A damaged one is renamed to step-N.damaged with a line that says so. Raises UserError when all are damaged.
    """
    saved = steps_saved(directory)
    dist.barrier()
    for path in reversed(saved):
        found = [None] * ranks.world
        dist.all_gather_object(found, damage(path, ranks.rank, ranks.world))
        wrong = next(filter(None, found), None)
        if wrong is None:
            return path
        ranks.say(f"damaged {path}: {wrong}; set aside as {os.path.basename(path)}.damaged, the one before it is used")
        if ranks.first:
            shutil.rmtree(path + ".damaged", ignore_errors=True)
            os.rename(path, path + ".damaged")
    if saved:
        raise UserError(f"{directory}: expected a whole checkpoint, found {len(saved)} damaged; --force begins anew")
    return None


def load(path: str, trainee, optimizer, stored_name=lambda name: name) -> int:
    """Fill weights, masks and optimizer from a checkpoint written at any world size; returns its step.

    stored_name: a parameter's name here -> its name in the checkpoint. What the trainee does not ask for is not read.
    """
    weights, optimizer_state = get_state_dict(trainee, optimizer, options=FLAT)
    states = {name: tensor for name, tensor in optimizer_state.items() if name.startswith("state.")}
    stored = {f"weights.{stored_name(name)}": tensor for name, tensor in weights.items()}
    stored |= {f"optimizer.{stored_name(name)}": tensor for name, tensor in states.items()}
    dcp.load(stored, checkpoint_id=path)
    set_state_dict(trainee, optimizer, options=FLAT,
                   model_state_dict={name: stored[f"weights.{stored_name(name)}"] for name in weights},
                   optim_state_dict=optimizer_state | {name: stored[f"optimizer.{stored_name(name)}"] for name in states})
    return step_of(path)


def whole_weights(path: str) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, unsharded, on the CPU, under the language model's own names. Raises UserError if damaged."""
    wrong = damage(path)
    if wrong:
        raise UserError(f"{path}: expected a whole training checkpoint, found that {wrong}")
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype)
               for key, entry in metadata.items() if key.startswith("weights.")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what we want here
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return {key.removeprefix("weights.").removeprefix("net."): tensor for key, tensor in tensors.items()}
