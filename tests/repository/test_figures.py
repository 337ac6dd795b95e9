"""Figures that stand in several documents: each copy is its source, rounded.

bench/RESULTS.md is the source of what benches measure; docs/smollm2.md is that of `make smollm2`'s table.
A place is (file, cells of a table's header, words of a row, cell of the column), or (file, a sentence around
the figure, which stands for itself as {}).
"""

import itertools
import re

import pytest

from helpers import ROOT

RESULTS, CLOSED, REAL = "bench/RESULTS.md", "docs/closed_form.md", "docs/smollm2.md"
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"

MERGED = RESULTS, "merged by, kv heads | text, 4 | text, 2 | text, 1 | demo, 4 | demo, 2 | demo, 1"
TEXT = RESULTS, "text, 2 kv heads, after steps | 15 | 40 | 150 | 600"
RECORDS = RESULTS, ("conversion | tokens | cost | KL to source | top-1 | perplexity | above the source | "
                    "arc_easy, openbookqa, piqa | commit")
RECOVERY = RESULTS, "merged by | batch | learning rate | tokens | perplexity | above the source | KL | top-1"
TASKS = RESULTS, "trained on | tokens | exact match, 8 tasks | perplexity of code"
DISTILLED = CLOSED, " | merged | 15 steps | 40 steps | 150 steps"
DEMO = "README.md", " | teacher | mean-pool, untrained | aligned, untrained | mean-pool | aligned"
SMOLLM2 = REAL, ("3 -> 1 kv heads | KV bytes per token | perplexity (loss), default context | "
                   "perplexity, `--key-context 512`")
TRAINED = REAL, "3 -> 1 kv heads | merged | after 0.1 M tokens | above the source | top-1"
DEFAULT, SHORT = "perplexity (loss), default context", "perplexity, `--key-context 512`"

STARTS = {  # name in docs/closed_form.md -> in the text model's tables
    "the paper's rotations and means": "paper",
    "`--merge-keys pairs --refit output`": "closed form (pairs) + output",
    "| closed form |": "closed form",
    "closed form, `--refit output`": "closed form + output",
    "`--refit attention`": "closed form + attention",
}
STEPS = {"15 steps": "15", "40 steps": "40", "150 steps": "150"}
PAPER, OUTPUT, ATTENTION = CONVERTED = (
    "the paper: rotations and mean", "closed form + output refit", "closed form + attention refit")
AFTER = {"after 0.1 M tokens": "perplexity", "above the source": "above the source", "top-1": "top-1"}
TASK_ROWS = {"mean-pool, untrained": "mean-pool, untrained", "aligned, untrained": "aligned, untrained",
             "mean-pool": "mean-pool, tasks and text", "aligned": "aligned, tasks and text"}
COPIES = [
    *(((*DISTILLED, name, "merged"), (*MERGED, f"| {row} |", "text, 2")) for name, row in STARTS.items()),
    *(((*DISTILLED, name, column), (*TEXT, f"| {row}, no masks |", steps))
      for name, row in STARTS.items() for column, steps in STEPS.items()),
    ((CLOSED, "English text merged from 8 heads to 2 (source: {})"),
     (RESULTS, "nats per token; source **{}**")),
    *(((*TRAINED, name, "merged"), (*RECOVERY, f"| {name} |  |", "perplexity")) for name in (PAPER, OUTPUT)),
    ((*TRAINED, ATTENTION, "merged"), (*RECORDS, "untrained, an earlier refit", "perplexity")),
    *(((*TRAINED, name, column), (*RECOVERY, f"| {name} | 8 | 2e-4 | 0.1 M |", measured))
      for name in CONVERTED for column, measured in AFTER.items()),
    *(((*DEMO, figure, column), (*TASKS, row, measured)) for column, row in TASK_ROWS.items()
      for figure, measured in (("exact match", "exact match, 8 tasks"),
                               ("perplexity of code", "perplexity of code"))),
    ((*SMOLLM2, "| closed form |", SHORT), (CLOSED, "has perplexity {}, after the output refit")),
    ((*SMOLLM2, "output refit", SHORT), (CLOSED, "after the output refit {}, and after")),
    ((*SMOLLM2, "attention refit", SHORT), (CLOSED, "and after the attention refit {}.")),
    ((*SMOLLM2, "| closed form |", SHORT), (RESULTS, "without a refit ({})")),
    ((*SMOLLM2, "the paper", DEFAULT), (*RECOVERY, f"| {PAPER} |  |", "perplexity")),
    *(((REAL, copy), source) for copy, source in (
        ("in steps of 2 x 512 the paper's merge has perplexity {} (",
         (*RECOVERY, f"| {PAPER} | 2 | 2e-4 | 0.5 M |", "perplexity")),
        ("has perplexity 34.9 ({} % agree)", (*RECOVERY, f"| {PAPER} | 2 | 2e-4 | 0.5 M |", "top-1")),
        ("the attention refit {} (77.5 %)", (*RECORDS, "2 x 512 | 0.5 M |", "perplexity")),
        ("the attention refit 29.6 ({} %)", (*RECORDS, "2 x 512 | 0.5 M |", "top-1")))),
    (("docs/questions.md", "{}, the paper's merge"), (*SMOLLM2, "mean-pool", DEFAULT)),
    (("docs/questions.md", "the paper's merge {},"), (*SMOLLM2, "the paper", DEFAULT)),
    (("docs/questions.md", "with an attention refit {} and"), (*SMOLLM2, "attention refit", DEFAULT)),
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def spaced(line: str) -> str:
    """A line of a table as "| cell | cell |", whatever its padding."""
    return f"| {' | '.join(cells(line))} |"


def look_up(place: tuple[str, ...]) -> str:
    """The text of a cell, or the figure in a sentence. Fails unless the place names exactly one."""
    text = (ROOT / place[0]).read_text()
    if len(place) == 2:
        before, after = map(re.escape, place[1].split("{}"))
        matches = re.findall(f"{before}({NUMBER}){after}", re.sub(r"\s+", " ", text))
        assert len(matches) == 1, f"{place}: {matches}"
        return matches[0]
    _, header, row, column = place
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines) if cells(line) == cells(f"|{header}|")]
    assert begins, f"{place}: no such table"
    body = itertools.takewhile(lambda line: line.startswith("|"), lines[begins[0] + 2 :])
    rows = [cells(line) for line in body if row in spaced(line)]
    assert len(rows) == 1, f"{place}: {rows}"
    return rows[0][cells(f"|{header}|").index(column)]


def figures(text: str) -> list[str]:
    """The numbers of a cell: a mean and perhaps its error. "1,620" is one number."""
    return [number.replace(",", "") for number in re.findall(NUMBER, text)]


@pytest.mark.parametrize("copy, source", COPIES, ids=lambda place: " ".join(place[-2:]))
def test_a_copy_is_its_source_rounded(copy, source):
    shown, measured = figures(look_up(copy)), figures(look_up(source))
    compared = 2 if "±" in look_up(copy) else 1
    assert len(shown) >= compared <= len(measured)
    for number, exact in zip(shown[:compared], measured[:compared], strict=True):
        half = 0.5 * 10.0 ** -len(number.partition(".")[2])
        assert abs(float(number) - float(exact)) <= half + 1e-9, f"{copy} {number}: {source} {exact}"
