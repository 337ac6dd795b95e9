"""Groups, operators and tokens for the tests of related/dha."""

import torch

from related.dha import fusion

EIGHT = list(range(8))
PAIRS, HALVES = [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
GROUPS = {  # of tiny_model: 3 layers of 8 heads
    "key": [[[0, 2, 5, 7], [1, 3, 4, 6]], [EIGHT], PAIRS],
    "value": [[EIGHT], [[0, 7], [1, 6], [2, 5], [3, 4]], HALVES],
}
WHOLE = fusion.whole_layers({"key": [8] * 3, "value": [8] * 3})


def random_operators(groups=GROUPS) -> dict:
    generator = torch.Generator().manual_seed(0)
    operators = {}
    for name, operator in fusion.starting_operators(groups, 8).items():
        operators[name] = torch.randn(operator.shape, generator=generator) / operator.shape[1]
    return operators


def tokens(rows=2, length=40):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(3))
