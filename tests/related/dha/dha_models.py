"""Small models of related/dha, operators, samples and records, for its tests."""

import json
from pathlib import Path

import torch

from conftest import tiny_model
from related.dha import export, fusion, records

EIGHT = list(range(8))
GROUPS = {  # of tiny_model: 3 layers of 8 heads
    "key": [
        [[0, 2, 5, 7], [1, 3, 4, 6]],
        [EIGHT],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ],
    "value": [
        [EIGHT],
        [[0, 7], [1, 6], [2, 5], [3, 4]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ],
}
SECOND = {  # of a model whose heads are GROUPS: 2, 1 and 4 key heads, 1, 4 and 2 value heads
    "key": [[[0, 1]], [[0]], [[0, 2], [1, 3]]],
    "value": [[[0]], [[0, 3], [1, 2]], [[0, 1]]],
}
SMALL = "--sequences 24 --heldout-sequences 4 --length 32 --batch 4 --steps 4 --heldout-every 2".split()
WHOLE = fusion.whole_layers({"key": [8] * 3, "value": [8] * 3})


def random_operators(groups=GROUPS, seed=0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    operators = {}
    for name, operator in fusion.starting_operators(groups, 8).items():
        operators[name] = torch.randn(operator.shape, generator=generator) / operator.shape[1]
    return operators


def averages(operators: dict) -> dict:
    return {name: fusion.averaged(operator) for name, operator in operators.items()}


def tokens(rows=2, length=40):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(3))


def fused_tiny(groups=GROUPS, bias=True, **options):
    """A tiny model in fusion, its operators averaged, and the model of fused heads made from it."""
    operators, source = random_operators(groups), tiny_model(bias=bias, **options)
    state = fusion.combine_heads(source.state_dict(), operators, groups, fusion.fold)
    fused = export.fused_model(source.config, state, groups)
    return fusion.with_operators(source, averages(operators), groups), fused


def example_records() -> dict[str, dict]:
    """A record of each command, valid but for files that it does not have."""
    digest = "0" * 64
    model = {"name": "m", "path": "m", "fingerprint": digest, "layers": 2, "heads": 4, "kv_heads": 4}
    model |= {"head_dim": 8, "hidden": 32}
    data = {
        "text": "a.txt",
        "heldout": "b.txt",
        "sequences": 8,
        "heldout_sequences": 2,
        "length": 16,
        "batch": 2,
    }
    data |= {"tokens_per_microbatch": 64, "seed": 0, "lr": 1e-3, "tokens_sha256": digest}
    choice = {
        "layer_loss": [0.1, 0.2],
        "loss_within_groups": [0.0, 0.0],
        "loss_within_random_groups": [0.1, 0.1],
    }
    choice |= {"source_heads": [4, 4], "heads": [1, 2]}
    groups = {"key": [[[0, 1, 2, 3]], [[0, 3], [1, 2]]], "value": [[[0, 1, 2, 3]], [[0, 1], [2, 3]]]}
    record = {"arguments": {}, "model": model, "inputs": {}, "packages": {}, "commit": None, "seconds": 1.0}
    record |= {"date": "2026-01-01"}
    summaries = {
        records.SEARCH: {"steps": 3, "steps_so_far": 3, "kv_heads": 1, "data": data}
        | {"key": choice, "value": choice},
        records.FUSE: {
            "steps": 4,
            "steps_so_far": 7,
            "fusion_loss": 1e-4,
            "loss_ended": 4.0,
            "loss_fused": 4.1,
        },
        records.PRETRAIN: {"steps": 9, "batch": 2, "tokens": 288, "heldout": [[0, 5.0], [288, 4.0]]},
    }
    summaries[records.POOL] = {"steps_so_far": 3}
    summaries[records.FUSE]["data"] = data
    summaries[records.PRETRAIN] |= {"cache_bytes_per_token": 64.0, "data": data}
    made = {}
    for stage, summary in summaries.items():
        made[stage] = json.loads(json.dumps(record | {"stage": stage, "summary": summary}))
    made[records.SEARCH]["groups"] = groups
    for stage in (records.FUSE, records.POOL, records.PRETRAIN):
        made[stage]["files"] = {}
    return made


def save_record(home: Path, stage: str, record) -> str:
    """Write a record where `records.read` looks for it, and return that path."""
    path = home / "search.json" if stage == records.SEARCH else home / "artifact"
    if stage != records.SEARCH:
        path.mkdir(exist_ok=True)
    (path if stage == records.SEARCH else path / "stage.json").write_text(json.dumps(record))
    return str(path)
