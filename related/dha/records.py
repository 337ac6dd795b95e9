"""DHA's checkpoints and their records: what others read in them, and the steps behind a checkpoint."""

import os

from common.models import sidecars
from common.run.artifact import RECORD, load_record, read_record, write_directory, write_record
from common.run.errors import UserError

SEARCH, FUSE, START, PRETRAIN, REPORT = (
    f"related/dha/{name}.py" for name in ("search", "fuse", "start", "pretrain", "report")
)
# flags of search that hold for everything that is compared
DATA_FLAGS = ("text", "heldout", "sequences", "heldout_sequences", "length", "batch", "tokens_per_microbatch",
              "seed", "lr")


def write_checkpoint(output: str, model, source: str, record: dict) -> None:
    """Write a model that was made from the checkpoint `source`, with its record."""
    with write_directory(output) as aside:
        sidecars.save(model, aside, source)
        write_record(aside, record)


def read_start(checkpoint: str) -> dict | None:
    """The record of a checkpoint to start from, None if it has none. Raises UserError for a damaged one."""
    if not os.path.exists(os.path.join(checkpoint, RECORD)):
        return None
    return read_record(checkpoint, (load_record(checkpoint) or {}).get("stage", "a stage"))


def steps_before(record: dict | None, data: dict) -> int:
    """Steps of search and fusion behind a checkpoint, 0 if its record has none.

    Raises UserError if they took other data, or batches of another size, than `data`.
    """
    summary = record["summary"] if record else {}
    if "steps_so_far" not in summary:
        return 0
    for name, expected in summary.get("data", data).items():
        if data[name] != expected:
            raise UserError(f"{name}: expected {expected}, as in the search before, found {data[name]}")
    return summary["steps_so_far"]
