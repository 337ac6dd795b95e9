"""Sources of text and chats, a class a kind: `parse_source` makes one of what a flag names.

Calibration, refit and training read a source's part TRAIN, so that they cannot see HELDOUT: other files of c4
and demo; of generated text what another seed gives; of all else the documents, chats, blocks of a .txt file
or rows of a .npy file whose sha256 is below a tenth of its range, which puts copies on the same side.
EVALUATION is what a user names to evaluate on: the entire file; of c4, demo and the hub's data sets HELDOUT.

A .txt file is one document, read in blocks that end where the content of a line says so: what is repeated
elsewhere, or in another file, is cut into the same blocks. So memory is constant, too.
"""

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from common.data.data_sets import COMMITS, DATA_SET, commit_of, rows_of, stream
from common.data.demo import DEMO, demo_home
from common.data.rows import TABLE_NAMES, TABLES, column, numbered, parse_rows, read_rows
from common.run.artifact import load_record, remember_inputs
from common.run.errors import UserError
from common.run.files import open_text, stamp

TRAIN, HELDOUT, EVALUATION = "train", "heldout", "evaluation"
PARTS = {TRAIN: " in its training part", HELDOUT: " in its held-out part", EVALUATION: ""}  # in errors
C4 = "allenai/c4"
C4_FILES = {  # file name, number of files
    TRAIN: ("en/c4-train.{:05d}-of-01024.json.gz", 1024),
    HELDOUT: ("en/c4-validation.{:05d}-of-00008.json.gz", 8),
}
NONE = "none"  # --tasks, --text, --heldout-text: no such data
GENERATED = "generated"  # --text, --chat: by the source model (common/data/generate.py)
EXPECTED = f"c4, demo, {DATA_SET}, or a .txt, {TABLE_NAMES} file"
BLOCK, LONGEST_BLOCK = 2**11, 2**16  # characters of a .txt file's blocks: on average, and of a line at most


@dataclass(frozen=True)
class Source:
    """A kind of source. name: as it was given."""

    name: str
    known = False  # by its name; EVALUATION is its held-out part
    endless = False  # it has, or may have, more than anyone takes of it
    one_document = False

    def check(self) -> None:
        """Raise UserError unless it is known by its name, or a file of a known format."""
        if not self.known and not os.path.exists(self.name):
            raise UserError(f"text {self.name}: not found; expected {EXPECTED}")
        if not self.known and not self.name.endswith((".txt", *TABLES)):
            raise UserError(f"text {self.name}: expected {EXPECTED}")

    def version(self) -> str | None:
        """What another content would change: a file's sha256, a data set's commit; None of others."""
        return stamp(self.name)["sha256"] if os.path.isfile(self.name) else None

    def origin(self, part: str) -> str:
        """Where a part is read, in descriptions and errors."""
        return self.name

    def part(self, part: str) -> str:
        """The part that is read where `part` is asked for."""
        return HELDOUT if part == EVALUATION and self.known else part

    def texts(self, part: str) -> Iterator[str]:
        """Yield the documents of a part; of a .txt file its lines. Raises UserError if it cannot be read."""
        self.check()
        for content in self.contents(part):
            yield from content.removesuffix("\n").split("\n") if self.one_document else [content]

    def contents(self, part: str) -> Iterator[str]:
        """Yield what is in a part or not: documents, and blocks of a .txt file."""
        raise NotImplementedError

    def documents(self, part: str, without=frozenset()) -> Iterator[Iterable[str]]:
        """Yield the documents of a part, as their lines or blocks. without: digests of what is left out."""
        self.check()
        kept = (content for content in self.contents(part)
                if not without or digest_of(content) not in without)
        if self.one_document:
            yield kept
        else:
            yield from (document.splitlines(keepends=True) for document in kept)


class TableFile(Source):
    """Rows with a column "text" or "messages"; and any name that is of no other kind."""

    def rows(self) -> Iterator[tuple[str, dict]]:
        """Yield (place, row), as read_rows."""
        return read_rows(self.name)

    def contents(self, part: str) -> Iterator[str]:
        documents = parse_rows(self.name, self.rows(), partial(column, name="text"))
        return (document for _, document in documents if in_part(document, self.part(part)))


class DataSet(TableFile):
    """A data set of the hub, hf:NAME[:CONFIG[:SPLIT]], streamed."""

    known = endless = True

    def version(self) -> str:
        return commit_of(self.name)

    def rows(self) -> Iterator[tuple[str, dict]]:
        return numbered(stream(self.name))


class C4Text(Source):
    """Documents of C4, whose files are its parts."""

    known = endless = True

    def contents(self, part: str) -> Iterator[str]:
        name, files = C4_FILES[self.part(part)]
        for number in range(files):
            for row in rows_of(C4, data_files=name.format(number), split="train", streaming=True):
                yield row["text"]


class TextFile(Source):
    """A .txt file."""

    one_document = True

    def contents(self, part: str) -> Iterator[str]:
        return (block for block in blocks(self.origin(part)) if self.known or in_part(block, part))


class DemoText(TextFile):
    """The demo model's own text, which has a file for either part."""

    known = True

    def origin(self, part: str) -> str:
        return os.path.join(demo_home(), "text", f"{self.part(part)}.txt")


class TokenFile(Source):
    """Rows of tokens in a .npy file, which common/data/text.py reads."""


class Generated(Source):
    """The source model is to write it: generated, or generated:SOURCE, whose documents it continues."""

    endless = True


def parse_source(name: str) -> Source:
    """The source that a flag or a record names. It need not be there yet: reading it says so."""
    if name.partition(":")[0] == GENERATED:
        return Generated(name)
    if name.startswith("hf:"):
        return DataSet(name)
    named = {"c4": C4Text, DEMO: DemoText}
    return named.get(name, {".txt": TextFile, ".npy": TokenFile}.get(name[-4:], TableFile))(name)


def source_read(name: str) -> Source:
    """As parse_source; of generated:SOURCE the source that it continues."""
    return parse_source(name.removeprefix(f"{GENERATED}:"))


def is_generated(source: str) -> bool:
    """Whether the source model is to write it."""
    return isinstance(parse_source(source), Generated)


def digest_of(content: str | bytes) -> bytes:
    """By which contents are compared."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).digest()


def in_part(content: str | bytes, part: str) -> bool:
    """Whether a document, chat, block or row with this content is in a part of its source."""
    held_out = int.from_bytes(digest_of(content)) < 2**256 // 10
    return part == EVALUATION or held_out == (part == HELDOUT)


def blocks(path: str) -> Iterator[str]:
    """Yield the successive blocks of a .txt file: lines, up to one whose checksum is below a share of its
    range, which is the line's share of BLOCK characters; up to LONGEST_BLOCK characters, and at most twice.

    A longer line is cut there. Raises UserError where the file is not UTF-8.
    """
    block = ""
    with open_text(path) as file:
        while line := file.readline(LONGEST_BLOCK):
            block += line
            if zlib.crc32(line.encode()) * BLOCK < 2**32 * len(line) or len(block) >= LONGEST_BLOCK:
                yield block
                block = ""
    if block:
        yield block


def digests_of(sources, run: str, output: str = "") -> dict[str, str]:
    """Source as given -> its version, for those that have one; sources that are not given are None.

    output: an artifact that may be complete; a data set of the hub is read at the commit that it was made of.
    """
    remember_inputs(run)
    record = output and load_record(output)
    COMMITS.update((record or {}).get("inputs", {}) | COMMITS)  # of what is no data set, nobody asks for one
    kinds = [source_read(source) for source in sources if source]
    return {kind.name: version for kind in kinds if (version := kind.version())}
