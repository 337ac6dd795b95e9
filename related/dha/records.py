"""What the records of DHA's artifacts must hold, and how to read them."""

import os

from common.artifacts import RECORD, read_record, record_path
from common.errors import UserError
from common.files import read_json
from common.records import COUNT, DIGEST, FILES, NUMBER, POSITIVE, SIZE, STAGES, STRING, Number

SEARCH, FUSE, START, PRETRAIN, REPORT = (
    f"related/dha/{name}.py" for name in ("search", "fuse", "start", "pretrain", "report")
)
DATA_FLAGS = {  # flags of search that hold for everything that is compared
    "text": STRING, "heldout": STRING, "sequences": COUNT, "heldout_sequences": COUNT,
    "length": Number(at_least=2, whole=True), "batch": COUNT, "tokens_per_microbatch": COUNT, "seed": SIZE,
    "lr": POSITIVE,
}
DATA = DATA_FLAGS | {"tokens_sha256": DIGEST}
CHOICE = {"source_heads": [COUNT], "heads": [COUNT]}  # of keys or values, a number per layer
PHASE = {"steps": COUNT, "data": DATA}
STAGES.update({  # what records hold besides the fields of every record
    SEARCH: {"files": FILES, "groups": {"key": [[[SIZE]]], "value": [[[SIZE]]]},
             "summary": PHASE | {"steps_so_far": COUNT, "kv_heads": COUNT, "key": CHOICE, "value": CHOICE}},
    FUSE: {"files": FILES, "summary": PHASE | {"steps_so_far": COUNT, "fusion_loss": POSITIVE,
                                               "loss_ended": NUMBER, "loss_fused": NUMBER}},
    START: {"files": FILES, "summary": {"steps_so_far": SIZE}},
    PRETRAIN: {"files": FILES, "summary": PHASE | {"batch": COUNT, "tokens": COUNT, "heldout": [[NUMBER]],
                                                   "cache_bytes_per_token": POSITIVE}},
})


def read(path: str, stage: str, model: dict | None = None) -> dict:
    """The record of a DHA artifact, valid in every field. Raises UserError with file, expected and found."""
    record = read_record(path, stage, model)
    fault = None
    if stage == SEARCH:
        fault = find_group_fault("key", record) or find_group_fault("value", record)
    elif stage == PRETRAIN:
        fault = find_curve_fault(record["summary"]["heldout"])
    if fault:
        raise UserError(f"{record_path(path)}: {fault}; run {stage} again with --force")
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


def find_curve_fault(points: list) -> str | None:
    """Why held-out losses are no list of [tokens, loss] pairs with rising tokens."""
    tokens = [point[0] for point in points if len(point) == 2]
    if points and len(tokens) == len(points) and tokens == sorted(tokens):
        return None
    return "record.summary.heldout: expected [tokens, loss] pairs with rising tokens, found others or none"


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
