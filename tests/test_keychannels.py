"""Key-channel pruning: the objective against its definition, selectors against all sets, the cache against zeroed plain keys."""

import itertools
import json

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.cli import UserError
from conftest import run, save_tiny, tiny_model
from related.keychannels.cache import KeyChannelCache, KeyChannelLayer, held_bytes, pruned_attention
from related.keychannels.channels import (
    SELECTORS,
    cheapest_alone,
    exact,
    exchanged,
    greedy,
    interactions,
    kept_channels,
    objective,
    removed_count,
)

MODELS = {"mha": {}, "gqa": {"num_key_value_heads": 2, "bias": True}, "key norms": {"num_key_value_heads": 4, "model_type": "qwen3"}}
HOW = {"ratio": 0.5, "recent": 5, "observed": 7}


def draw(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(heads: int = 6, size: int = 8) -> torch.Tensor:
    """W of heads whose channels depend on each other, [heads, size, size]."""
    queries, keys = (draw(heads, 9, size, seed=seed) @ draw(heads, size, size, seed=seed + 2) for seed in (0, 1))
    return interactions(queries, keys)


def cost(matrix: torch.Tensor, chosen) -> float:
    return sum(float(matrix[i, j]) for i in chosen for j in chosen)


def sets(removed: torch.Tensor) -> list[set]:
    return [set(row.nonzero()[:, 0].tolist()) for row in removed]


def test_objective_is_the_squared_error_of_the_scores():
    queries, keys, removed = draw(3, 4, 6, 8), draw(3, 9, 8, seed=1), draw(3, 8, seed=2) > 0  # 3 key heads, each read by 4 query heads
    keep = torch.diag_embed((~removed).double())
    change = queries @ keys[:, None].mT - queries @ keep[:, None] @ keys[:, None].mT
    torch.testing.assert_close(objective(interactions(queries.flatten(1, 2), keys), removed), change.square().sum((1, 2, 3)))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_selectors_by_definition(count):
    matrices = weights()
    for matrix, think, grown in zip(matrices, sets(cheapest_alone(matrices, count)), sets(greedy(matrices, count)), strict=True):
        assert think == set(sorted(range(8), key=lambda i: float(matrix[i, i]))[:count])
        expected = set()
        for _ in range(count):
            expected.add(min(set(range(8)) - expected, key=lambda i: cost(matrix, expected | {i})))
        assert grown == expected


@pytest.mark.parametrize("count", [2, 4, 6])
def test_exchanges_end_where_none_helps_and_never_below_the_best_of_all_sets(count):
    matrices = weights(heads=40)
    best = exact(matrices, count)
    swapped = SELECTORS["greedy+swap"](matrices, matrices, count)
    costs = {name: objective(matrices, chosen) for name, chosen in
             (("best", best), ("swapped", swapped), ("greedy", greedy(matrices, count)), ("alone", cheapest_alone(matrices, count)))}
    assert (costs["swapped"] <= torch.minimum(costs["greedy"], costs["alone"]) + 1e-9).all()
    assert (costs["swapped"] < costs["alone"] * 0.999).any() and (costs["swapped"] >= costs["best"] - 1e-9).all()
    for matrix, lowest, ours in zip(matrices, sets(best), sets(swapped), strict=True):
        assert cost(matrix, lowest) == pytest.approx(min(cost(matrix, chosen) for chosen in itertools.combinations(range(8), count)))
        assert all(cost(matrix, ours - {i} | {j}) >= cost(matrix, ours) - 1e-9 for i in ours for j in set(range(8)) - ours)


def test_a_good_start_of_think_is_not_lost():
    """Where exchanges from the other starts fall short of the best set, and think happens to find it."""
    matrices = weights(heads=400)
    best = exact(matrices, 4)
    short = objective(matrices, SELECTORS["greedy+swap"](matrices, matrices, 4)) > objective(matrices, best) * (1 + 1e-9)
    assert short.any() and not short.all()
    found = SELECTORS["greedy+swap"](matrices, torch.diag_embed((~best).double()), 4)
    torch.testing.assert_close(objective(matrices, found), objective(matrices, best))


def test_channels_that_cancel_go_together():
    """0 and 1 nearly cancel: the costs alone do not show it, growing does, and so does an exchange."""
    matrix = torch.tensor([[0.8, -0.8, 0.0], [-0.8, 1.0, 0.0], [0.0, 0.0, 0.9]], dtype=torch.float64)[None]
    assert sets(cheapest_alone(matrix, 2)) == [{0, 2}]
    assert sets(greedy(matrix, 2)) == sets(exchanged(matrix, torch.tensor([[True, False, True]]))) == sets(exact(matrix, 2)) == [{0, 1}]


def test_align_looks_at_what_will_be_pruned():
    queries, keys = torch.ones(1, 4, 4), torch.ones(1, 10, 4) * torch.tensor([0.1, 1.0, 1.0, 1.0])
    keys[:, -3:, 0] = 100.0  # loud in the recent keys alone, which stay whole
    assert 0 in kept_channels("think", queries, keys, 3, 1) and kept_channels("align", queries, keys, 3, 1).tolist() == [[1, 2, 3]]


def test_how_many_channels_go():
    assert [removed_count(ratio, 16) for ratio in (0, 0.3, 0.4, 0.5, 0.6, 0.7)] == [0, 5, 7, 8, 10, 12]
    assert removed_count(0.9, 10) == 9  # 1 - 0.9 falls short of 0.1


def inputs_of(texts: list[list[int]]) -> dict:
    longest = max(map(len, texts))
    return {"input_ids": torch.tensor([[9] * (longest - len(t)) + t for t in texts]),
            "attention_mask": torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in texts])}


def a_text(length: int, seed: int) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def more(inputs: dict, length: int, seed: int = 7) -> dict:
    """A second prompt after the first, for each sample its own."""
    rows = len(inputs["input_ids"])
    return {"input_ids": torch.tensor([a_text(length, seed + row) for row in range(rows)]),
            "attention_mask": torch.cat((inputs["attention_mask"], torch.ones(rows, length, dtype=torch.long)), 1)}


def positions(inputs: dict) -> torch.Tensor:
    return (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)[:, -inputs["input_ids"].shape[1] :]


@torch.no_grad()
def logits(model, inputs: dict, cache) -> torch.Tensor:
    return model(**inputs, position_ids=positions(inputs), past_key_values=cache).logits


def zeroed(plain, pruned):
    """The plain cache of the same prompt with zeros where the pruned one keeps nothing: the same function, no memory saved."""
    for whole, layer in zip(plain.layers, pruned.layers, strict=True):
        if isinstance(layer, KeyChannelLayer):
            old = whole.keys[:, :, : layer.pruned.shape[2]]
            keep = torch.zeros(*old.shape[:2], old.shape[-1]).scatter_(-1, layer.channels.long(), 1.0)
            old.mul_(keep[:, :, None])
    return plain


def prefilled(model, inputs: dict, **how):
    cache = KeyChannelCache(model, **(HOW | how))
    logits(model, inputs, cache)
    return cache


def zeroed_twin(model, inputs: dict, pruned):
    plain = DynamicCache(config=model.config)
    logits(model, inputs, plain)
    return zeroed(plain, pruned)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("select", SELECTORS)
def test_pruned_cache_is_a_plain_one_with_zeroed_channels(name, select):
    model, inputs = tiny_model(**MODELS[name]), inputs_of([a_text(20, 0), a_text(13, 1), a_text(6, 2)])
    pruned = prefilled(model, inputs, select=select)
    twin, second = zeroed_twin(model, inputs, pruned), more(inputs, 8)
    whole = DynamicCache(config=model.config)
    first = logits(model, inputs, whole)
    found, expected = logits(model, second, pruned), logits(model, second, twin)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert (found - logits(model, second, whole)).abs().max() > 0.01 and torch.isfinite(first).all()
    third = more(second, 1)
    torch.testing.assert_close(logits(model, third, pruned), logits(model, third, twin), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_channels_are_those_of_each_sample_alone(name):
    """Each layer's channels in a padded batch, against queries and keys of the unpadded sample as an attention function of our own sees them."""
    model, texts = tiny_model(**MODELS[name]), [a_text(20, 0), a_text(13, 1)]
    (think, grown), seen = (prefilled(model, inputs_of(texts), select=select) for select in ("think", "greedy")), []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append((query[0].double(), key[0].double()))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    model.set_attn_implementation("spy")
    for sample, text in enumerate(texts):
        seen.clear()
        logits(model, inputs_of([text]), None)
        for first, second, (queries, keys) in zip(think.layers, grown.layers, seen, strict=True):
            group = len(queries) // len(keys)
            for head, key in enumerate(keys):
                energy = sum((q[-7:].T @ q[-7:]) for q in queries[head * group : (head + 1) * group])
                for layer, removed in ((first, cheapest_alone(energy * (key.T @ key), 4)), (second, greedy(energy * (key[:-5].T @ key[:-5]), 4))):
                    assert layer.channels[sample, head].tolist() == (~removed).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_nothing_pruned_is_the_plain_cache_bit_for_bit(name):
    model, inputs = tiny_model(**MODELS[name]), inputs_of([a_text(20, 0), a_text(13, 1)])
    plain = DynamicCache(config=model.config)
    expected = [logits(model, inputs, plain), logits(model, more(inputs, 8), plain)]
    for how in ({"ratio": 0.0}, {"recent": 20}):
        cache = KeyChannelCache(model, **(HOW | how))
        assert torch.equal(logits(model, inputs, cache), expected[0]) and torch.equal(logits(model, more(inputs, 8), cache), expected[1])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(**inputs, **settings, past_key_values=KeyChannelCache(model, 0)), model.generate(**inputs, **settings))


def test_all_channels_kept_in_two_parts_is_plain_attention():
    queries, keys, values = draw(2, 8, 4, 8).float(), draw(2, 2, 20, 8, seed=1).float(), draw(2, 2, 20, 8, seed=2).float()
    layer = KeyChannelLayer(0.5, "greedy", 5, 4)
    layer.pruned, layer.keys, layer.channels = keys[:, :, :15], keys[:, :, 15:], torch.arange(8, dtype=torch.int16).expand(2, 2, 8)
    mask = torch.ones(4, 20, dtype=torch.bool).tril(16)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(pruned_attention(queries, layer, values, mask, 0.3).transpose(1, 2), expected)


@pytest.mark.parametrize("name", MODELS)
def test_generation_and_a_second_prompt(name):
    """Tokens of a padded batch are those of each sample alone and of the zeroed twin, in a first turn and in a second one."""
    model, texts = tiny_model(**MODELS[name]).double(), [a_text(20, 0), a_text(13, 1)]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}

    def two_turns(inputs: dict, cache) -> torch.Tensor:
        first = model.generate(**inputs, **settings, past_key_values=cache)
        asked = torch.cat((first, torch.tensor([[3, 1, 4, 1, 5]]).expand(len(first), 5)), 1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, asked.shape[1] - inputs["attention_mask"].shape[1]), value=1)
        answer = model.generate(input_ids=asked, attention_mask=mask, **settings, past_key_values=cache)
        assert torch.equal(answer[:, : asked.shape[1]], asked) and cache.get_seq_length() == answer.shape[1] - 1
        return answer[:, inputs["input_ids"].shape[1] :]

    inputs = inputs_of(texts)
    together = two_turns(inputs, KeyChannelCache(model, **HOW))
    for row, text in zip(together, texts, strict=True):
        assert torch.equal(two_turns(inputs_of([text]), KeyChannelCache(model, **HOW))[0], row)

    twin, tokens, token = zeroed_twin(model, inputs, prefilled(model, inputs)), [], together[:, :1]  # the first token comes before pruning
    mask = inputs["attention_mask"]
    for _ in range(5):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        token = logits(model, {"input_ids": token, "attention_mask": mask}, twin)[:, -1:].argmax(-1)
        tokens.append(token)
    assert torch.equal(torch.cat(tokens, 1), together[:, 1:6])


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_freed(name):
    model, inputs = tiny_model(**MODELS[name]), inputs_of([a_text(40, 0), a_text(40, 1)])
    plain, cache = DynamicCache(config=model.config), prefilled(model, inputs)
    logits(model, inputs, plain)
    heads = model.config.num_key_value_heads
    rows = 3 * 2 * heads  # layers, samples
    assert held_bytes(plain) == rows * 40 * (8 + 8) * 4
    assert held_bytes(cache) == rows * (35 * 4 + 5 * 8 + 40 * 8) * 4 + rows * 4 * 2
    logits(model, more(inputs, 3), cache)
    assert held_bytes(cache) == rows * (35 * 4 + 8 * 8 + 43 * 8) * 4 + rows * 4 * 2
    cache.layers[0].keys = plain.layers[0].keys[:, :, -5:]  # a view keeps alive what it shows a part of
    assert held_bytes(cache) > rows * (35 * 4 + 8 * 8 + 43 * 8) * 4 + 2 * heads * 30 * 8 * 4


def test_samples_of_a_cache_can_be_moved():
    """Beam search reorders, repeats and selects samples."""
    model, inputs = tiny_model(**MODELS["gqa"]), inputs_of([a_text(20, 0), a_text(13, 1)])
    second = more(inputs, 4)
    expected = logits(model, second, prefilled(model, inputs))
    for change, order in ((lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]), (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
                          (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1])):
        cache = prefilled(model, inputs)
        change(cache)
        torch.testing.assert_close(logits(model, {name: rows[order] for name, rows in second.items()}, cache), expected[order], rtol=0, atol=1e-5)
    cache.reset()
    torch.testing.assert_close(logits(model, inputs, cache), logits(model, inputs, None))
    beams = model.generate(**inputs, max_new_tokens=5, num_beams=3, do_sample=False, eos_token_id=None, past_key_values=KeyChannelCache(model, **HOW))
    assert beams.shape == (2, 25)


def test_windows_and_padding_on_the_right():
    with pytest.raises(UserError, match="sliding window of 8"):
        KeyChannelCache(tiny_model(model_type="mistral", sliding_window=8), 0.5)
    model = tiny_model(model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1, num_key_value_heads=2)
    inputs = inputs_of([a_text(20, 0), a_text(13, 1)])
    pruned = prefilled(model, inputs)
    assert [isinstance(layer, KeyChannelLayer) for layer in pruned.layers] == [True, False, False]
    twin, second = zeroed_twin(model, inputs, pruned), more(inputs, 6)
    torch.testing.assert_close(logits(model, second, pruned), logits(model, second, twin), rtol=0, atol=2e-4)
    inputs["attention_mask"][0, -2:] = 0
    with pytest.raises(UserError, match="padded on the left"):
        prefilled(model, inputs)


def test_script(inputs, tmp_path):
    gqa, home = save_tiny(tmp_path / "gqa", num_key_value_heads=2), tmp_path / "run"
    arguments = ["--run", home, "--model", inputs["model"], gqa, "--text", inputs["text"], "--sequences", 3, "--batch", 2, "--prompt", 40,
                 "--continuation", 8, "--recent", 6, "--ratios", 0.5, 0.7, "--repeats", 1]
    said = run("related/keychannels/measure.py", *arguments).stdout
    results = json.loads((home / "keychannels.json").read_text())["results"]
    assert list(results) == [inputs["model"], gqa] and (home / "keychannels.png").stat().st_size > 10_000
    for path, heads in ((inputs["model"], 8), (gqa, 2)):
        found = results[path]
        assert found["same_bits_at_0"] and len(found["rows"]) == 8
        for row in found["rows"]:
            assert row["heads"] == 3 * heads * 3 == row["lower_than_think"] + row["same_as_think"] + row["higher_than_think"]
            assert found["cache_bytes"] - row["cache_bytes"] == 3 * heads * (34 * (8 - row["channels"]) * 4 - row["channels"] * 2)
            if row["select"] == "greedy+swap":
                assert row["above_another"] == 0 and row["best_of_all_sets"] > 0.8 * row["heads"] and row["objective"] > 0
        assert (home / "keychannels.md").read_text().count("| greedy+swap |") == 8 and "above any other on 0" in said
    run("related/keychannels/measure.py", *arguments, fails=True)
    done = run("related/keychannels/measure.py", "--run", tmp_path / "long", *arguments[2:], "--prompt", 250, fails=True)
    assert "--prompt and --continuation" in done.stderr
