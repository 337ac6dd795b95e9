"""Rows of JSON Lines files, plain or gzipped, and of parquet files; and samples, what training makes of them.

Errors name the file and line.
"""

import codecs
import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.models.weights import first_line
from common.run.errors import UserError

LINES_OF_JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
TABLES = (*LINES_OF_JSON, ".parquet")
TABLE_NAMES = ".jsonl, .json, .json.gz or .parquet"  # in help and errors
KINDS = {str: "text", list: "a list", dict: "an object"}  # of values, in errors
ROWS = 256  # of a parquet file in memory at a time


def read_rows(path: str) -> Iterator[tuple[str, dict]]:
    """Yield (place, row) for every row: ("line 1", ...) from JSON Lines, ("row 0", ...) from parquet.

    Raises UserError for what cannot be read as its name says.
    """
    return read_objects(path) if path.endswith(LINES_OF_JSON) else numbered(_parquet(path))


def numbered(rows: Iterable[dict]) -> Iterator[tuple[str, dict]]:
    """Yield (place, row) for rows that are in no lines: ("row 0", ...)."""
    return ((f"row {index}", row) for index, row in enumerate(rows))


def parse_rows(source: str, rows: Iterable[tuple], parse: Callable) -> Iterator[tuple]:
    """Yield (place, parse(row)) for every (place, row). Raises UserError with the source and the place where
    parse raises ValueError.
    """
    for place, row in rows:
        try:
            parsed = parse(row)
        except ValueError as error:
            raise UserError(f"{source} {place}: {error}") from error
        yield place, parsed


def _parquet(path: str) -> Iterator[dict]:
    import pyarrow.parquet  # slow to import

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(ROWS):
            yield from batch.to_pylist()
    except Exception as error:  # the exception class depends on the fault
        raise UserError(f"{path}: cannot be read as parquet: {first_line(error)}") from error


def read_objects(path: str) -> Iterator[tuple[str, dict]]:
    """Yield ("line NUMBER", object) for every line that is not blank. A name ending in .gz is decompressed.

    A byte-order mark is skipped. Uses Python's parser instead of Arrow's, which crashes the process on a line
    that is null. Raises UserError for damaged gzip data and for a line that is not UTF-8, not JSON or not an
    object.
    """
    number = 0
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield f"line {number}", parse_object(line, f"{path} line {number}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        message = f"{path} after line {number}: expected gzip data, found a damaged file: {error}"
        raise UserError(message) from error


def parse_object(line: bytes, place: str) -> dict:
    """A JSON object. Raises UserError naming `place` for anything but an object in UTF-8 JSON."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict):
        raise UserError(f"{place}: expected a JSON object, found {abbreviated(value)}")
    return value


def abbreviated(value) -> str:
    """A value as JSON for an error message, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def column(row: dict, name: str, kind: type = str):
    """The value of a column. Raises ValueError naming it if it is missing, null or not of this kind."""
    value = row.get(name)
    if value is None:
        present = sorted(other for other, content in row.items() if content is not None)
        fault = "null" if name in row else "missing"
        raise ValueError(f"column {name!r} is {fault}; found columns {present}")
    return checked(value, name, kind)


def checked(value, name: str, kind: type = str):
    """`value`, from column `name`. Raises ValueError unless it is of this kind; text without lone surrogates,
    which JSON may escape and no tokenizer takes.
    """
    if not isinstance(value, kind):
        raise ValueError(f"column {name!r}: expected {KINDS[kind]}, found {abbreviated(value)}")
    if kind is str:
        value.encode("utf-8")
    return value


def nested(value, name: str) -> dict:
    """The columns of an object inside a row, from column `name`, as NAME.COLUMN. Raises ValueError."""
    return {f"{name}.{inner}": content for inner, content in checked(value, name, dict).items()}


@dataclass(frozen=True, init=False)
class Sample:
    """A tokenized sample: segments of token ids, prompt and answer in turn.

    A text is a prompt alone, a question a prompt and its answer, a chat several of both.
    """

    segments: tuple[Sequence[int], ...]

    def __init__(self, *segments: Sequence[int]):
        object.__setattr__(self, "segments", segments)

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def prompt(self) -> Sequence[int]:
        """A question's prompt."""
        return self.segments[0]

    @property
    def answer(self) -> Sequence[int]:
        """A question's answer, which ends with end-of-sequence."""
        return self.segments[1]

    @property
    def answer_tokens(self) -> int:
        """The number of tokens in all answers."""
        return sum(map(len, self.segments[1::2]))


def decoded(tokens: np.ndarray) -> np.ndarray:
    """Stored tokens as token ids, int64: those of answers are stored as ~token."""
    return np.maximum(tokens, ~tokens).astype(np.int64)


def as_samples(chats: np.ndarray) -> list[Sample]:
    """Rows of generated chats as samples; those that end before an answer begins are left out."""
    samples = []
    for row in chats:
        borders = np.flatnonzero(np.diff(row < 0)) + 1
        samples.append(Sample(*(array("i", decoded(part).tolist()) for part in np.split(row, borders))))
    return [sample for sample in samples if sample.answer_tokens]
