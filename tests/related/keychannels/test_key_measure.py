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
from related.keychannels import measure
from related.keychannels.channels import SELECTORS, kept_channels
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
        keys, values = (tensor.repeat_interleave(4, 1) for tensor in (keys, values))
        observed, plain = queries[:, :, 13:20], scaled_dot_product_attention
        whole = plain(queries, keys, values, is_causal=True, scale=scaling)[:, :, 20:]
        for select in SELECTORS:
            first = kept_channels(select, observed[:, :4].flatten(1, 2), keys[:, 0, :20], 5, 4)
            second = kept_channels(select, observed[:, 4:].flatten(1, 2), keys[:, 4, :20], 5, 4)
            keep = torch.zeros(2, 8, 8, dtype=torch.float64)
            keep.scatter_(-1, torch.stack((first, second), 1).repeat_interleave(4, 1), 1.0)
            zeroed = keys.clone()
            zeroed[:, :, :15] *= keep[:, :, None]
            scores = observed @ keys[:, :, :15].mT
            change = scores - observed @ zeroed[:, :, :15].mT
            error, norm = (x.square().sum((2, 3)).unflatten(1, (2, 4)).sum(2) for x in (change, scores))
            figures = layer[0.5, select]
            torch.testing.assert_close(figures["objective"], error / norm, rtol=1e-4, atol=0)
            mask = torch.ones(10, 30, dtype=torch.bool).tril(20)
            after = plain(queries[:, :, 20:], zeroed, values, mask, scale=scaling)
            error, norm = (after - whole).square().sum(), whole.square().sum()
            torch.testing.assert_close(figures["error"], error, rtol=1e-4, atol=0)
            torch.testing.assert_close(figures["output"], norm, rtol=1e-4, atol=0)
            assert (layer[0.5, "exact"]["objective"] <= figures["objective"] + 1e-9).all()


def test_summary_counts_the_heads_on_which_a_selector_wins():
    costs = {"think": [1.0, 2.0, 3.0, 4.0], "align": [2.0, 2.0, 2.0, 5.0], "greedy": [0.5, 2.0, 2.0, 4.0],
             "greedy+swap": [0.5, 1.0, 2.0, 4.0], "exact": [0.5, 1.0, 1.0, 4.0]}
    effects = []
    for heads, error, output in ((slice(0, 3), 1.0, 4.0), (slice(3, 4), 2.0, 8.0), (slice(0, 0), 6.0, 24.0)):
        figures = {"error": torch.tensor(error), "output": torch.tensor(output)}  # of a layer
        effects.append({(0.5, name): {"objective": torch.tensor(values[heads]).double()} | figures
                        for name, values in costs.items()})
    effects[0][0.5, "align"]["error"] = torch.tensor(1.0 + 27.0)
    summary = measure.summarize(settings(select=("align", "greedy", "greedy+swap")), effects)
    names = ("lower_than_think", "same_as_think", "higher_than_think", "above_another", "best_of_all_sets")
    counts = {select: [row[name] for name in names] for (_, select), row in summary.items()}
    assert counts == {"think": [0, 4, 0, 3, 1], "align": [1, 1, 2, 3, 0], "greedy": [2, 2, 0, 1, 2],
                      "greedy+swap": [3, 1, 0, 0, 3]}
    assert summary[0.5, "align"]["change_to_think"] == pytest.approx(0.1)
    assert summary[0.5, "align"]["objective"] == pytest.approx(2.75)
    assert summary[0.5, "think"]["output_error"] == pytest.approx(0.5)
    assert summary[0.5, "align"]["output_error"] == pytest.approx(1.0)  # of sums over layers: 36 over 36


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
    equal = measure.largest_shares(torch.ones(3, 40)).values()
    assert [share.tolist() for share in equal] == [pytest.approx([part] * 3) for part in measure.SHARES]
    one = torch.zeros(20)
    one[7] = 5.0
    assert [float(share) for share in measure.largest_shares(one).values()] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_is_that_of_scaled_dot_products(groups):
    """Against the softmax of each query alone, with the keys up to its own position."""
    queries, keys = draw(4, 5, 8), draw(groups, 12, 8, seed=1)
    actual = measure.attention_to(queries, keys, 7, 0.3)
    for group in range(groups):
        rows = torch.zeros(4 // groups, 5, 12, dtype=torch.float64)
        for place, head in enumerate(range(group * 4 // groups, (group + 1) * 4 // groups)):
            for number in range(5):
                scores = 0.3 * keys[group, : 8 + number] @ queries[head, number]
                rows[place, number, : 8 + number] = scores.softmax(0)
        torch.testing.assert_close(actual[group], rows.mean((0, 1)))


def test_later_queries_lose_what_the_window_does_not_choose():
    """Of their attention to the 20 positions before the window, and of their scores."""
    queries, keys = draw(4, 32, 8), draw(2, 32, 8, seed=1)
    keys[:, 20:24] *= 4  # the window attends to itself most
    figures = measure.head_premises(settings(prompt=24, observed=4), queries, keys, 1.0)
    before, observed = keys[:, :20], queries[:, 20:24].unflatten(0, (2, 2))
    energy = before.square().sum(1)
    for name, expected in (("keys", energy), ("scores", energy * observed.square().sum((1, 2)))):
        torch.testing.assert_close(figures[name], measure.largest_shares(expected))
    effects, attention = figures["channels"], measure.attention_to(queries[:, 24:], keys, 24, 1.0)[:, :20]
    by_window = measure.attention_to(queries[:, 20:24], keys[:, :24], 20, 1.0)[:, :20]
    for name, by in (("the window", by_window), ("later queries", attention),
                     ("recency", torch.arange(20.0).expand(2, -1))):
        shares = [float(row[chosen.topk(2).indices].sum() / row.sum())
                  for row, chosen in zip(attention, by, strict=True)]
        assert figures["positions"][name].tolist() == pytest.approx(shares)
    for name, choosing in (("the window", queries[:, 20:24]), ("later queries", queries[:, 24:])):
        for head in range(2):
            readers, key = slice(2 * head, 2 * head + 2), keys[head, :20]
            kept = kept_channels("greedy+swap", choosing[readers].flatten(0, 1), key, 0, 4)
            later = queries[readers, 24:].flatten(0, 1)
            removed = torch.ones(8, dtype=torch.bool)
            removed[kept] = False
            error = (later[:, removed] @ key[:, removed].T).square().sum() / (later @ key.T).square().sum()
            torch.testing.assert_close(effects[name][head], error)


SHORT = ["--sequences", 3, "--batch", 2, "--prompt", 40, "--continuation", 8, "--recent", 6, "--repeats", 1]


def test_command_measures_every_checkpoint(inputs, tmp_path):
    gqa, home = save_tiny(tmp_path / "gqa", num_key_value_heads=2), tmp_path / "run"
    flags = ["--run", home, "--model", inputs["model"], gqa, "--text", inputs["text"], *SHORT]
    flags += ["--ratios", 0.5, 0.7]
    run(COMMAND, *flags)
    results = json.loads((home / "keychannels" / "stage.json").read_text())["results"]
    for path, heads in ((inputs["model"], 8), (gqa, 2)):
        figures = results[path]
        assert figures["same_bits_at_0"] and len(figures["rows"]) == 8
        for row in figures["rows"]:
            saved = 3 * heads * (34 * (8 - row["channels"]) * 4 - row["channels"] * 2)
            assert figures["cache_bytes"] - row["cache_bytes"] == saved
            if row["select"] == "greedy+swap":
                assert row["above_another"] == 0 < row["objective"]
                assert row["best_of_all_sets"] > 0.8 * row["heads"]
    run(COMMAND, *flags, "--premises")
    premises = json.loads((home / "premises" / "stage.json").read_text())["results"][gqa]
    values = [value for figures in premises.values() for numbers in figures.values() for value in numbers]
    assert len(values) == 11 * 3 * 2 * 3 and 0 <= min(values) <= max(values) <= 1 + 1e-9
