"""Key-channel pruning: objective, selectors, cache and what is measured, against their definitions."""

import itertools
import math
from argparse import Namespace

import pytest
import torch
from scipy.stats import sem
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from common.run.errors import UserError
from models import save_tiny, tiny_model
from reference import normal
from related.keychannels import channels, measure
from related.keychannels.cache import KeyChannelCache, KeyChannelLayer, cached_bytes
from related.keychannels.channels import SELECTORS, exact, greedy, kept_channels, objective
from runs import read, run

pytestmark = pytest.mark.slow
PRUNING = {"ratio": 0.5, "recent": 5, "observed": 7}
MODELS = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2, "bias": True},
    "key norms": {"num_key_value_heads": 4, "model_type": "qwen3"},
    "windows after a layer": {"num_key_value_heads": 2, "model_type": "qwen2", "use_sliding_window": True,
                              "sliding_window": 8, "max_window_layers": 1},
}


def batch_of(*lengths: int, seed: int = 0) -> dict:
    """Random texts of these lengths as one batch, padded on the left."""
    longest, draw = max(lengths), torch.Generator().manual_seed(seed)
    real = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": torch.randint(250, real.shape, generator=draw), "attention_mask": real.long()}


def second_prompt(first: dict, length: int) -> dict:
    """A second prompt after the first, a different one for each sample."""
    second = batch_of(*[length] * len(first["input_ids"]), seed=7)
    return second | {"attention_mask": torch.cat((first["attention_mask"], second["attention_mask"]), 1)}


def weights(heads: int = 6) -> torch.Tensor:
    """W of heads whose channels depend on each other, [heads, 8, 8]."""
    queries = normal(heads, 9, 8, seed=0) @ normal(heads, 8, 8, seed=2)
    keys = normal(heads, 9, 8, seed=1) @ normal(heads, 8, 8, seed=3)
    return channels.interactions(queries, keys)


def test_objective_is_the_squared_error_of_the_scores():
    queries, keys = normal(3, 4, 6, 8).float(), normal(3, 9, 8, seed=1).float()  # 3 key heads, 4 readers each
    removed = normal(3, 8, seed=2) > 0
    squared = objective(channels.interactions(queries.flatten(1, 2), keys), removed)
    queries, keys = queries.double(), keys.double()
    keep = torch.diag_embed((~removed).double())
    change = queries @ keys[:, None].mT - queries @ keep[:, None] @ keys[:, None].mT
    torch.testing.assert_close(squared, change.square().sum((1, 2, 3)), rtol=1e-10, atol=0)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_selectors_by_definition(count):
    """think goes by W of the whole prompt, the others by that of the keys that are pruned."""
    matrices, others = weights(), weights(heads=12)[6:]
    removed = {name: select(matrices, others, count) for name, select in SELECTORS.items()}
    for head, (matrix, other) in enumerate(zip(matrices, others, strict=True)):
        grown, printed = [], []
        for _ in range(count):
            costs = {i: float(matrix[[*grown, i]][:, [*grown, i]].sum()) for i in {*range(8)} - {*grown}}
            grown.append(min(costs, key=costs.get))
            shares = {i: float(matrix[i, [*printed, i]].sum()) for i in {*range(8)} - {*printed}}
            printed.append(min(shares, key=shares.get))
        for name, expected in (("think", other.diagonal().argsort()[:count].tolist()),
                               ("align", matrix.diagonal().argsort()[:count].tolist()),
                               ("greedy", grown), ("delta", printed)):
            assert removed[name][head].nonzero()[:, 0].tolist() == sorted(expected)


def test_swaps_end_where_none_helps_and_no_good_start_is_lost():
    matrices, members = weights(heads=40), torch.tensor([*itertools.combinations(range(8), 4)])
    every = torch.zeros(len(members), 1, 8, dtype=torch.bool).scatter(-1, members[:, None], True)
    costs, best = objective(matrices, every), exact(matrices, 4)  # of all sets; the cheapest set
    lowest = costs.min(0).values
    torch.testing.assert_close(objective(matrices, best), lowest)
    swapped = SELECTORS["greedy+swap"](matrices, matrices, 4)
    found, neighbours = objective(matrices, swapped), (every ^ swapped).sum(-1) == 2
    assert (found < objective(matrices, greedy(matrices, 4)) * 0.999).any()
    assert (costs >= found - 1e-9)[neighbours].all() and (found > lowest * (1 + 1e-9)).any()
    lucky = torch.diag_embed((~best).double())  # a whole-prompt W by which think finds the cheapest set
    torch.testing.assert_close(objective(matrices, SELECTORS["greedy+swap"](matrices, lucky, 4)), lowest)


def test_a_swap_within_rounding_is_not_made():
    """Two channels of equal cost would otherwise change places for ever."""
    matrix = torch.diag_embed(torch.tensor([[1e6, 1e6 * (1 - 1e-15)]], dtype=torch.float64))
    assert channels.swap(matrix, torch.tensor([[True, False]])).tolist() == [[True, False]]


def test_removed_count_rounds_the_kept_channels_down():
    assert [channels.removed_count(ratio, 16) for ratio in (0, 0.3, 0.4, 0.5)] == [0, 5, 7, 8]
    assert channels.removed_count(0.9, 10) == 9  # 1 - 0.9 is a little less than 0.1


@torch.no_grad()
def logits(model, batch: dict, cache) -> torch.Tensor:
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)[:, -batch["input_ids"].shape[1] :]
    return model(**batch, position_ids=positions, past_key_values=cache).logits


def prefilled(model, batch: dict, **changes) -> KeyChannelCache:
    cache = KeyChannelCache(model, **(PRUNING | changes), prompt=batch["input_ids"].shape[1])
    logits(model, batch, cache)
    return cache


def zeroed_twin(model, batch: dict, pruned) -> DynamicCache:
    """The plain cache of the same prompt with zeros where the pruned one stores nothing: same function."""
    plain = DynamicCache(config=model.config)
    logits(model, batch, plain)
    for whole, layer in zip(plain.layers, pruned.layers, strict=True):
        if isinstance(layer, KeyChannelLayer):
            old = whole.keys[:, :, : layer.pruned.shape[2]]
            keep = torch.zeros(*old.shape[:2], old.shape[-1]).scatter_(-1, layer.channels.long(), 1.0)
            old.mul_(keep[:, :, None])
    return plain


@pytest.mark.parametrize("name", MODELS)
def test_pruned_cache_equals_a_plain_one_with_zeroed_channels(name):
    """After a second prompt and, with the samples in another order as by a beam search, a token, too."""
    model, batch = tiny_model(**MODELS[name]), batch_of(20, 13, 6)
    pruned, whole = prefilled(model, batch), DynamicCache(config=model.config)
    twin, second = zeroed_twin(model, batch, pruned), second_prompt(batch, 8)
    logits(model, batch, whole)
    result = logits(model, second, pruned)
    torch.testing.assert_close(result, logits(model, second, twin), rtol=0, atol=2e-4)
    assert (result - logits(model, second, whole)).abs().max() > 0.01
    beams = torch.tensor([1, 1, 0])
    for cache in (pruned, twin):
        cache.reorder_cache(beams)
    third = second_prompt({name: tensor[beams] for name, tensor in second.items()}, 1)
    torch.testing.assert_close(logits(model, third, pruned), logits(model, third, twin), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_channels_are_those_of_each_sample_alone(name):
    """The shortest has padding among the observed queries."""
    model, batch = tiny_model(**MODELS[name]), batch_of(20, 13, 6)
    together = prefilled(model, batch)
    for sample, real in enumerate(batch["attention_mask"].bool()):
        alone = prefilled(model, {key: rows[sample : sample + 1, real] for key, rows in batch.items()})
        for layer, expected in zip(together.layers, alone.layers, strict=True):
            if isinstance(layer, KeyChannelLayer):
                assert torch.equal(layer.channels[sample], expected.channels[0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{"ratio": 0.0}, {"ratio": 0.5, "recent": 20}])
def test_with_nothing_to_prune_logits_equal_the_plain_cache_bit_for_bit(name, settings):
    """Nor are later prompts pruned after one that was too short to."""
    model, batch = tiny_model(**MODELS[name]), batch_of(20, 13)
    plain, cache = DynamicCache(config=model.config), KeyChannelCache(model, **settings, prompt=20)
    for _ in range(3):
        assert torch.equal(logits(model, batch, cache), logits(model, batch, plain))
        batch = second_prompt(batch, 8)


@pytest.mark.parametrize("chunk", [1, 3, 19])  # the 7 observed queries lie in several chunks
def test_a_prompt_in_chunks_is_pruned_as_a_whole(chunk):
    """Tokens, tensors and bytes of the cache are those after the same prompt in one forward pass."""
    model, batch = tiny_model(**MODELS["gqa"]).double(), batch_of(20, 5)
    whole, chunked = KeyChannelCache(model, **PRUNING), KeyChannelCache(model, **PRUNING, prompt=20)
    flags = batch | {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    tokens = model.generate(**flags, past_key_values=whole)
    chunks = model.generate(**flags, past_key_values=chunked, prefill_chunk_size=chunk)
    assert torch.equal(chunks, tokens)
    assert cached_bytes(chunked) == cached_bytes(whole)
    for expected, layer in zip(whole.layers, chunked.layers, strict=True):
        for tensor in ("channels", "pruned", "keys", "values"):
            torch.testing.assert_close(getattr(layer, tensor), getattr(expected, tensor))


def test_what_cannot_be_pruned_is_refused():
    with pytest.raises(UserError, match="window of 8"):
        KeyChannelCache(tiny_model(model_type="mistral", sliding_window=8), 0.5)
    with pytest.raises(UserError, match="key channels: expected"):
        KeyChannelCache(tiny_model(), 1.0)


def test_effects_of_a_layer_are_those_of_its_queries_and_keys():
    """Of a prompt of 20 tokens and a continuation of 10, with zeroed channels."""
    queries, keys, values = normal(2, 8, 30, 8), normal(2, 2, 30, 8, seed=1), normal(2, 2, 30, 8, seed=2)
    args = Namespace(prompt=20, continuation=10, recent=5, observed=7, ratios=(0.5,), select=("greedy+swap",))
    before = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=0.3, enable_gqa=True)
    effects = measure.head_effects(args, queries, keys, values, before.transpose(1, 2), 0.3)
    observed = queries[:, :, 13:20].unflatten(1, (2, 4))  # the four query heads of each key head
    for select in ("think", "greedy+swap"):
        kept = kept_channels(select, observed.flatten(2, 3), keys[:, :, :20], 5, 4)
        zeroed = keys.clone()
        zeroed[:, :, :15] *= torch.zeros(2, 2, 8).scatter(-1, kept, 1.0)[:, :, None]
        scores, change = (observed @ part[:, :, None, :15].mT for part in (keys, keys - zeroed))
        after = scaled_dot_product_attention(queries, zeroed, values, is_causal=True, scale=0.3,
                                             enable_gqa=True)
        expected = {"objective": change.square().sum((2, 3, 4)) / scores.square().sum((2, 3, 4)),
                    "error": (after - before)[:, :, 20:].square().sum(),
                    "output": before[:, :, 20:].square().sum()}
        torch.testing.assert_close(effects[0.5, select], expected, rtol=1e-4, atol=0)
        assert (effects[0.5, "exact"]["objective"] <= expected["objective"] + 1e-9).all()


def test_losses_are_compared_text_by_text():
    """A standard error with n - 1; a text of equal loss is not lower."""
    plain, think, loss = torch.tensor([[1.0, 2.0, 4.0], [1.5, 2.0, 5.0], [1.25, 2.0, 4.75]])
    assert measure.compare_losses(loss, plain, think) == pytest.approx({
        "loss_over_plain": 1 / 3, "loss_over_plain_stderr": sem([0.25, 0.0, 0.75]),
        "perplexity": math.exp(8 / 3), "texts_lower_than_think": 2})


def test_premises_are_shares_of_energy_and_what_later_queries_lose_by_the_window():
    """The prompt has 24 positions, of which the last 4 are the window."""
    queries, keys = normal(4, 32, 8), normal(2, 32, 8, seed=1)
    keys[:, 20:24] *= 4  # the window attends to itself most
    found, before = channels.head_premises(queries, keys, 24, 4, 1.0), keys[:, :20]
    stacked = queries.unflatten(0, (2, 2))
    early, later = stacked[:, :, 20:24].flatten(1, 2), stacked[:, :, 24:].flatten(1, 2)
    energy = before.square().sum(1)
    for name, parts in (("keys", energy), ("scores", energy * early.square().sum(1))):
        ordered = (parts / parts.sum(1, keepdim=True)).sort(descending=True).values
        shares = {"10%": ordered[:, 0], "25%": ordered[:, :2].sum(1), "50%": ordered[:, :4].sum(1)}
        torch.testing.assert_close(found[name], shares)
    identity = torch.eye(32).double().expand(4, -1, -1)  # of which the output is the attention itself
    attention = scaled_dot_product_attention(queries, keys.repeat_interleave(2, 0), identity, is_causal=True,
                                             scale=1.0).unflatten(0, (2, 2)).sum(1)[..., :20]
    of_later = attention[:, 24:].sum(1)
    for name, by in (("the window", attention[:, 20:24].sum(1)), ("later queries", of_later),
                     ("recency", torch.arange(20).expand(2, -1))):
        chosen = of_later.gather(1, by.topk(2).indices).sum(1)
        torch.testing.assert_close(found["positions"][name], chosen / of_later.sum(1))
    for name, choosing in (("the window", early), ("later queries", later)):
        kept = kept_channels("greedy+swap", choosing, before, 0, 4)
        removed = torch.ones(2, 8).double().scatter(-1, kept, 0.0)
        lost, whole = (later @ part.mT for part in (before * removed[:, None], before))
        errors = lost.square().sum((1, 2)) / whole.square().sum((1, 2))
        torch.testing.assert_close(found["channels"][name], errors)


SHORT = ["--sequences", 3, "--batch", 2, "--prompt", 40, "--continuation", 8, "--recent", 6, "--repeats", 1,
         "--ratios", 0.5, 0.7]


def test_command_measures_every_checkpoint(inputs, tmp_path):
    gqa, home = save_tiny(tmp_path / "gqa", num_key_value_heads=2), tmp_path / "run"
    flags = ["--run", home, "--model", inputs["model"], gqa, "--text", inputs["text"], *SHORT]
    run("related/keychannels/measure.py", *flags)
    results = read(home / "keychannels" / "stage.json")["results"]
    for path, heads in ((inputs["model"], 8), (gqa, 2)):
        figures = results[path]
        assert len(figures["rows"]) == 8
        for row in figures["rows"]:
            assert row["lower_than_think"] + row["same_as_think"] + row["higher_than_think"] == row["heads"]
            saved = 3 * heads * (34 * (8 - row["channels"]) * 4 - row["channels"] * 2)
            assert figures["cache_bytes"] - row["cache_bytes"] == saved
            if row["select"] == "greedy+swap":
                assert row["higher_than_think"] == 0 < row["objective"] and row["change_to_think"] < 0
                assert row["best_of_all_sets"] > 0.8 * row["heads"]
    run("related/keychannels/measure.py", *flags, "--premises")
    premises = read(home / "premises" / "stage.json")["results"][gqa]
    values = [value for figures in premises.values() for numbers in figures.values() for value in numbers]
    assert len(values) == 11 * 3 * 2 * 3 and 0 <= min(values) <= max(values) <= 1 + 1e-9
