"""What the trainings of the teacher and of the student share."""

import argparse
import json
import os
from dataclasses import dataclass

import torch.distributed as dist

from common import cli
from common.artifacts import RECORD, Claim
from common.cli import UserError
from common.files import move_aside, read_json, write_json
from common.models import fingerprint
from common.records import SOURCE
from common.training.checkpoints import FORCED
from common.training.heldout import Heldout
from common.training.metrics import METRICS, read_metrics
from common.training.pool import Pool
from common.training.sharding import Execution, Ranks
from common.training.students import Pair

STAGE = "05_prune_train.py"


@dataclass(frozen=True)
class Run:
    """A call of stage 5: its flags, with defaults, and what was read."""

    args: argparse.Namespace
    ranks: Ranks
    pair: Pair
    pool: Pool
    heldout: Heldout
    execution: Execution
    started: Claim

    @property
    def teacher(self) -> str:
        """The teacher's checkpoint directory."""
        if self.args.teacher == SOURCE:
            return self.pair.model["path"]
        return self.args.teacher or os.path.join(self.args.run, "teacher")

    @property
    def computation(self) -> dict:
        """What must match on resume because it changes the figures."""
        return {"dtype": str(self.execution.compute), "attention": self.execution.attention}

    @property
    def directory(self) -> str:
        return os.path.join(self.args.run, cli.named("train", self.args.name))


def this_training(run: Run, flags: list[str]) -> dict:
    """By what --force knows its own training again: these flags, the samples, aligned/ and merged/."""
    flags = {name: getattr(run.args, name) for name in flags}
    starts = {"starts": [fingerprint(path) for path in (run.pair.aligned, run.pair.merged)]}
    return json.loads(json.dumps(flags | run.pool.description() | starts))


def was_forced(run: Run, flags: list[str]) -> bool:
    """Whether this training was begun in train/ with --force and is not complete. flags: names of those
    that change it.
    """
    if os.path.exists(os.path.join(run.directory, RECORD)):
        return False
    try:
        read_metrics(os.path.join(run.directory, METRICS))
    except UserError:  # damaged: --force starts over
        return False
    return read_json(os.path.join(run.directory, FORCED)) == this_training(run, flags)


def start_anew(run: Run, flags: list[str]) -> None:
    """--force: move earlier training aside. It may be days of work, so nothing is deleted."""
    dist.barrier()  # all ranks have asked was_forced
    if run.ranks.first:
        teacher = [] if run.args.teacher else [run.teacher, run.teacher + ".train"]
        for path in (run.directory, *teacher):
            if os.path.lexists(path):
                print(f"moved   {path} to {move_aside(path)}", flush=True)
        write_json(os.path.join(run.directory, FORCED), this_training(run, flags))
    dist.barrier()
