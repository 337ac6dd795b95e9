"""Markdown tables: the one writer for all of this repository's."""

from collections.abc import Iterable, Sequence

ESCAPES = str.maketrans({"\\": r"\\", "|": r"\|", "<": "&lt;"})  # without <, no tag or comment can start


def markdown_text(value) -> str:
    """The text of `value` on one line, with characters escaped that would end a cell or start HTML."""
    return " ".join(str(value).translate(ESCAPES).split())


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
