"""related.keychannels.premises against constructions whose shares are known."""

import json
from argparse import Namespace

import pytest
import torch

from conftest import expect_error, run, save_tiny
from related.keychannels import premises

ARGS = Namespace(prompt=24, continuation=8, observed=4)
COMMAND = "related/keychannels/premises.py"


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_equal_channels_share_alike_and_a_large_one_has_all():
    equal = premises.largest_shares(torch.ones(3, 40))
    assert [share.tolist() for share in equal] == [pytest.approx([part] * 3) for part in premises.SHARES]
    one = torch.zeros(20)
    one[7] = 5.0
    assert [float(share) for share in premises.largest_shares(one)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_is_that_of_scaled_dot_products(groups):
    """Against the softmax of each query alone, with the keys up to its own position."""
    queries, keys = normal(4, 5, 8, seed=0), normal(groups, 12, 8, seed=1)
    actual = premises.attention_to(queries, keys, 7, 0.3)
    for group in range(groups):
        rows = torch.zeros(4 // groups, 5, 12)
        for place, head in enumerate(range(group * 4 // groups, (group + 1) * 4 // groups)):
            for number in range(5):
                scores = 0.3 * keys[group, : 8 + number] @ queries[head, number]
                rows[place, number, : 8 + number] = scores.softmax(0)
        torch.testing.assert_close(actual[group], rows.mean((0, 1)))


def test_a_window_like_later_queries_chooses_what_they_do():
    """Equal queries: the window chooses best. Others: nothing is better than later queries' own choice."""
    keys, query = normal(2, 32, 8, seed=2), normal(2, 1, 8, seed=3)
    alike = premises.head_premises(ARGS, query.expand(-1, 32, -1), keys, 1.0)
    for name in ("positions", "channels"):
        torch.testing.assert_close(alike[name]["the window"], alike[name]["later queries"])
    other = premises.head_premises(ARGS, normal(2, 32, 8, seed=4), keys, 1.0)
    positions, channels = other["positions"], other["channels"]
    assert (positions["the window"] < positions["later queries"]).all()
    assert (positions["recency"] <= positions["later queries"]).all()
    assert (channels["the window"] > channels["later queries"]).all()


def test_keys_that_only_later_queries_look_at_are_missed_by_the_window():
    """Position 3 answers later queries alone, 5 and 6 the window: a tenth of 20 is two positions."""
    keys, queries = torch.zeros(1, 32, 8), torch.zeros(1, 32, 8)
    keys[0, 3, 0] = keys[0, 5, 1] = keys[0, 6, 1] = 50.0
    queries[0, 20:24, 1] = queries[0, 24:, 0] = 1.0
    figures = premises.head_premises(ARGS, queries, keys, 1.0)
    assert float(figures["positions"]["the window"]) < 1e-6
    assert float(figures["positions"]["recency"]) < 1e-6
    assert float(figures["positions"]["later queries"]) > 1 - 1e-6
    assert float(figures["keys"]["10%"]) == pytest.approx(2 / 3)  # channel 1 has two of three large keys
    # by the window channel 0 goes, which is all that later queries read
    assert float(figures["channels"]["the window"]) == pytest.approx(1)
    assert float(figures["channels"]["later queries"]) == pytest.approx(0)


@pytest.mark.slow
def test_the_command_measures_every_head_of_every_layer_and_text(inputs, tmp_path):
    model = save_tiny(tmp_path / "model", num_key_value_heads=4)
    flags = ["--run", tmp_path, "--model", model, "--text", inputs["text"], "--sequences", 3]
    run(COMMAND, *flags, "--prompt", 48, "--continuation", 16)
    results = json.loads((tmp_path / "premises.json").read_text())["results"][model]
    numbers = [numbers for figures in results.values() for numbers in figures.values()]
    assert len(numbers) == 11 and all(len(values) == 3 * 4 * 3 for values in numbers)
    assert all(0 <= value <= 1 + 1e-9 for values in numbers for value in values)
    expect_error("256 positions", COMMAND, *flags, "--prompt", 300, "--force")
    expect_error("--observed: expected less", COMMAND, *flags, "--prompt", 32, "--force")
