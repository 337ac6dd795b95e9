"""The scores of stage 7 in Markdown: each number in its place, and text that cannot break out of its cell."""

import pytest
import yaml

from common.evaluation.compared import Settings
from common.reporting.card import write_benchmarks, write_scores
from common.reporting.scores import caches_table, caption, results_table, scores, summary_line

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
    for number, name in enumerate(("a", "b", "c")):
        rates = [iter((10 * place + 2 * number + 1) / 1000 for place in range(first, 12, 3))
                 for first in range(3)]
        task, micro, macro = ({key: next(values) for key in NAMES} for values in rates)
        results[name] = figures(
            tasks={"boolq": {"questions": 4, "chance": 0.5 + number / 10} | task},
            micro_chance=0.51 + number / 10, macro_chance=0.52 + number / 10,
            perplexity=7.0 + number, perplexity_stderr=0.5 + number / 4, heads=16, kv_heads=8 - 3 * number,
            cache_bytes_per_token=640 - 100 * number, prefill_tokens_per_s=300 + number,
            **({"open_masks": number - 1} if number else {}),
            decode_tokens_per_s=30 + number,
            **{f"micro_{key}": value for key, value in micro.items()},
            **{f"macro_{key}": value for key, value in macro.items()},
            **({"kl": number / 8, "agreement": 0.9 - number / 8, "loss_above": number / 16,
                "loss_above_stderr": number / 32, "chat_kl": number / 4, "chat_kl_stderr": number / 64}
               if number else {}))
    header, _, *rows = cells(results_table(results))
    assert header == ["", "chance", "a", "b", "c"]
    assert rows == [
        ["**answers of chats**", "", "", "", ""],  # first: what a chat model is judged by
        ["KL from the first, nats", "", "-", "0.2500 ± 0.0156", "0.5000 ± 0.0312"],
        ["**exact match, %**", "", "", "", ""],
        ["boolq", "50.0", "0.1 ± 3.1", "0.3 ± 3.3", "0.5 ± 3.5"],
        ["*micro average, as published*", "51.0", "1.1 ± 4.1", "1.3 ± 4.3", "1.5 ± 4.5"],
        ["*macro average*", "52.0", "2.1 ± 5.1", "2.3 ± 5.3", "2.5 ± 5.5"],
        ["**likelihood, %**", "", "", "", ""],
        ["boolq", "50.0", "6.1 ± 9.1", "6.3 ± 9.3", "6.5 ± 9.5"],
        ["*micro average, as published*", "51.0", "7.1 ± 10.1", "7.3 ± 10.3", "7.5 ± 10.5"],
        ["*macro average*", "52.0", "8.1 ± 11.1", "8.3 ± 11.3", "8.5 ± 11.5"],
        ["**text**", "", "", "", ""],
        ["KL from the first, nats", "", "-", "0.1250", "0.2500"],
        ["top-1 agreement", "", "-", "0.7750", "0.6500"],
        ["loss above the first's, nats", "", "-", "0.0625 ± 0.0312", "0.1250 ± 0.0625"],
        ["perplexity", "", "7.000 ± 0.500", "8.000 ± 0.750", "9.000 ± 1.000"],
        ["**cost**", "", "", "", ""],
        ["kv heads", "", "8 of 16", "5 of 16", "2 of 16"],
        ["masks open at removal", "", "-", "0", "1"],
        ["KV bytes per token", "", "640", "540", "440"],
        ["prefill tokens/s", "", "300", "301", "302"],
        ["decode tokens/s", "", "30", "31", "32"]]


def test_the_last_line_has_the_micro_average():
    """The paper's "Avg."; with as many questions of every task it is the macro average, too."""
    results = {"a": figures(micro_exact_match=0.5, macro_exact_match=0.75),
               "b": figures(micro_exact_match_stderr=0.25, cache_bytes_per_token=16.0)}
    assert summary_line(results) == ("a micro average 50.0 ± 12.5 %; b micro average 25.0 ± 25.0 %; "
                                     "KV cache of the last 0.250 of the first's")


def test_scores_without_tasks_have_no_chance_and_each_prompt_has_its_answers():
    results = {name: {"tasks": {}, "heads": 8, "kv_heads": 2, "answers": [f"{name} 1", f"{name} 2"]}
               for name in "ab"}
    first, table, *answers = scores(results, ["What?", "Why?"], "The caption.").split("\n\n")
    assert first == "The caption." and cells(table)[0] == ["", "a", "b"]
    assert [cells(each)[::2] for each in answers] == [
        [["What?", "greedy answer"], ["a", "a 1"]], [["Why?", "greedy answer"], ["a", "a 2"]]]


def test_odd_text_breaks_neither_a_table_nor_the_card(tmp_path):
    """A second evaluation must find the place of the first, with nothing of the first left behind."""
    table = results_table({ODD: figures()})
    assert table.count(SHOWN) == 1 and len(table.splitlines()) == 15
    card = tmp_path / "README.md"
    card.write_text("# Model\n<!-- scores -->\nnone yet\n<!-- /scores -->\nmore")
    for text in (table, "| 2 |"):
        assert write_scores(str(tmp_path), text)
    assert card.read_text() == "# Model\n<!-- scores -->\n| 2 |\n<!-- /scores -->\nmore"


def test_a_card_without_markers_is_left_alone(tmp_path):
    assert not write_scores(str(tmp_path), "| 1 |")  # no card
    (tmp_path / "README.md").write_text("# Model\n<!-- scores -->\nmore")
    assert not write_scores(str(tmp_path), "| 1 |")
    assert (tmp_path / "README.md").read_text() == "# Model\n<!-- scores -->\nmore"


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
    layouts = {layout: {"kl": kl, "perplexity": 3.0, "agreement": 0.5}
               for layout, kl in (("halves", 0.1), ("pairs", 0.2), ("rotated", 0.3))}
    results = {"source": {"caches": {"q4_0": {"bytes_per_token": 72.0} | layouts}}, "gqa": {},
               "other tokens": {"caches": {"f16": {"bytes_per_token": 9.0, "rotated": {"perplexity": 3.0}}}}}
    assert cells(caches_table(results))[2:] == [
        ["source", "q4_0", "72", "0.1000", "0.2000", "0.3000", "3.000", "0.5000"]]
