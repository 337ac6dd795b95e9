"""The scores of stage 7 in Markdown: each number in its place, and text that cannot break out of its cell."""

import pytest
import yaml

from common.evaluation.compared import Settings
from common.reporting.card import write_benchmarks, write_scores
from common.reporting.scores import caches_table, caption, results_table

NAMES = ("exact_match", "exact_match_stderr", "likelihood", "likelihood_stderr")
# ends a cell, a line or a comment, starts a tag or makes a terminal act
ODD, SHOWN = "<!-- /scores -->\n| a\\b\x1b[2J \x9b", r"&lt;!-- /scores --> \| a\\b\\x1b[2J \\x9b"


def figures(**changes) -> dict:
    rates = dict(zip(NAMES, (0.25, 0.125, 0.75, 0.0625), strict=True))
    averages = {f"{average}_{name}": value for average in ("macro", "micro") for name, value in rates.items()}
    return {"tasks": {"boolq": {"questions": 4, "chance": 0.5} | rates}, "heads": 8, "kv_heads": 2,
            "cache_bytes_per_token": 64.0, "prefill_tokens_per_s": 1000.4, "decode_tokens_per_s": 10.6,
            "macro_chance": 0.5, "micro_chance": 0.4} | averages | changes


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_every_figure_stands_under_its_checkpoint():
    """All differ: none may be another checkpoint's, metric's or average's."""
    results = {}
    for name, first in (("a", 1), ("b", 13)):
        rates = [place / 1000 for place in range(first, first + 12)]
        task, micro, macro = (dict(zip(NAMES, rates[place : place + 4], strict=True)) for place in (0, 4, 8))
        results[name] = {"tasks": {"boolq": {"questions": 4, "chance": 0.5} | task}, "heads": 16,
                         "micro_chance": 0.51, "macro_chance": 0.52}
        results[name] |= {f"micro_{key}": value for key, value in micro.items()}
        results[name] |= {f"macro_{key}": value for key, value in macro.items()}
    results["a"] |= {"perplexity": 7.0, "perplexity_stderr": 0.5, "kv_heads": 8, "cache_bytes_per_token": 640,
                     "prefill_tokens_per_s": 300, "decode_tokens_per_s": 30}
    results["b"] |= {"perplexity": 8.0, "perplexity_stderr": 0.75, "kv_heads": 5,
                     "cache_bytes_per_token": 540, "prefill_tokens_per_s": 301, "decode_tokens_per_s": 31,
                     "open_masks": 0, "kl": 0.125, "agreement": 0.775, "loss_above": 0.0625,
                     "loss_above_stderr": 0.03125, "chat_kl": 0.25, "chat_kl_stderr": 0.015625}
    header, _, *rows = cells(results_table(results))
    assert header == ["", "chance", "a", "b"]
    assert rows == [
        ["**answers of chats**", "", "", ""],  # first: what a chat model is judged by
        ["KL from the first, nats", "", "-", "0.2500 ± 0.0156"],
        ["**exact match, %**", "", "", ""],
        ["boolq", "50.0", "0.1 ± 0.2", "1.3 ± 1.4"],
        ["*micro average, as published*", "51.0", "0.5 ± 0.6", "1.7 ± 1.8"],
        ["*macro average*", "52.0", "0.9 ± 1.0", "2.1 ± 2.2"],
        ["**likelihood, %**", "", "", ""],
        ["boolq", "50.0", "0.3 ± 0.4", "1.5 ± 1.6"],
        ["*micro average, as published*", "51.0", "0.7 ± 0.8", "1.9 ± 2.0"],
        ["*macro average*", "52.0", "1.1 ± 1.2", "2.3 ± 2.4"],
        ["**text**", "", "", ""],
        ["KL from the first, nats", "", "-", "0.1250"],
        ["top-1 agreement", "", "-", "0.7750"],
        ["loss above the first's, nats", "", "-", "0.0625 ± 0.0312"],
        ["perplexity", "", "7.000 ± 0.500", "8.000 ± 0.750"],
        ["**cost**", "", "", ""],
        ["kv heads", "", "8 of 16", "5 of 16"],
        ["masks open at removal", "", "-", "0"],
        ["KV bytes per token", "", "640", "540"],
        ["prefill tokens/s", "", "300", "301"],
        ["decode tokens/s", "", "30", "31"]]


def test_odd_text_breaks_neither_a_table_nor_the_card(tmp_path):
    """A second evaluation must find the place of the first, with nothing of the first left behind."""
    table = results_table({ODD: figures()})
    assert table.count(SHOWN) == 1 and len(table.splitlines()) == 15
    card = tmp_path / "README.md"
    assert not write_scores(str(tmp_path), table)  # no card; no place in it
    card.write_text("# Model\n<!-- scores -->\nmore")
    assert not write_scores(str(tmp_path), table) and card.read_text() == "# Model\n<!-- scores -->\nmore"
    card.write_text("# Model\n<!-- scores -->\nnone yet\n<!-- /scores -->\nmore")
    for text in (table, "| 2 |"):
        assert write_scores(str(tmp_path), text)
    assert card.read_text() == "# Model\n<!-- scores -->\n| 2 |\n<!-- /scores -->\nmore"


def test_exact_match_on_the_hubs_tasks_is_in_the_hubs_format(tmp_path):
    tasks = {"boolq": {"questions": 3270, "exact_match": 0.75},
             "arc_easy": {"questions": 9, "exact_match": 1 / 3}}
    write_benchmarks(str(tmp_path), tasks, "2026-01-02")
    entries = yaml.safe_load((tmp_path / ".eval_results/tasks.yaml").read_text())
    assert [(each["dataset"], each["value"]) for each in entries] == [
        ({"id": "google/boolq", "task_id": "default"}, 75.0),
        ({"id": "allenai/ai2_arc", "task_id": "ARC-Easy"}, 33.33)]
    assert entries[0]["date"] == "2026-01-02"


@pytest.mark.parametrize(("tokens", "few"), [(4095, True), (4096, False)])
def test_a_caption_warns_of_few_tokens(tokens, few):
    measured = figures(perplexity=7.0, perplexity_text="c4", perplexity_tokens=tokens)
    note = caption(measured, Settings("demo", limit=3, seed=1), bos=False)
    warning = ", too few to tell close models apart" * few
    assert f"Text: {tokens} tokens{warning}, ± standard error over sequences; c4." in note
    assert "4 validation questions (demo, 3 per task drawn with seed 1), " in note


def test_caches_have_rows():
    layouts = {layout: {"kl": kl, "perplexity": 10 * kl, "agreement": 1 - kl}
               for layout, kl in (("halves", 0.1), ("pairs", 0.2), ("rotated", 0.3))}
    results = {"source": {"caches": {"q4_0": {"bytes_per_token": 72.0} | layouts}}, "gqa": {},
               "other tokens": {"caches": {"f16": {"bytes_per_token": 9.0, "rotated": {"perplexity": 3.0}}}}}
    assert cells(caches_table(results))[2:] == [
        ["source", "q4_0", "72", "0.1000", "0.2000", "0.3000", "3.000", "0.7000"]]
