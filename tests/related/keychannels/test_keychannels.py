"""Key-channel pruning: objective and selectors against their definitions, the cache, what is measured."""

import itertools
import json
import math
from argparse import Namespace

import pytest
import torch
from scipy.stats import sem
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import DynamicCache

from common.cli import UserError
from conftest import expect_error, run, save_tiny, tiny_model
from related.keychannels import channels, measure
from related.keychannels.cache import KeyChannelCache, KeyChannelLayer, cached_bytes
from related.keychannels.channels import SELECTORS, cheapest_alone, exact, greedy, kept_channels, objective

COMMAND = "related/keychannels/measure.py"
MODELS = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2, "bias": True},
    "key norms": {"num_key_value_heads": 4, "model_type": "qwen3"},
}
PRUNING = {"ratio": 0.5, "recent": 5, "observed": 7}
GENERATION = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def draw(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(heads: int = 6, size: int = 8) -> torch.Tensor:
    """W of heads whose channels depend on each other, [heads, size, size]."""
    queries = draw(heads, 9, size, seed=0) @ draw(heads, size, size, seed=2)
    keys = draw(heads, 9, size, seed=1) @ draw(heads, size, size, seed=3)
    return channels.interactions(queries, keys)


def cost(matrix: torch.Tensor, channels) -> float:
    return sum(float(matrix[i, j]) for i in channels for j in channels)


def sets(removed: torch.Tensor) -> list[set]:
    return [set(row.nonzero()[:, 0].tolist()) for row in removed]


def test_objective_is_the_squared_error_of_the_scores():
    queries, keys = draw(3, 4, 6, 8), draw(3, 9, 8, seed=1)  # 3 key heads, each read by 4 query heads
    removed = draw(3, 8, seed=2) > 0
    keep = torch.diag_embed((~removed).double())
    change = queries @ keys[:, None].mT - queries @ keep[:, None] @ keys[:, None].mT
    squared = objective(channels.interactions(queries.flatten(1, 2), keys), removed)
    torch.testing.assert_close(squared, change.square().sum((1, 2, 3)))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_selectors_by_definition(count):
    """think goes by W of the whole prompt, the others by that of the keys that are pruned."""
    matrices, others = weights(), weights(heads=12)[6:]
    by_name = {name: sets(SELECTORS[name](matrices, others, count)) for name in SELECTORS}
    for head, (matrix, other) in enumerate(zip(matrices, others, strict=True)):
        for name, scored in (("think", other), ("align", matrix)):
            alone = sorted(range(8), key=lambda i, scored=scored: float(scored[i, i]))
            assert by_name[name][head] == set(alone[:count])
        grown, printed = set(), set()
        for _ in range(count):
            costs = {i: cost(matrix, grown | {i}) for i in range(8) if i not in grown}
            grown.add(min(costs, key=costs.get))
            shares = {i: float(matrix[i, list(printed | {i})].sum()) for i in range(8) if i not in printed}
            printed.add(min(shares, key=shares.get))
        assert by_name["greedy"][head] == grown and by_name["delta"][head] == printed
        lowest = min(cost(matrix, by_name[name][head]) for name in ("think", "align", "greedy"))
        assert cost(matrix, by_name["greedy+swap"][head]) <= lowest + 1e-9


@pytest.mark.parametrize("count", [2, 4, 6])
def test_swaps_end_where_none_helps_and_never_beat_the_best_of_all_sets(count):
    matrices = weights(heads=40)
    best, swapped = exact(matrices, count), SELECTORS["greedy+swap"](matrices, matrices, count)
    lowest, ours = objective(matrices, best), objective(matrices, swapped)
    assert (ours < objective(matrices, greedy(matrices, count)) * 0.999).any()
    assert (ours >= lowest - 1e-9).all()
    for matrix, optimum, chosen in zip(matrices, sets(best), sets(swapped), strict=True):
        costs = [cost(matrix, members) for members in itertools.combinations(range(8), count)]
        assert cost(matrix, optimum) == pytest.approx(min(costs))
        for out, into in itertools.product(chosen, set(range(8)) - chosen):
            assert cost(matrix, chosen - {out} | {into}) >= cost(matrix, chosen) - 1e-9


def test_a_good_start_from_think_is_not_lost():
    """Where swaps from the other starts fall short of the optimum, and think happens to find it."""
    matrices = weights(heads=400)
    best = exact(matrices, 4)
    lowest = objective(matrices, best)
    short = objective(matrices, SELECTORS["greedy+swap"](matrices, matrices, 4)) > lowest * (1 + 1e-9)
    assert short.any() and not short.all()
    lucky = torch.diag_embed((~best).double())  # a whole-prompt W whose cheapest channels are the best set
    torch.testing.assert_close(objective(matrices, SELECTORS["greedy+swap"](matrices, lucky, 4)), lowest)


def test_a_swap_within_rounding_is_not_made():
    """Two channels of equal cost would otherwise change places for ever."""
    matrix = torch.diag_embed(torch.tensor([[1.0, 1.0 - 1e-15]], dtype=torch.float64))
    assert sets(channels.swap(matrix, torch.tensor([[True, False]]))) == [{0}]


def test_removed_count_rounds_the_kept_channels_down():
    counts = [channels.removed_count(ratio, 16) for ratio in (0, 0.3, 0.4, 0.5, 0.6, 0.7)]
    assert counts == [0, 5, 7, 8, 10, 12]
    assert channels.removed_count(0.9, 10) == 9  # 1 - 0.9 is a little less than 0.1


def batch_of(texts: list[list[int]]) -> dict:
    """Texts as one batch, padded on the left."""
    longest = max(map(len, texts))
    padding = [longest - len(text) for text in texts]
    ids = [[9] * pad + text for pad, text in zip(padding, texts, strict=True)]
    mask = [[0] * pad + [1] * len(text) for pad, text in zip(padding, texts, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def random_text(length: int, seed: int) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def two_texts(second: int = 13) -> dict:
    """A batch of a text of 20 tokens and a shorter one."""
    return batch_of([random_text(20, 0), random_text(second, 1)])


def second_prompt(first: dict, length: int, seed: int = 7) -> dict:
    """A second prompt after the first, a different one for each sample."""
    rows = len(first["input_ids"])
    ids = torch.tensor([random_text(length, seed + row) for row in range(rows)])
    mask = torch.cat((first["attention_mask"], torch.ones(rows, length, dtype=torch.long)), 1)
    return {"input_ids": ids, "attention_mask": mask}


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


def states(model, tokens: torch.Tensor) -> list[list]:
    """What the attention of each layer without a sliding window gets and gives, in float64, and its scale."""
    seen = []
    measure.watch_attention(model, tokens, lambda *layer: seen.append(
        [*(tensor.double() for tensor in layer[:-1]), layer[-1]]))
    return seen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("select", SELECTORS)
def test_pruned_cache_equals_a_plain_one_with_zeroed_channels(name, select):
    model = tiny_model(**MODELS[name])
    batch = batch_of([random_text(20, 0), random_text(13, 1), random_text(6, 2)])
    pruned, whole = prefilled(model, batch, select=select), DynamicCache(config=model.config)
    twin, second = zeroed_twin(model, batch, pruned), second_prompt(batch, 8)
    logits(model, batch, whole)
    result = logits(model, second, pruned)
    torch.testing.assert_close(result, logits(model, second, twin), rtol=0, atol=2e-4)
    assert (result - logits(model, second, whole)).abs().max() > 0.01
    third = second_prompt(second, 1)
    torch.testing.assert_close(logits(model, third, pruned), logits(model, third, twin), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_channels_are_those_of_each_sample_alone(name):
    """Each layer's channels in a padded batch, against the queries and keys of the unpadded sample."""
    model, texts = tiny_model(**MODELS[name]), [random_text(20, 0), random_text(13, 1)]
    think, grown = (prefilled(model, batch_of(texts), select=select) for select in ("think", "greedy"))
    for sample, text in enumerate(texts):
        seen = states(model, torch.tensor([text]))
        for first, second, (queries, keys, *_) in zip(think.layers, grown.layers, seen, strict=True):
            group = queries.shape[1] // keys.shape[1]
            for head, key in enumerate(keys[0]):
                energy = sum(q[-7:].T @ q[-7:] for q in queries[0, head * group : (head + 1) * group])
                alone = cheapest_alone(energy * (key.T @ key), 4)
                together = greedy(energy * (key[:-5].T @ key[:-5]), 4)
                assert first.channels[sample, head].tolist() == (~alone).nonzero()[:, 0].tolist()
                assert second.channels[sample, head].tolist() == (~together).nonzero()[:, 0].tolist()


def test_padding_among_the_observed_queries_is_not_counted():
    """A prompt shorter than the observation window chooses as it does alone."""
    model = tiny_model()
    together = prefilled(model, two_texts(6), recent=2, observed=12)
    alone = prefilled(model, batch_of([random_text(6, 1)]), recent=2, observed=12)
    for batch, single in zip(together.layers, alone.layers, strict=True):
        assert torch.equal(batch.channels[1:], single.channels)


def test_a_second_prompt_after_a_short_one_is_not_pruned():
    """Only the end of the first prompt prunes, even when it was too short to."""
    model, batch = tiny_model(), batch_of([random_text(4, 0)])
    cache, plain = prefilled(model, batch), DynamicCache(config=model.config)
    logits(model, batch, plain)
    second = second_prompt(batch, 20)
    assert torch.equal(logits(model, second, cache), logits(model, second, plain))
    assert all(layer.channels is None for layer in cache.layers)


@pytest.mark.parametrize("name", MODELS)
def test_with_nothing_pruned_logits_equal_the_plain_cache_bit_for_bit(name):
    model, batch = tiny_model(**MODELS[name]), two_texts()
    plain, second = DynamicCache(config=model.config), second_prompt(batch, 8)
    expected = [logits(model, batch, plain), logits(model, second, plain)]
    for changes in ({"ratio": 0.0}, {"recent": 20}):
        cache = KeyChannelCache(model, **(PRUNING | changes), prompt=20)
        assert torch.equal(logits(model, batch, cache), expected[0])
        assert torch.equal(logits(model, second, cache), expected[1])
    tokens = model.generate(**batch, **GENERATION, past_key_values=KeyChannelCache(model, 0))
    assert torch.equal(tokens, model.generate(**batch, **GENERATION))


def two_turns(model, batch: dict, cache) -> torch.Tensor:
    """Tokens after the prompt: a generated answer, a question and a second generated answer."""
    length = batch["input_ids"].shape[1]
    first = model.generate(**batch, **GENERATION, past_key_values=cache)
    asked = torch.cat((first, torch.tensor([[3, 1, 4, 1, 5]]).expand(len(first), 5)), 1)
    mask = pad(batch["attention_mask"], (0, asked.shape[1] - length), value=1)
    answer = model.generate(input_ids=asked, attention_mask=mask, **GENERATION, past_key_values=cache)
    assert torch.equal(answer[:, : asked.shape[1]], asked) and cache.get_seq_length() == answer.shape[1] - 1
    return answer[:, length:]


@pytest.mark.parametrize("name", MODELS)
def test_generation_and_a_second_prompt(name):
    """Tokens of a padded batch are those of each sample alone, in two turns."""
    model, batch = tiny_model(**MODELS[name]).double(), two_texts()
    together = two_turns(model, batch, KeyChannelCache(model, **PRUNING))
    for row, text in zip(together, (random_text(20, 0), random_text(13, 1)), strict=True):
        assert torch.equal(two_turns(model, batch_of([text]), KeyChannelCache(model, **PRUNING))[0], row)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 3, 19])  # the 7 observed queries lie in several chunks
def test_a_prompt_in_chunks_is_pruned_as_a_whole(name, chunk):
    """Tokens, tensors and bytes of the cache are those after the same prompt in one forward pass."""
    model, batch = tiny_model(**MODELS[name]).double(), two_texts(5)
    whole, chunked = KeyChannelCache(model, **PRUNING), KeyChannelCache(model, **PRUNING, prompt=20)
    tokens = model.generate(**batch, **GENERATION, past_key_values=whole)
    flags = GENERATION | {"prefill_chunk_size": chunk}
    assert torch.equal(model.generate(**batch, **flags, past_key_values=chunked), tokens)
    assert cached_bytes(chunked) == cached_bytes(whole)
    for expected, layer in zip(whole.layers, chunked.layers, strict=True):
        for tensor in ("channels", "pruned", "keys", "values"):
            torch.testing.assert_close(getattr(layer, tensor), getattr(expected, tensor))


def test_a_prompt_in_chunks_of_unknown_length_is_refused():
    model, batch = tiny_model(), two_texts()
    for size, found in ((6, "padding at the end"), (8, "passes of 8 and 8 tokens"), (12, "passes of 12")):
        with pytest.raises(UserError, match="KeyChannelCache.prompt=.*, found " + found):
            model.generate(**batch, **GENERATION, prefill_chunk_size=size,
                           past_key_values=KeyChannelCache(model, **PRUNING))
    cache = KeyChannelCache(model, **PRUNING)
    logits(model, batch, cache)
    cache.reset()
    assert torch.equal(logits(model, batch, cache), logits(model, batch, None))


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_freed(name):
    model, batch = tiny_model(**MODELS[name]), batch_of([random_text(40, 0), random_text(40, 1)])
    plain, cache = DynamicCache(config=model.config), prefilled(model, batch)
    logits(model, batch, plain)
    heads = model.config.num_key_value_heads
    rows = 3 * 2 * heads  # layers, samples
    assert cached_bytes(plain) == rows * 40 * (8 + 8) * 4
    assert cached_bytes(cache) == rows * (35 * 4 + 5 * 8 + 40 * 8) * 4 + rows * 4 * 2
    logits(model, second_prompt(batch, 3), cache)
    assert cached_bytes(cache) == rows * (35 * 4 + 8 * 8 + 43 * 8) * 4 + rows * 4 * 2
    chunked = KeyChannelCache(model, **PRUNING, prompt=41)
    logits(model, batch, chunked)  # not the whole prompt: its last 7 queries are kept for the choice
    assert cached_bytes(chunked) == cached_bytes(plain) + 3 * 2 * 8 * 7 * 8 * 4
    cache.layers[0].keys = plain.layers[0].keys[:, :, -5:]  # a view keeps alive the whole tensor behind it
    assert cached_bytes(cache) > rows * (35 * 4 + 8 * 8 + 43 * 8) * 4 + 2 * heads * 30 * 8 * 4


@pytest.mark.parametrize(("change", "argument", "order"), [
    ("reorder_cache", torch.tensor([1, 0]), [1, 0]), ("batch_select_indices", torch.tensor([1]), [1]),
    ("batch_repeat_interleave", 2, [0, 0, 1, 1])])
def test_samples_of_a_cache_can_be_moved(change, argument, order):
    """Beam search reorders, repeats and selects samples."""
    model, batch = tiny_model(**MODELS["gqa"]), two_texts()
    second, cache = second_prompt(batch, 4), prefilled(model, batch)
    expected = logits(model, second, prefilled(model, batch))
    getattr(cache, change)(argument)
    moved = {name: rows[order] for name, rows in second.items()}
    torch.testing.assert_close(logits(model, moved, cache), expected[order], rtol=0, atol=1e-5)


def test_layers_with_a_sliding_window_keep_their_own_cache():
    shape = {"sliding_window": 8, "max_window_layers": 1, "num_key_value_heads": 2}
    model, batch = tiny_model(model_type="qwen2", use_sliding_window=True, **shape), two_texts()
    pruned = prefilled(model, batch)
    assert [isinstance(layer, KeyChannelLayer) for layer in pruned.layers] == [True, False, False]
    twin, second = zeroed_twin(model, batch, pruned), second_prompt(batch, 6)
    torch.testing.assert_close(logits(model, second, pruned), logits(model, second, twin), rtol=0, atol=2e-4)
    assert len(states(model, batch["input_ids"])) == 1


def test_what_cannot_be_pruned_is_refused():
    with pytest.raises(UserError, match="window of 8"):
        KeyChannelCache(tiny_model(model_type="mistral", sliding_window=8), 0.5)
    model = tiny_model()
    for arguments in ({"ratio": 1.0}, {"ratio": math.nan}, {"select": "best"}, {"recent": -1},
                      {"observed": 0}, {"prompt": 0}):
        with pytest.raises(UserError, match="key channels: expected"):
            KeyChannelCache(model, **({"ratio": 0.5} | arguments))


def test_decoding_that_takes_tokens_back_is_refused_before_it_starts():
    model, batch, cache = tiny_model(), batch_of([random_text(20, 0)]), KeyChannelCache(tiny_model(), 0.5)
    with pytest.raises(UserError, match="key channels: expected .*, found prompt lookup, an assistant"):
        model.generate(**batch, **GENERATION, prompt_lookup_num_tokens=3, past_key_values=cache)
    assert cache.get_seq_length() == 0


def settings(**changes) -> Namespace:
    values = {"prompt": 20, "continuation": 10, "recent": 5, "observed": 7, "ratios": (0.5,),
              "select": measure.OTHERS}
    return Namespace(**values | changes)


def test_effects_of_a_layer_are_those_of_its_queries_and_keys():
    """Objective and output error of one layer, recomputed from its projections with zeroed channels."""
    model, tokens = tiny_model(**MODELS["gqa"]), torch.tensor([random_text(30, 0), random_text(30, 1)])
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
        effects.append({(0.5, name): {"objective": torch.tensor(values[heads])} | figures
                        for name, values in costs.items()})
    effects[0][0.5, "align"]["error"] = torch.tensor(1.0 + 27.0)
    summary = measure.summarize(settings(select=("align", "greedy", "greedy+swap")), effects)
    names = ("lower_than_think", "same_as_think", "higher_than_think", "above_another", "best_of_all_sets")
    counts = {select: [row[name] for name in names] for (_, select), row in summary.items()}
    assert counts == {"think": [0, 4, 0, 3, 1], "align": [1, 1, 2, 3, 0], "greedy": [2, 2, 0, 1, 2],
                      "greedy+swap": [3, 1, 0, 0, 3]}
    assert summary[0.5, "align"]["change_to_think"] == pytest.approx(0.1)
    assert summary[0.5, "think"]["output_error"] == pytest.approx(0.5)
    assert summary[0.5, "align"]["output_error"] == pytest.approx(1.0)  # of sums over layers: 36 over 36


def test_losses_are_compared_text_by_text():
    """A standard error with n - 1; a text of equal loss is not lower."""
    plain, think = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.5, 2.0, 4.5])
    loss = torch.tensor([1.25, 2.0, 4.75])
    figures = measure.compare_losses(loss, plain, think)
    assert figures["loss_over_plain"] == pytest.approx(1 / 3)
    assert figures["loss_over_plain_stderr"] == pytest.approx(sem([0.25, 0.0, 0.75]))
    assert figures["texts_lower_than_think"] == 1
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


def test_keys_that_only_later_queries_look_at_are_missed_by_the_window():
    """Position 3 answers later queries alone, 5 and 6 the window: a tenth of 20 is two positions."""
    keys, queries = torch.zeros(1, 32, 8), torch.zeros(1, 32, 8)
    keys[0, 3, 0] = keys[0, 5, 1] = keys[0, 6, 1] = 50.0
    queries[0, 20:24, 1] = queries[0, 24:, 0] = 1.0
    figures = measure.head_premises(settings(prompt=24, observed=4), queries, keys, 1.0)
    shares = {by: float(share) for by, share in figures["positions"].items()}
    assert shares["the window"] < 1e-6 and shares["recency"] < 1e-6
    assert shares["later queries"] > 1 - 1e-6
    assert float(figures["keys"]["10%"]) == pytest.approx(2 / 3)  # channel 1 has two of three large keys
    # by the window channel 0 goes, which is all that later queries read
    assert float(figures["channels"]["the window"]) == pytest.approx(1)
    assert float(figures["channels"]["later queries"]) == pytest.approx(0)


SHORT = ["--sequences", 3, "--batch", 2, "--prompt", 40, "--continuation", 8, "--recent", 6, "--repeats", 1]


@pytest.mark.slow
def test_command_measures_every_checkpoint(inputs, tmp_path):
    gqa, home = save_tiny(tmp_path / "gqa", num_key_value_heads=2), tmp_path / "run"
    flags = ["--run", home, "--model", inputs["model"], gqa, "--text", inputs["text"], *SHORT]
    flags += ["--ratios", 0.5, 0.7]
    printed = run(COMMAND, *flags).stdout
    results = json.loads((home / "keychannels.json").read_text())["results"]
    assert list(results) == [inputs["model"], gqa] and (home / "keychannels.png").exists()
    for path, heads in ((inputs["model"], 8), (gqa, 2)):
        figures = results[path]
        assert figures["same_bits_at_0"] and len(figures["rows"]) == 8
        for row in figures["rows"]:
            compared = row["lower_than_think"] + row["same_as_think"] + row["higher_than_think"]
            assert row["heads"] == compared == 3 * heads * 3
            saved = 3 * heads * (34 * (8 - row["channels"]) * 4 - row["channels"] * 2)
            assert figures["cache_bytes"] - row["cache_bytes"] == saved
            if row["select"] == "greedy+swap":
                assert row["above_another"] == 0 < row["objective"]
                assert row["best_of_all_sets"] > 0.8 * row["heads"]
    assert (home / "keychannels.md").read_text().count("| greedy+swap |") == 8
    assert "above any other on 0" in printed
    assert "complete" in run(COMMAND, *flags).stdout
    run(COMMAND, *flags, "--premises")
    results = json.loads((home / "premises.json").read_text())["results"]
    for path, heads in ((inputs["model"], 8), (gqa, 2)):
        numbers = [numbers for figures in results[path].values() for numbers in figures.values()]
        assert len(numbers) == 11 and all(len(values) == 3 * heads * 3 for values in numbers)
        assert all(0 <= value <= 1 + 1e-9 for values in numbers for value in values)


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "message"), [
    (["--prompt", 250], "--prompt and --continuation: expected at most the 256 positions"),
    (["--ratios", 1], "--ratios: expected to remove 1 to 7 of the 8 channels"),
    (["--recent", 40], "--recent: expected"),
    (["--observed", 40, "--premises"], "--observed: expected at most 39"),
])
def test_bad_arguments_are_refused_before_any_work(inputs, tmp_path, flags, message):
    given = ["--run", tmp_path / "run", "--model", inputs["model"], "--text", inputs["text"], *SHORT, *flags]
    expect_error(message, COMMAND, *given)
    assert not (tmp_path / "run").exists()
