"""What the records of DHA's artifacts must hold, and how to read them.

As a command it prints one field of RUN/search.json, for related/dha/run.sh:

    python -m related.dha.records --run runs/dha --print length

The fields are the source model's name and path, the training text, its tokens per sequence, and the mean
number of key heads that a layer keeps.
"""

import argparse
import json
import os

from common.artifacts import RECORD, read_record, sidecar_path
from common.cli import UserError, run_stage, stage_parser
from common.records import COUNT, DIGEST, FILES, NUMBER, POSITIVE, SIZE, STRING, Number, mismatch

SEARCH, FUSE, POOL, CLOSED_FORM = (f"related/dha/{name}.py"
                                   for name in ("search", "fuse", "pool", "closed_form"))
PRETRAIN, COMPARE = "related/dha/pretrain.py", "related/dha/compare.py"
STARTS_TABLE = "related/dha/starts.py"
STARTS = (FUSE, POOL, CLOSED_FORM)  # which write checkpoints that may have steps behind them
RESERVED = ("search", "searched", "fusion", "fused", "calibration")  # other directories in RUN
DATA_FLAGS = {  # flags of search that hold for everything that is compared
    "text": STRING,
    "heldout": STRING,
    "sequences": COUNT,
    "heldout_sequences": COUNT,
    "length": Number(at_least=2, whole=True),
    "batch": COUNT,
    "tokens_per_microbatch": COUNT,
    "seed": SIZE,
    "lr": POSITIVE,
}
DATA = DATA_FLAGS | {"tokens_sha256": DIGEST}
CHOICE = {  # of keys or values, a number per layer
    "source_heads": [COUNT],
    "layer_loss": [NUMBER],
    "heads": [COUNT],
    "loss_within_groups": [NUMBER],
    "loss_within_random_groups": [NUMBER],
}
FIELDS = {  # stage -> what its record holds beside the fields of every record
    SEARCH: {
        "groups": {"key": [[[SIZE]]], "value": [[[SIZE]]]},
        "summary": {"steps": COUNT, "steps_so_far": COUNT, "kv_heads": COUNT, "data": DATA}
        | {"key": CHOICE, "value": CHOICE},
    },
    FUSE: {
        "files": FILES,
        "summary": {
            "steps": COUNT,
            "steps_so_far": COUNT,
            "fusion_loss": POSITIVE,
            "loss_ended": NUMBER,
            "loss_fused": NUMBER,
            "data": DATA,
        },
    },
    POOL: {"files": FILES, "summary": {"steps_so_far": COUNT}},
    CLOSED_FORM: {"files": FILES, "summary": {"steps_so_far": SIZE}},
    PRETRAIN: {
        "files": FILES,
        "summary": {
            "steps": COUNT,
            "batch": COUNT,
            "tokens": COUNT,
            "heldout": [[NUMBER]],
            "cache_bytes_per_token": POSITIVE,
            "data": DATA,
        },
    },
}


def row_name(text: str) -> str:
    """argparse type of a row's name, which is also the name of its directory in RUN."""
    if os.path.basename(text) != text or text in ("", ".", "..", *RESERVED):
        raise argparse.ArgumentTypeError(
            f"expected a directory name other than {', '.join(RESERVED)}, found {text!r}"
        )
    return text


def read(path: str, stage: str, model: dict | None = None) -> dict:
    """The record of a DHA artifact, valid in every field. Raises UserError with file, expected and found."""
    record = read_record(path, stage, model)
    fault = mismatch(record, FIELDS[stage], "record")
    if fault is None and stage == SEARCH:
        faults = [find_group_fault(kind, record) for kind in ("key", "value")]
        fault = next(filter(None, faults), None)
    if fault is None and stage == PRETRAIN:
        fault = find_curve_fault(record["summary"]["heldout"])
    if fault:
        raise UserError(f"{sidecar_path(path)}: {fault}; run {stage} again with --force")
    return record


def find_group_fault(kind: str, record: dict) -> str | None:
    """Why a search's groups do not partition each layer's heads into the recorded number of equal groups."""
    choice, layers, expected = record["summary"][kind], record["groups"][kind], record["model"]["layers"]
    sources, counts = choice["source_heads"], choice["heads"]
    if not len(layers) == len(counts) == len(sources) == expected:
        return f"record.groups.{kind}: expected {expected} layers, found {len(layers)}"
    for index, (groups, count, source) in enumerate(zip(layers, counts, sources, strict=True)):
        place = f"record.groups.{kind}[{index}]"
        sizes = [len(group) for group in groups]
        if sizes != [source // count] * count:
            return f"{place}: expected {count} groups of {source // count} heads, found sizes {sizes}"
        heads = sorted(head for group in groups for head in group)
        if heads != list(range(source)):
            return f"{place}: expected each of heads 0 to {source - 1} once, found {heads}"
    return None


def read_start(checkpoint: str) -> dict | None:
    """The record of a checkpoint to start from, None if it has none. Raises UserError for a damaged one."""
    path = os.path.join(checkpoint, RECORD)
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            stage = str(json.load(file)["stage"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: expected the record of a stage, found none that can be read") from error
    return read(checkpoint, stage) if stage in STARTS else read_record(checkpoint, stage)


def steps_before(record: dict | None, data: dict) -> int:
    """Steps of search and fusion behind a checkpoint, 0 for any but those of STARTS.

    Raises UserError if they took other data, or batches of another size, than `data`.
    """
    if not record or record["stage"] not in STARTS:
        return 0
    for name, expected in record["summary"].get("data", data).items():
        if data[name] != expected:
            raise UserError(f"{name}: expected {expected}, as in the search before, found {data[name]}")
    return record["summary"]["steps_so_far"]


def find_curve_fault(points: list) -> str | None:
    """Why held-out losses are no list of [tokens, loss] pairs with rising tokens."""
    if not points or any(len(point) != 2 for point in points):
        return "record.summary.heldout: expected [tokens, loss] pairs, found others or none"
    tokens = [point[0] for point in points]
    if tokens != sorted(tokens):
        return "record.summary.heldout: expected rising tokens, found others"
    return None


def main():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    names = ("model", "path", "text", "length", "kv-heads")
    parser.add_argument("--print", choices=names, default="length", help="field of RUN/search.json to print")
    args = parser.parse_args()
    record = read(os.path.join(args.run, "search.json"), SEARCH)
    data = record["summary"]["data"]
    fields = {
        "model": record["model"]["name"],
        "path": record["model"]["path"],
        "text": data["text"],
        "length": data["length"],
        "kv-heads": record["summary"]["kv_heads"],
    }
    print(fields[args.print])


if __name__ == "__main__":
    run_stage(main)
