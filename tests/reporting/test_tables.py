"""Markdown tables, whose text must not break out of its cell; stage 7's table, its caption and last line, and
scores in a model card."""

import pytest

from common.reporting.tables import (
    answers_section,
    caption,
    markdown_table,
    results_table,
    summary_line,
    write_scores,
)


@pytest.mark.parametrize(("align", "lines"), [
    ("", ["|         | loss |", "|---------|------|", "| teacher | 1.25 |", "| gqa     | 10   |"]),
    ("<>", ["|         | loss |", "|---------|-----:|", "| teacher | 1.25 |", "| gqa     |   10 |"]),
])
def test_columns_are_padded_to_one_width(align, lines):
    assert markdown_table(("", "loss"), [("teacher", 1.25), ("gqa", 10)], align).splitlines() == lines


@pytest.mark.parametrize(("text", "cell"), [
    ("a|b", r"a\|b"),
    ("a\\|b", r"a\\\|b"),
    ("a\r\nb\n\tc", "a b c"),
    ("<!-- /scores -->", "&lt;!-- /scores -->"),
])
def test_text_stays_in_its_cell(text, cell):
    table = markdown_table(("name", "x"), [(text, "y")])
    assert table.splitlines()[2] == f"| {cell} | y |"
    assert len(table.splitlines()) == 3


def figures(**changes) -> dict:
    task = {"questions": 4, "chance": 0.5, "exact_match": 0.25, "exact_match_stderr": 0.125,
            "likelihood": 0.75, "likelihood_stderr": 0.0625}
    result = {"tasks": {"boolq": task}, "heads": 8, "kv_heads": 2, "cache_bytes_per_token": 64.0,
              "prefill_tokens_per_s": 1000.4, "decode_tokens_per_s": 10.6,
              "macro_chance": 0.5, "micro_chance": 0.4}
    for average in ("macro", "micro"):
        result |= {f"{average}_exact_match": 0.25, f"{average}_exact_match_stderr": 0.125,
                   f"{average}_likelihood": 0.75, f"{average}_likelihood_stderr": 0.0625}
    return result | changes


def test_the_table_has_a_row_per_figure_and_a_column_per_checkpoint():
    results = {"a": figures(perplexity=7.12345), "b": figures(perplexity=8, kv_heads=4)}
    lines = results_table(results).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["", "chance", "a", "b"] and set(lines[1]) == {"|", "-"}
    assert cells[2:] == [
        ["**exact match, %**", "", "", ""],
        ["boolq", "50.0", "25.0 ± 12.5", "25.0 ± 12.5"],
        ["*micro average, as published*", "40.0", "25.0 ± 12.5", "25.0 ± 12.5"],
        ["*macro average*", "50.0", "25.0 ± 12.5", "25.0 ± 12.5"],
        ["**likelihood, %**", "", "", ""],
        ["boolq", "50.0", "75.0 ± 6.2", "75.0 ± 6.2"],
        ["*micro average, as published*", "40.0", "75.0 ± 6.2", "75.0 ± 6.2"],
        ["*macro average*", "50.0", "75.0 ± 6.2", "75.0 ± 6.2"],
        ["**cost**", "", "", ""],
        ["perplexity", "", "7.123", "8.000"],
        ["kv heads", "", "2 of 8", "4 of 8"],
        ["KV bytes per token", "", "64", "64"],
        ["prefill tokens/s", "", "1000", "1000"],
        ["decode tokens/s", "", "11", "11"],
    ]


def test_every_figure_stands_under_its_checkpoint():
    """All differ: none may be another checkpoint's, metric's or average's."""
    names = ("exact_match", "exact_match_stderr", "likelihood", "likelihood_stderr")
    results = {}
    for number, name in enumerate(("a", "b", "c")):
        rates = [iter((10 * place + 2 * number + 1) / 1000 for place in range(first, 12, 3))
                 for first in range(3)]
        task, micro, macro = ({key: next(values) for key in names} for values in rates)
        results[name] = figures(
            tasks={"boolq": {"questions": 4, "chance": 0.5 + number / 10} | task},
            micro_chance=0.51 + number / 10, macro_chance=0.52 + number / 10,
            perplexity=7.0 + number, heads=16, kv_heads=8 - 3 * number,
            cache_bytes_per_token=640 - 100 * number, prefill_tokens_per_s=300 + number,
            decode_tokens_per_s=30 + number,
            **{f"micro_{key}": value for key, value in micro.items()},
            **{f"macro_{key}": value for key, value in macro.items()},
            **({"kl": number / 8, "agreement": 0.9 - number / 8} if number else {}))
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in results_table(results).splitlines()]
    assert rows[0] == ["", "chance", "a", "b", "c"]
    assert rows[3:6] + rows[7:10] == [
        ["boolq", "50.0", "0.1 ± 3.1", "0.3 ± 3.3", "0.5 ± 3.5"],
        ["*micro average, as published*", "51.0", "1.1 ± 4.1", "1.3 ± 4.3", "1.5 ± 4.5"],
        ["*macro average*", "52.0", "2.1 ± 5.1", "2.3 ± 5.3", "2.5 ± 5.5"],
        ["boolq", "50.0", "6.1 ± 9.1", "6.3 ± 9.3", "6.5 ± 9.5"],
        ["*micro average, as published*", "51.0", "7.1 ± 10.1", "7.3 ± 10.3", "7.5 ± 10.5"],
        ["*macro average*", "52.0", "8.1 ± 11.1", "8.3 ± 11.3", "8.5 ± 11.5"]]
    assert rows[11:] == [
        ["perplexity", "", "7.000", "8.000", "9.000"],
        ["KL from the first, nats", "", "", "0.1250", "0.2500"],
        ["top-1 agreement", "", "", "0.7750", "0.6500"],
        ["kv heads", "", "8 of 16", "5 of 16", "2 of 16"],
        ["KV bytes per token", "", "640", "540", "440"],
        ["prefill tokens/s", "", "300", "301", "302"],
        ["decode tokens/s", "", "30", "31", "32"]]


def test_many_checkpoints_have_a_row_each():
    """The same cells as beside each other, and of chance only what there is."""
    results = {f"gqa{number}": figures(perplexity=7 + number) for number in range(7)}
    tables = [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
              for table in results_table(results).split("\n\n")]
    titles = ["boolq", "*micro average, as published*", "*macro average*"]
    assert [table[0] for table in tables] == [
        ["exact match, %", *titles], ["likelihood, %", *titles],
        ["cost", "perplexity", "kv heads", "KV bytes per token", "prefill tokens/s", "decode tokens/s"],
    ]
    for table, rate in zip(tables, ("25.0 ± 12.5", "75.0 ± 6.2"), strict=False):
        assert table[2] == ["chance", "50.0", "40.0", "50.0"]
        assert table[3:] == [[name, rate, rate, rate] for name in results]
    assert tables[2][2:] == [[f"gqa{number}", f"{7 + number}.000", "2 of 8", "64", "1000", "11"]
                             for number in range(7)]
    del results["gqa6"]
    header = results_table(results).splitlines()[0].split("|")
    assert [cell.strip() for cell in header[2:-1]] == ["chance", *results]


def test_the_last_line_has_the_micro_average():
    """The paper's "Avg."; with as many questions of every task it is the macro average, too."""
    results = {"a": figures(micro_exact_match=0.5, macro_exact_match=0.75), "c": figures(),
               "b": figures(micro_exact_match_stderr=0.25, cache_bytes_per_token=16.0)}
    assert summary_line(results) == ("a micro average 50.0% ± 12.5%; c micro average 25.0% ± 12.5%; "
                                     "b micro average 25.0% ± 25.0%; "
                                     "KV cache of the last 0.250 of the first's")
    results = {name: figures(tasks={}, perplexity=value) for name, value in (("a", 7.25), ("b", 8.5))}
    assert summary_line(results).startswith("a perplexity 7.250; b perplexity 8.500; KV cache ")


HOSTILE = "a|b\n<!-- /scores -->"


def test_names_break_neither_the_table_nor_the_card(tmp_path):
    """A second evaluation must find the place of the first, with nothing of the first left behind."""
    reference = figures(perplexity=7.0, perplexity_text=HOSTILE)
    note = caption(reference, HOSTILE, None, None, "cpu, float32", bos=False)
    table = results_table({HOSTILE: reference})
    assert "\n" not in note and {line.count(" | ") for line in table.splitlines()[2:]} == {2}
    assert len(table.splitlines()) == 16
    card = tmp_path / "README.md"
    card.write_text("# Model\n<!-- scores -->\nnone yet\n<!-- /scores -->\nmore")
    for scores in (f"{table}\n\n{note}", "| 2 |"):
        assert write_scores(str(tmp_path), scores)
    assert card.read_text() == "# Model\n<!-- scores -->\n| 2 |\n<!-- /scores -->\nmore"


def test_a_caption_names_files_without_their_directories(tmp_path):
    """And keeps the names of what is no file."""
    (tmp_path / "held out.npy").touch()
    (tmp_path / "tasks").mkdir()
    for text, shown in ((f"{tmp_path}/held out.npy: 3 rows", "of held out.npy: 3 rows."),
                        ("c4 (a/b): 3 rows", "of c4 (a/b): 3 rows.")):
        note = caption(figures(perplexity=7.0, perplexity_text=text), f"{tmp_path}/tasks/", None, None, "cpu",
                       bos=False)
        assert f"Perplexity {shown}" in note and " validation questions (tasks), averaged" in note


def test_a_card_without_markers_is_left_alone(tmp_path):
    card = tmp_path / "README.md"
    assert not write_scores(str(tmp_path), "| 1 |")  # no card
    for markers in ("", "<!-- scores -->", "<!-- /scores -->\n<!-- scores -->"):
        card.write_text(text := f"# Model\n{markers}\nmore")
        assert not write_scores(str(tmp_path), "| 1 |") and card.read_text() == text


def test_text_does_not_reach_a_terminal_raw():
    odd = "Red\x1b[2J\nand \x9b blue"
    section = answers_section([odd], {odd: {"answers": [odd]}})
    notes = [caption(figures(perplexity=7.0, perplexity_text=odd) | changes, odd, None, None, "cpu", bos=True)
             for changes in ({}, {"tasks": {}})]
    for text in (section, *notes):
        assert r"Red\\x1b[2J and \\x9b blue" in text and text.replace("\n", "").isprintable()


def test_a_caption_says_how_the_questions_were_chosen():
    task = figures()["tasks"]["boolq"]
    reference = figures(tasks={"boolq": task, "piqa": task | {"questions": 6}})
    for limit, seed, shown in ((None, None, ""), (3, None, ", the first 3 per task"),
                               (3, 7, ", 3 per task drawn with seed 7")):
        note = caption(reference, "demo", limit, seed, "cpu, float32", bos=True)
        assert f": 10 validation questions (demo{shown}), " in note
        assert "with a begin-of-sequence token. Speeds: one sequence on cpu, float32." in note
    alone = figures(tasks={})
    assert caption(alone, "demo", None, None, "cpu", bos=False) == (
        "Speeds: one sequence on cpu, no begin-of-sequence token.")
    del alone["decode_tokens_per_s"]
    assert caption(alone, "demo", None, None, "cpu", bos=False).startswith("Layer by layer on cpu")


def test_a_caption_is_one_line_of_markdown():
    odd = "<b>\n| a\\b"
    for changes in ({}, {"tasks": {}}):
        reference = figures(perplexity=7.0, perplexity_text=odd) | changes
        note = caption(reference, odd, None, None, "cpu", bos=True)
        assert note.count(r"&lt;b> \| a\\b") == 1 + ("tasks" not in changes) and "<" not in note
