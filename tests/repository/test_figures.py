"""Numbers that README.md repeats from bench/RESULTS.md: each copy is its source, rounded."""

import re

import pytest

from torchrun import ROOT

COLUMNS = {  # of README.md -> of the demo's table and of that of recorded conversions
    "KL to the source, nats": ("KL to the teacher, text", "KL to source"),
    "top-1": ("top-1 agreement, text, %", "top-1"),
    "perplexity (source)": ("perplexity of code", "perplexity"),
}
DEMO = {"the paper's method": "aligned", "heads not aligned": "mean-pool"}  # rows of README.md -> columns
RECORDS = {"closed form": "| untrained | 0 |", "0.5 M tokens of WikiText": "2 x 512 | 0.5 M"}  # -> rows


def look_up(page: str, row: str, column: str) -> list[str]:
    """The numbers of a cell, as written: a mean and, after ±, its error.

    Fails unless exactly one table has such a column and, in one row, these words.
    """
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    lines = [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
             for table in tables]
    ((cells, header),) = [(cells, header) for header, *rows in lines if column in header
                          for cells in rows if row in f"| {' | '.join(cells)} |"]
    cell = cells[header.index(column)].replace(",", "")  # "1,620" is one number
    return re.findall(r"[-+]?\d+(?:\.\d+)?", cell)[: 2 if "±" in cell else 1]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", [*DEMO, *RECORDS])
def test_a_copy_is_its_source_rounded(row, column):
    demo, record = COLUMNS[column]
    source = (demo, DEMO[row]) if row in DEMO else (RECORDS[row], record)
    copy, measured = look_up("README.md", row, column), look_up("bench/RESULTS.md", *source)
    for number, exact in zip(copy, measured[: len(copy)], strict=True):
        half = 0.5 * 10.0 ** -len(number.partition(".")[2])
        assert abs(float(number) - float(exact)) <= half + 1e-9
