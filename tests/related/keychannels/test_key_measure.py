"""Key-channel pruning: what is measured, against its definition, and the command."""

import json
import math
from argparse import Namespace

import pytest
import torch
from scipy.stats import sem
from torch.nn.functional import scaled_dot_product_attention

from key_models import MODELS, draw, states, texts
from models import save_tiny, tiny_model
from related.keychannels import channels, measure
from related.keychannels.channels import kept_channels
from runs import run

pytestmark = pytest.mark.slow
COMMAND = "related/keychannels/measure.py"


def settings(**changes) -> Namespace:
    values = {"prompt": 20, "continuation": 10, "recent": 5, "observed": 7, "ratios": (0.5,),
              "select": measure.OTHERS}
    return Namespace(**values | changes)


def test_effects_of_a_layer_are_those_of_its_queries_and_keys():
    """Objective and output error of one layer, recomputed from its projections with zeroed channels."""
    model, tokens = tiny_model(**MODELS["gqa"]), torch.tensor(texts(30, 30))
    effects = []
    measure.watch_attention(model, tokens, lambda *layer: effects.append(
        measure.head_effects(settings(), *layer)))
    for layer, (queries, keys, values, _, scaling) in zip(effects, states(model, tokens), strict=True):
        observed = queries[:, :, 13:20].unflatten(1, (2, 4))  # the four query heads of each key head
        for select in ("think", "greedy+swap"):
            kept = kept_channels(select, observed.flatten(2, 3), keys[:, :, :20], 5, 4)
            zeroed = keys.clone()
            zeroed[:, :, :15] *= torch.zeros(2, 2, 8).scatter(-1, kept, 1.0)[:, :, None]
            scores, change = (observed @ part[:, :, None, :15].mT for part in (keys, keys - zeroed))
            objective = change.square().sum((2, 3, 4)) / scores.square().sum((2, 3, 4))
            before, after = (scaled_dot_product_attention(
                queries, part, values, is_causal=True, scale=scaling, enable_gqa=True)[:, :, 20:]
                for part in (keys, zeroed))
            expected = {"objective": objective, "error": (after - before).square().sum(),
                        "output": before.square().sum()}
            torch.testing.assert_close(layer[0.5, select], expected, rtol=1e-4, atol=0)
            assert (layer[0.5, "exact"]["objective"] <= objective + 1e-9).all()


def test_summary_counts_the_heads_on_which_a_selector_wins():
    costs = {"think": [1.0, 2.0, 3.0, 4.0], "align": [2.0, 2.0, 2.0, 5.0], "greedy": [0.5, 2.0, 2.0, 4.0],
             "greedy+swap": [0.5, 1.0, 2.0, 4.0], "exact": [0.5, 1.0, 1.0, 4.0]}
    effects = []
    for heads, error in ((slice(0, 3), 1.0), (slice(3, 4), 7.0)):  # two layers
        errors = {"error": torch.tensor(error), "output": torch.tensor(4.0)}
        effects.append({(0.5, name): {"objective": torch.tensor(values[heads])} | errors
                        for name, values in costs.items()})
    summary = measure.summarize(settings(select=("align", "greedy", "greedy+swap")), effects)
    names = ("lower_than_think", "same_as_think", "higher_than_think", "best_of_all_sets")
    counts = {select: [row[name] for name in names] for (_, select), row in summary.items()}
    assert counts == {"think": [0, 4, 0, 1], "align": [1, 1, 2, 0], "greedy": [2, 2, 0, 2],
                      "greedy+swap": [3, 1, 0, 3]}
    row = summary[0.5, "align"]
    assert (row["objective"], row["change_to_think"], row["output_error"]) == pytest.approx((2.75, 0.1, 1.0))


def test_losses_are_compared_text_by_text():
    """A standard error with n - 1; a text of equal loss is not lower."""
    plain, think = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.5, 2.0, 5.0])
    loss = torch.tensor([1.25, 2.0, 4.75])
    figures = measure.compare_losses(loss, plain, think)
    assert figures["loss_over_plain"] == pytest.approx(1 / 3)
    assert figures["loss_over_plain_stderr"] == pytest.approx(sem([0.25, 0.0, 0.75]))
    assert figures["texts_lower_than_think"] == 2
    assert figures["perplexity"] == pytest.approx(math.exp(8 / 3))


def test_equal_channels_share_alike_and_a_large_one_has_all():
    energy = torch.stack((torch.ones(40), torch.eye(40)[7]))
    for share, part in zip(channels.largest_shares(energy).values(), channels.SHARES, strict=True):
        assert share.tolist() == pytest.approx([part, 1.0])


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_is_that_of_scaled_dot_products(groups):
    """torch's, whose output on the identity as values is the attention of every query."""
    queries, keys = draw(4, 5, 8), draw(groups, 12, 8, seed=1)
    seen = torch.ones(5, 12, dtype=torch.bool).tril(7)
    attention = scaled_dot_product_attention(queries, keys.repeat_interleave(4 // groups, 0),
                                             torch.eye(12).double().expand(4, -1, -1), seen, scale=0.3)
    expected = attention.unflatten(0, (groups, -1)).mean((1, 2))
    torch.testing.assert_close(channels.attention_to(queries, keys, 7, 0.3), expected)


def test_later_queries_lose_what_the_window_does_not_choose():
    """Of their attention to the 20 positions before the window, and of their scores."""
    queries, keys = draw(4, 32, 8), draw(2, 32, 8, seed=1)
    keys[:, 20:24] *= 4  # the window attends to itself most
    figures = channels.head_premises(queries, keys, 24, 4, 1.0)
    before, observed = keys[:, :20], queries[:, 20:24]
    energy = before.square().sum(1)
    torch.testing.assert_close(figures["keys"], channels.largest_shares(energy))
    of_scores = energy * observed.square().sum(1).unflatten(0, (2, 2)).sum(1)
    torch.testing.assert_close(figures["scores"], channels.largest_shares(of_scores))
    attention = channels.attention_to(queries[:, 24:], keys, 24, 1.0)[:, :20]
    by_window = channels.attention_to(observed, keys[:, :24], 20, 1.0)[:, :20]
    for name, by in (("the window", by_window), ("later queries", attention),
                     ("recency", torch.arange(20.0).expand(2, -1))):
        shares = [float(row[chosen.topk(2).indices].sum() / row.sum())
                  for row, chosen in zip(attention, by, strict=True)]
        assert figures["positions"][name].tolist() == pytest.approx(shares)
    for name, choosing in (("the window", observed), ("later queries", queries[:, 24:])):
        kept = kept_channels("greedy+swap", choosing.unflatten(0, (2, 2)).flatten(1, 2), before, 0, 4)
        removed = torch.ones(2, 8, dtype=torch.bool).scatter(-1, kept, False)
        later = queries[:, 24:].unflatten(0, (2, 2)).flatten(1, 2)
        lost, whole = (later @ part.mT for part in (before * removed[:, None], before))
        expected = lost.square().sum((1, 2)) / whole.square().sum((1, 2))
        torch.testing.assert_close(figures["channels"][name], expected)


SHORT = ["--sequences", 3, "--batch", 2, "--prompt", 40, "--continuation", 8, "--recent", 6, "--repeats", 1]


def test_command_measures_every_checkpoint(inputs, tmp_path):
    gqa, home = save_tiny(tmp_path / "gqa", num_key_value_heads=2), tmp_path / "run"
    flags = ["--run", home, "--model", inputs["model"], gqa, "--text", inputs["text"], *SHORT]
    flags += ["--ratios", 0.5, 0.7]
    run(COMMAND, *flags)
    results = json.loads((home / "keychannels" / "stage.json").read_text())["results"]
    for path, heads in ((inputs["model"], 8), (gqa, 2)):
        figures = results[path]
        assert len(figures["rows"]) == 8
        for row in figures["rows"]:
            saved = 3 * heads * (34 * (8 - row["channels"]) * 4 - row["channels"] * 2)
            assert figures["cache_bytes"] - row["cache_bytes"] == saved
            if row["select"] == "greedy+swap":
                assert row["higher_than_think"] == 0 < row["objective"]
                assert row["best_of_all_sets"] > 0.8 * row["heads"]
    run(COMMAND, *flags, "--premises")
    premises = json.loads((home / "premises" / "stage.json").read_text())["results"][gqa]
    values = [value for figures in premises.values() for numbers in figures.values() for value in numbers]
    assert len(values) == 11 * 3 * 2 * 3 and 0 <= min(values) <= max(values) <= 1 + 1e-9
