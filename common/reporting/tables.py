"""Markdown tables, of which this is the one writer, and Markdown of paragraphs and tables as HTML."""

import html
import re
from collections.abc import Iterable, Sequence

from common.run.errors import printable

ESCAPES = str.maketrans({"\\": r"\\", "|": r"\|", "<": "&lt;"})  # without <, no tag or comment can start


def markdown_text(value) -> str:
    """`value` on one line, without what would end a cell, start HTML or make a terminal act."""
    return printable(" ".join(str(value).split())).translate(ESCAPES)


def markdown_table(
    header: Sequence,
    rows: Iterable[Sequence],
    align: str = "",  # one of "<" (left) and ">" (right) per column; the default is left for all
) -> str:
    """A Markdown table with padded columns and no final newline.

    Cells are converted by str(). Raises ValueError if a row has more or fewer cells than the header.
    """
    align = align or "<" * len(header)
    cells = [[markdown_text(value) for value in row] for row in (header, *rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(1, *map(len, column)) for column in columns]

    def line(row: Sequence[str]) -> str:
        padded = [f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)]
        return f"| {' | '.join(padded)} |"

    ends = {"<": "-", ">": ":"}
    rules = ["-" * (width + 1) + ends[side] for side, width in zip(align, widths, strict=True)]
    return "\n".join([line(cells[0]), f"|{'|'.join(rules)}|", *map(line, cells[1:])])


def as_html(markdown: str) -> str:
    """Paragraphs, and tables as by markdown_table, in HTML; strong and emphasized are whole cells alone."""
    parts = []
    for block in markdown.strip().split("\n\n"):
        if not block.startswith("|"):
            parts.append(f"<p>{_inline(block)}</p>")
            continue
        header, rules, *rows = ([cell.strip() for cell in re.findall(r"((?:\\.|[^\\|])*)\|", line[1:])]
                                for line in block.splitlines())
        sides = [' class="number"' * rule.endswith(":") for rule in rules]
        lines = []
        for tag, row in (("th", header), *(("td", row) for row in rows)):
            cells = (f"<{tag}{side}>{_inline(cell)}</{tag}>" for side, cell in zip(sides, row, strict=True))
            lines.append(f"<tr>{''.join(cells)}</tr>\n")
        parts.append(f'<div class="scroll"><table>\n{"".join(lines)}</table></div>')
    return "\n".join(parts)


def _inline(text: str) -> str:
    """The HTML of a cell or paragraph."""
    marks = re.fullmatch(r"(\*{0,2})(.*)\1", text, re.DOTALL)
    plain = re.sub(r"\\([\\|])", r"\1", html.unescape(marks[2]))
    tag = {"": "", "*": "em", "**": "strong"}[marks[1]]
    escaped = html.escape(plain, quote=False)
    return f"<{tag}>{escaped}</{tag}>" if tag else escaped
