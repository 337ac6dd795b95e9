"""What the trainings of the teacher and of the student share."""

import argparse
import os
from dataclasses import dataclass

from common.cli import Clock
from common.records import SOURCE
from common.training.heldout import Heldout
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
    clock: Clock

    @property
    def teacher(self) -> str:
        """The teacher's checkpoint directory."""
        if self.args.teacher == SOURCE:
            return self.pair.model["path"]
        return self.args.teacher or os.path.join(self.args.run, "teacher")

    @property
    def directory(self) -> str:
        return os.path.join(self.args.run, "train")
