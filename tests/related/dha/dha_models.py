"""Small models of related/dha, operators and records, for its tests."""

import torch

from models import tiny_model
from related.dha import fusion, records
from runs import SHA, valid_record

EIGHT = list(range(8))
PAIRS, HALVES = [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
GROUPS = {  # of tiny_model: 3 layers of 8 heads
    "key": [[[0, 2, 5, 7], [1, 3, 4, 6]], [EIGHT], PAIRS],
    "value": [[EIGHT], [[0, 7], [1, 6], [2, 5], [3, 4]], HALVES],
}
SMALL = "--sequences 24 --heldout-sequences 4 --length 32 --batch 4 --steps 4 --heldout-every 2".split()
WHOLE = fusion.whole_layers({"key": [8] * 3, "value": [8] * 3})
DATA = {"text": "a.txt", "heldout": "b.txt", "sequences": 8, "heldout_sequences": 2, "length": 16,
        "batch": 2, "tokens_per_microbatch": 64, "seed": 0, "lr": 1e-3, "tokens_sha256": SHA}
SUMMARIES = {
    records.FUSE: {"steps": 4, "data": DATA, "steps_so_far": 7, "loss_ended": 4.0},
    records.START: {"steps_so_far": 3},
    records.PRETRAIN: {"steps": 4, "data": DATA, "batch": 2, "tokens": 288, "heldout": [[0, 5.0], [288, 4.0]],
                       "cache_bytes_per_token": 64.0},
}


def example_record(stage: str) -> dict:
    """A record of a command, valid but for files that it does not have."""
    return valid_record("06_export.py") | {"stage": stage, "summary": SUMMARIES[stage]}


def random_operators(groups=GROUPS, seed=0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    operators = {}
    for name, operator in fusion.starting_operators(groups, 8).items():
        operators[name] = torch.randn(operator.shape, generator=generator) / operator.shape[1]
    return operators


def tokens(rows=2, length=40):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(3))


def fused_pair(source, groups) -> tuple:
    """A model in fusion, its operators averaged, and the model of fused heads made from it."""
    operators = random_operators(groups)
    fused = fusion.fused_model(source.config, source.state_dict(), groups, operators)
    return fusion.with_operators(source, fusion.averaged(operators), groups), fused


def fused_tiny(groups=GROUPS, bias=True, **options):
    """fused_pair of a tiny model."""
    return fused_pair(tiny_model(bias=bias, **options), groups)
