"""Numbers that README.md repeats from bench/RESULTS.md: each copy is its source, rounded.

A place is (file, cells of a table's header, words of a row, cell of the column).
"""

import itertools
import re

import pytest

from torchrun import ROOT

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"

RESULTS = "bench/RESULTS.md"
DEMO = RESULTS, " | teacher | mean-pool, untrained | aligned, untrained | mean-pool | aligned"
RECORDS = RESULTS, ("conversion | tokens | cost | KL to source | top-1 | perplexity | above the source | "
                    "arc_easy, openbookqa, piqa | commit")
README = "README.md", ("model, kv heads | trained on | cache | KL to the source, nats | top-1 | "
                       "perplexity (source) | cost | commit, command")
MEASURED = {"KL to the source, nats": ("KL to the teacher, text", "KL to source"),
            "top-1": ("top-1 agreement, text, %", "top-1"),
            "perplexity (source)": ("perplexity of code", "perplexity")}
COPIES = [
    *(((*README, row, column), (*DEMO, demo, way)) for column, (demo, _) in MEASURED.items()
      for row, way in (("the paper's method", "aligned"), ("heads not aligned", "mean-pool"))),
    *(((*README, row, column), (*RECORDS, conversion, record)) for column, (_, record) in MEASURED.items()
      for row, conversion in (("closed form", "| untrained | 0 |"),
                              ("0.5 M tokens of WikiText", "2 x 512 | 0.5 M"))),
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
