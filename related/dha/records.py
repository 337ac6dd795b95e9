"""What the records of DHA's artifacts must hold, and how to read them."""

import os

from common.run.artifact import RECORD, read_record
from common.run.errors import UserError
from common.run.files import read_json

SEARCH, FUSE, START, PRETRAIN, REPORT = (
    f"related/dha/{name}.py" for name in ("search", "fuse", "start", "pretrain", "report")
)
# flags of search that hold for everything that is compared
DATA_FLAGS = ("text", "heldout", "sequences", "heldout_sequences", "length", "batch", "tokens_per_microbatch",
              "seed", "lr")


def read(path: str, stage: str, model: dict | None = None) -> dict:
    """The record of a DHA artifact. Raises UserError with file, expected and found."""
    record = read_record(path, stage, model)
    fault = stage == SEARCH and (find_group_fault("key", record) or find_group_fault("value", record))
    if fault:
        raise UserError(f"{path}/{RECORD}: {fault}; run {stage} again with --force")
    return record


def find_group_fault(kind: str, record: dict) -> str | None:
    """Why a search's groups do not partition each layer's heads into the recorded number of equal groups."""
    choice, layers, expected = record["summary"][kind], record["groups"][kind], record["model"]["layers"]
    sources, counts = choice["source_heads"], choice["heads"]
    if not len(layers) == len(counts) == len(sources) == expected:
        return f"record.groups.{kind}: expected {expected} layers, found {len(layers)}"
    for index, (groups, count, source) in enumerate(zip(layers, counts, sources, strict=True)):
        sizes, heads = [len(group) for group in groups], sorted(sum(groups, []))
        if sizes != [source // count] * count or heads != list(range(source)):
            return (f"record.groups.{kind}[{index}]: expected {count} groups of {source // count} heads, "
                    f"each of 0 to {source - 1} once, found {groups}")
    return None


def read_start(checkpoint: str) -> dict | None:
    """The record of a checkpoint to start from, None if it has none. Raises UserError for a damaged one."""
    path = os.path.join(checkpoint, RECORD)
    if not os.path.exists(path):
        return None
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("stage"), str):
        raise UserError(f"{path}: expected the record of a stage, found none that can be read")
    return read(checkpoint, record["stage"])


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
