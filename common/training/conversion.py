"""What stage 5 converts, and a call of the stage."""

import os
from dataclasses import dataclass, field

import torch

from common.data.pool import Pool
from common.data.sources import hub_commits
from common.models.families import merged_modules
from common.models.load import empty_model, load_config, source_model
from common.run.artifact import Started, check_input, input_digests, read_record, verify_files
from common.run.kinds import MERGES
from common.training.checkpoints import of_first_rank
from common.training.heldout import Heldout
from common.training.sharding import Ranks

STAGE = "05_prune_train.py"
HUB_COMMITS = "hub_commits"  # a setting: {data set of the hub that is trained on: its commit}


@dataclass(frozen=True)
class Conversion:
    """aligned/ and merged/: the same model and grouping before and after merging."""

    aligned: str
    merged: str
    model: dict  # description of the source model
    kv_heads: int
    merge: str  # a key of MERGES
    blended: tuple[str, ...]  # projections that merging changed
    exported: str | None = None  # a student of stage 6 to start from instead of merged/
    inputs: dict[str, str] = field(default_factory=dict)  # for a student's record: digests of what was read

    @property
    def title(self) -> str:
        return f"{self.model['kv_heads']} -> {self.kv_heads} kv heads"


def read_conversion(run: str, ranks, exported: str | None = None) -> Conversion:
    """What is in a run directory. exported: a student of stage 6 to start from instead of merged/.

    Raises UserError unless all are intact and belong together, and the source model is unchanged since
    stage 1.
    """
    aligned, merged = (os.path.join(run, name) for name in ("aligned", "merged"))
    inputs = input_digests(run, list(filter(None, (aligned, merged, exported))))
    aligned_record, merged_record = (read_record(path, "04_align.py") for path in (aligned, merged))
    check_input(merged_record, aligned)
    if ranks.first:  # hash the weights once, not on every rank
        verify_files(aligned, aligned_record)
        verify_files(merged, merged_record)
    if exported:
        record = read_record(exported, "06_export.py", aligned_record["model"])
        check_input(record, merged if record["arguments"]["untrained"] else aligned)
        if ranks.first:
            verify_files(exported, record)
    summary = aligned_record["summary"]
    whole_head = MERGES[summary["merge"]].whole_head or summary["refit"]  # it changed W_Q and W_O, too
    model = empty_model(aligned, load_config(aligned), torch.float32)
    blended = merged_modules(model.model.layers[0].self_attn, bool(whole_head))
    # the first rank reads its files, if they have other times than stage 1 recorded
    model = of_first_rank(source_model(aligned_record, run) if ranks.first else None)
    kv_heads = summary["kv_heads"]
    return Conversion(aligned, merged, model, kv_heads, summary["merge"], blended, exported, inputs)


@dataclass(frozen=True)
class TrainingRun:
    """A call of stage 5: its directories and what was read."""

    directory: str
    teacher: str  # the teacher's checkpoint
    conversion: Conversion
    pool: Pool
    heldout: Heldout
    ranks: Ranks
    dtype: str  # of the computation
    started: Started

    @property
    def computation(self) -> dict:
        """What must match on resume because it changes the metrics."""
        args = self.started.args
        commits = hub_commits([*args.text, *args.chat, args.heldout_text])
        return {"dtype": f"torch.{self.dtype}"} | ({HUB_COMMITS: commits} if commits else {})
