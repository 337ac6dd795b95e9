"""Training checkpoints: sharded, written aside and renamed, the last two kept; and reading one whole again."""

import glob
import os
import shutil
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from common.cli import UserError

KEPT = 2


def _state(trainee, optimizer) -> dict:
    weights, optimizer_state = get_state_dict(trainee, optimizer)
    return {"weights": weights, "optimizer": optimizer_state}


def steps_saved(directory: str) -> list[str]:
    """Whole checkpoints in a directory, oldest first: step-00000040, ..."""
    return sorted(path for path in glob.glob(os.path.join(directory, "step-*")) if path[-1].isdigit())


def step_of(path: str) -> int:
    return int(path.rsplit("-", 1)[1])


def save(directory: str, step: int, trainee, optimizer) -> None:
    """Save weights, masks and optimizer after `step` steps. All ranks call it."""
    path = os.path.join(directory, f"step-{step:08d}")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(path + ".tmp", ignore_errors=True)
    dist.barrier()
    dcp.save(_state(trainee, optimizer), checkpoint_id=path + ".tmp")
    dist.barrier()
    if first:
        if not os.path.exists(path):
            os.rename(path + ".tmp", path)
        for old in steps_saved(directory)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def resume(directory: str, trainee, optimizer) -> int:
    """Load the newest checkpoint, at any world size, and return its step; 0 where there is none."""
    saved = steps_saved(directory)
    if not saved:
        return 0
    state = _state(trainee, optimizer)
    dcp.load(state, checkpoint_id=saved[-1])
    set_state_dict(trainee, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"])
    return step_of(saved[-1])


def whole_weights(path: str) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, unsharded, on the CPU: the language model's under its own names, and log_alpha."""
    if not os.path.exists(os.path.join(path, ".metadata")):
        raise UserError(f"{path}: expected a training checkpoint, found none")
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype)
               for key, entry in metadata.items() if key.startswith("weights.")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what we want here
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return {key.removeprefix("weights.").removeprefix("net."): tensor for key, tensor in tensors.items()}
