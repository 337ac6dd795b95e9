"""Numbers that README.md repeats from bench/RESULTS.md: each copy is its source, rounded.

A place is (file, cells of a table's header, words of a row, cell of the column).
"""

import itertools
import re

import pytest

from torchrun import ROOT

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"

TASKS = "bench/RESULTS.md", "trained on | tokens | exact match, 8 tasks | perplexity of code"
DEMO = "README.md", " | teacher | mean-pool, untrained | aligned, untrained | mean-pool | aligned"
TASK_ROWS = {"mean-pool, untrained": "mean-pool, untrained", "aligned, untrained": "aligned, untrained",
             "mean-pool": "mean-pool, tasks and text", "aligned": "aligned, tasks and text"}
COPIES = [
    ((*DEMO, metric, column), (*TASKS, row, metric)) for column, row in TASK_ROWS.items()
    for metric in ("exact match, 8 tasks", "perplexity of code")
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def spaced(line: str) -> str:
    """A line of a table as "| cell | cell |", whatever its padding."""
    return f"| {' | '.join(cells(line))} |"


def look_up(place: tuple[str, ...]) -> str:
    """The text of a cell. Fails unless the place names exactly one."""
    name, header, row, column = place
    text = (ROOT / name).read_text()
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
