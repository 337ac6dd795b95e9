"""Text as tokens: a matrix for calibration and perplexity, a memory-mapped file for training.

Every source has two parts, told apart where it is read. Calibration, refit and training read TRAIN, so that
they cannot see HELDOUT: other files of c4 and demo; of generated text what another seed gives; of a .txt file
the last tenth, from a line's beginning on; of other files and of data sets of the hub the documents, or
chats, whose sha256 is below a tenth of its range, which puts copies on the same side; of a .npy file the last
tenth of the rows. EVALUATION is for what a user names to evaluate on: the entire file; of all else HELDOUT.

A text of any length is tokenized in constant memory: in overlapping pieces, joined at a place in the overlap
around which both have the same tokens.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.lib.format import write_array_header_1_0

from common.data.data_sets import COMMITS, DATA_SET, commit_of, is_data_set, rows_of
from common.data.demo import DEMO, demo_home
from common.data.rows import TABLE_NAMES, TABLES, Sample, read_rows, text_column
from common.models.load import bos_prefix
from common.models.weights import first_line
from common.run.artifact import RECORD, remember_inputs
from common.run.errors import UserError
from common.run.files import open_text, read_json, stamp, write_file
from common.run.progress import Progress

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
TOKEN = np.dtype("<i4")
TOKENS = "tokens.npy"  # in a directory of RUN/tokens/
BATCH = 2**20  # characters tokenized at a time: some 100 MB in the tokenizer
PIECE = 2**18  # characters tokenized at a time: some 50 MB
OVERLAP = 2**14  # characters that neighbouring pieces share
AROUND = 32  # tokens on either side of a seam that both pieces have
SEARCHED = 64  # tokens of documents that are searched for long ones, for each token that is needed
LINE = 2**16  # bytes of a .txt file in which a line's beginning is looked for, to cut it there


class TooShort(UserError):
    """A part of a source has less text than is needed."""


def sequence_length(requested: int | None, default: int, positions: int, least: int = 1,
                    flag: str = "--length") -> int:
    """Tokens per sequence of text: the requested number, or `default` limited to the model's positions.

    least: 2 where next tokens are predicted. Raises UserError for a request outside least..positions.
    """
    if requested is None:
        return min(default, positions)
    if not least <= requested <= positions:
        raise UserError(f"{flag}: expected {least} to {positions} tokens (the model's "
                        f"max_position_embeddings), found {requested}")
    return requested


def load_tokens(source: str, tokenizer, sequences: int, length: int,
                split: str = TRAIN) -> tuple[torch.Tensor, str]:
    """[sequences, length] int64 token ids, and a one-line description of what was read.

    source: "c4" or hf:NAME[:CONFIG[:SPLIT]] (streamed from the hub), "demo", a .txt file, or a .jsonl, .json,
    .json.gz or .parquet file with a column "text", or a .npy file of tokens, which may have fewer. split:
    TRAIN, HELDOUT or EVALUATION. A begin-of-sequence token, by bos_prefix, is one of the `length` tokens.
    Rows of a .npy file that all begin with it stay as they are.

    As in the authors' code: the first `sequences` documents of at least `length` tokens, each truncated to
    it. If there are too few, among the first SEARCHED times as many tokens as are needed, documents are
    packed instead: concatenated in order, separated by end-of-sequence, and cut into sequences. Raises
    TooShort if that gives too few tokens, and UserError for text that cannot be read, and where bos_prefix
    does.
    """
    (source, split), prefix = located(source, split), bos_prefix(tokenizer)
    if source.endswith(".npy"):
        tokens = _first_rows(source, sequences, prefix, split)[:, :length]
        return tokens, f"{source}: {len(tokens)} sequences of {tokens.shape[1]} tokens"
    length -= len(prefix)  # tokens of text per sequence
    needed = sequences * length
    whole, packed, documents, read = [], [], 0, 0
    with Progress(total=sequences, desc="tokenizing", unit="seq", leave=False) as bar:
        for document in documents_of(source, split):
            with document as file:
                ids = first_tokens(file, tokenizer, needed)
            documents += 1
            if len(ids) >= length:
                whole.append(prefix + ids[:length])
                bar.update()
                if len(whole) == sequences:
                    description = f"{source}: first {sequences} documents of at least {length} tokens"
                    return torch.tensor(whole), description
            if len(packed) < needed:
                packed += [*ids, tokenizer.eos_token_id]
            read += len(ids)
            if read > SEARCHED * needed:
                break
    if len(packed) < needed:
        raise TooShort(f"{source}: expected {sequences} x {length} = {needed} tokens{PARTS[split]}, found "
                       f"{len(packed)}")
    description = (f"{source}: packed ({len(whole)} of {documents} documents have {length} tokens, "
                   f"{sequences} needed)")
    rows = [prefix + packed[start : start + length] for start in range(0, needed, length)]
    return torch.tensor(rows), description


def read_token_rows(path: str) -> np.ndarray:
    """[n, length] int32 tokens of a .npy file. Raises UserError for one of anything else."""
    try:
        rows = np.load(path)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"text {path}: expected a .npy file of tokens: {first_line(error)}") from error
    if rows.ndim != 2 or rows.dtype != TOKEN or not rows.size:
        raise UserError(f"text {path}: expected rows of tokens, {TOKEN}, found {rows.dtype} of shape "
                        f"{list(rows.shape)}")
    return rows


def _first_rows(path: str, count: int, prefix: list[int], split: str) -> torch.Tensor:
    """The first rows of a part of a .npy file as int64, each after the prefix, unless all of the file's rows
    begin with it.
    """
    rows = read_token_rows(path)
    begin, border = [] if (rows[:, : len(prefix)] == prefix).all() else prefix, len(rows) - len(rows) // 10
    rows = {TRAIN: rows[:border], HELDOUT: rows[border:], EVALUATION: rows}[split]
    if not rows.size:
        raise TooShort(f"text {path}: expected rows{PARTS[split]}, found none")
    tokens = torch.tensor([[*begin, *row] for row in rows[:count].tolist()])
    if tokens.min() < 0:
        raise UserError(f"text {path}: expected token ids, found {tokens.min()}")
    return tokens


class TextSamples(Sequence):
    """The tokens that write_text_tokens wrote, as samples of `length` tokens, read from disk one by one.

    prefix: tokens that begin each sample, of its `length`; they are not in the file.
    """

    def __init__(self, path: str, length: int, prefix: Sequence[int] = ()):
        self.path, self.prefix = path, list(prefix)
        self.tokens = np.load(path, mmap_mode="r").reshape(-1, length - len(prefix))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return Sample(self.prefix + self.tokens[index].tolist())

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the length, the prefix and all tokens."""
        begin = "".join(f"{token} " for token in self.prefix)
        digest = hashlib.sha256(f"{begin}{self.tokens.shape[1]}\n".encode())
        digest.update(self.tokens)
        return digest.hexdigest()


def write_text_tokens(sources: list[str | np.ndarray], tokenizer, length: int, tokens: int | None,
                      path: str) -> list[str]:
    """Write the tokens of the sources' training parts to a .npy file (int32), for TextSamples. Returns a line
    per source.

    sources: as for load_tokens, or generated tokens. Documents are concatenated in order, each followed by
    end-of-sequence; what remains after the last complete sequence of `length` tokens is dropped. tokens: how
    many to take from each source; None takes all. Memory is constant. Raises UserError for too few tokens and
    for text that cannot be read.
    """
    names, lines, written = [each if isinstance(each, str) else GENERATED for each in sources], [], 0
    with write_file(path) as file:
        _write_header(file, 0)
        for name, source in zip(names, sources, strict=True):
            count = _append_tokens(file, source, tokenizer, tokens)
            lines.append(f"{name}: {count} tokens")
            written += count
        if written < length:
            raise UserError(f"--text {' '.join(names)}: expected at least one sequence of {length} tokens, "
                            f"found {written}")
        written -= written % length
        file.seek(0)
        _write_header(file, written)
        file.truncate(file.tell() + written * TOKEN.itemsize)
    return lines


def _write_header(file, tokens: int) -> None:
    """The header of a .npy file, whose size does not depend on the number of tokens."""
    write_array_header_1_0(file, {"descr": TOKEN.str, "fortran_order": False, "shape": (tokens,)})


def _append_tokens(file, source: str | np.ndarray, tokenizer, tokens: int | None) -> int:
    """Append the first `tokens` tokens of a source, or all, to an open file. Returns how many."""
    if isinstance(source, np.ndarray):
        return file.write(source.ravel()[:tokens].tobytes()) // TOKEN.itemsize
    count, lists = 0, _token_lists(source, tokenizer, TRAIN)
    with Progress(total=tokens, desc=f"tokenizing {source}", unit="tok", unit_scale=True, leave=False) as bar:
        while count != tokens and (ids := next(lists, None)) is not None:
            if tokens is not None:
                ids = ids[: tokens - count]
            file.write(np.array(ids, dtype=TOKEN).tobytes())
            count += len(ids)
            bar.update(len(ids))
    if tokens is not None and count < tokens:
        raise UserError(f"--text {source}: expected {tokens} tokens{PARTS[TRAIN]} (--text-tokens), found "
                        f"{count}")
    return count


def packed_rows(source: str, tokenizer, count: int, length: int, split: str) -> list[list[int]]:
    """The first `count` sequences of a part of a source, packed as write_text_tokens does; fewer if it has
    fewer. Raises UserError for text that cannot be read.
    """
    lists = _token_lists(source, tokenizer, split)
    tokens = list(itertools.islice(itertools.chain.from_iterable(lists), count * length))
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


def _token_lists(source: str, tokenizer, split: str) -> Iterator[list[int]]:
    """The tokens of a source's documents, each followed by end-of-sequence, in lists of any length."""
    source, split = located(source, split)
    end = tokenizer.eos_token_id
    if source.endswith(".txt"):
        check_source(source)
        with open_part(source, split) as file:
            yield from token_lists(file, tokenizer)
        yield [end]
        return
    for batch in _batches(read_documents(source, split)):
        ids = []
        for document in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            ids += [*document, end]
        yield ids


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Successive documents in lists of at least BATCH characters, except for the last."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document) + 1
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def located(source: str, split: str) -> tuple[str, str]:
    """A source and its part, as they are read: the demo model's text has a file for either part."""
    if (source in ("c4", DEMO) or is_data_set(source)) and split == EVALUATION:
        split = HELDOUT
    if source == DEMO:
        return os.path.join(demo_home(), "text", f"{split}.txt"), EVALUATION
    return source, split


def in_part(content: str, split: str) -> bool:
    """Whether a document or a chat with this content is in a part of its file."""
    if split == EVALUATION:
        return True
    held_out = int.from_bytes(hashlib.sha256(content.encode()).digest()) < 2**256 // 10
    return held_out == (split == HELDOUT)


@contextlib.contextmanager
def open_part(path: str, split: str):
    """Context manager: a part of a .txt file, open to read. Raises UserError where it is not UTF-8."""
    with open_text(path) as file:
        if split == EVALUATION:
            yield file
            return
        border = heldout_begin(file.buffer)
        file.buffer.seek(border if split == HELDOUT else 0)
        yield file if split == HELDOUT else io.TextIOWrapper(_Until(file.buffer, border), "utf-8-sig")


def heldout_begin(file) -> int:
    """The byte of an open .txt file at which its held-out part begins: where a line does or, if none does
    soon after nine tenths of the file, where a character does.
    """
    size = os.fstat(file.fileno()).st_size
    tenth = size - size // 10
    file.seek(max(0, tenth - 1))
    before, after = file.read(1), file.read(min(size // 20, LINE) + 3)
    line = (before + after).find(b"\n")
    return tenth + (line if line >= 0 else len(after) - len(after.lstrip(bytes(range(0x80, 0xC0)))))


class _Until(io.BufferedIOBase):
    """The bytes of an open file up to `end`."""

    def __init__(self, file, end: int):
        self.file, self.end = file, end

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = self.end - self.file.tell()
        return self.file.read(left if size < 0 else min(size, left))

    read1 = read


def is_generated(source: str) -> bool:
    """Whether the source model is to write it: generated, or generated:FILE."""
    return source.partition(":")[0] == GENERATED


def is_endless(source: str) -> bool:
    """Whether a source has, or may have, more than anyone takes of it."""
    return source == "c4" or is_generated(source) or is_data_set(source)


def version_of(source: str) -> str | None:
    """The sha256 of a file, the commit of a data set of the hub; None for any other source."""
    if is_data_set(source):
        return commit_of(source)
    return stamp(source)["sha256"] if os.path.isfile(source) else None


def digests_of(sources, run: str, output: str = "") -> dict[str, str]:
    """Source as given -> version_of it, for those that have one; sources that are not given are None.

    output: an artifact that may be complete; a data set of the hub is read at the commit that it was made of.
    """
    remember_inputs(run)
    record = read_json(os.path.join(output, RECORD)) if output else None
    for name, version in record.get("inputs", {}).items() if isinstance(record, dict) else ():
        if is_data_set(name):
            COMMITS.setdefault(name, version)
    names = [source.removeprefix(f"{GENERATED}:") for source in sources if source]
    return {name: version for name in names if (version := version_of(name))}


def check_source(source: str) -> None:
    """Raise UserError unless the source is known by name, or a file of a known format."""
    if source in ("c4", DEMO) or is_data_set(source):
        return
    if not os.path.exists(source):
        raise UserError(f"text {source}: not found; expected {EXPECTED}")
    if not source.endswith((".txt", *TABLES)):
        raise UserError(f"text {source}: expected {EXPECTED}")


def documents_of(source: str, split: str) -> Iterator[contextlib.AbstractContextManager]:
    """Yield the documents of a part of a source, each a context manager of a text file; that of a .txt file
    is one document.
    """
    if source.endswith(".txt"):
        check_source(source)
        yield open_part(source, split)
    else:
        yield from map(io.StringIO, read_documents(source, split))


def read_documents(source: str, split: str) -> Iterator[str]:
    """Yield the documents of a part of a source; of a .txt file its lines."""
    source, split = located(source, split)
    check_source(source)
    if source == "c4":
        name, files = C4_FILES[split]
        for number in range(files):
            for row in rows_of(C4, data_files=name.format(number), split="train", streaming=True):
                yield row["text"]
    elif source.endswith(".txt"):
        with open_part(source, split) as file:
            for line in file:
                yield line.removesuffix("\n")
    else:
        for place, row in read_rows(source):
            try:
                document = text_column(row, "text")
            except ValueError as error:
                raise UserError(f"{source} {place}: {error}") from error
            if in_part(document, split):
                yield document


def first_tokens(file, tokenizer, count: int) -> list[int]:
    """The first `count` tokens of an open text file, or all if it has fewer, without special tokens."""
    return list(itertools.islice(itertools.chain.from_iterable(token_lists(file, tokenizer)), count))


def token_lists(file, tokenizer) -> Iterator[list[int]]:
    """Yield all tokens of an open text file in order, in lists, without special tokens.

    The file is read as far as they are taken. Where pieces cannot be joined they become one, and so does the
    entire text for a slow tokenizer, which does not say where its tokens are.
    """
    piece, more = file.read(PIECE), file.read(PIECE)
    if more and not tokenizer.is_fast:
        piece, more = piece + more + file.read(), ""
    if not more:
        yield tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        return
    tokens, begin = located_tokens(piece, tokenizer), 0
    while more:
        overlap, size = piece[-OVERLAP:], PIECE
        following = located_tokens(overlap + more, tokenizer)
        seam = find_seam(tokens, following, len(piece) - len(overlap), overlap)
        if seam:
            yield [token for _, _, token in tokens[begin : seam[0]]]
            piece, tokens, begin = overlap + more, following, seam[1]
        else:
            piece += more
            tokens, size = located_tokens(piece, tokenizer), len(piece)
        more = file.read(size)
    yield [token for _, _, token in tokens[begin:]]


def located_tokens(text: str, tokenizer) -> list[tuple[int, int, int]]:
    """(first character, character after the last, id) of each token."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = zip(encoded["offset_mapping"], encoded["input_ids"], strict=True)
    return [(*place, token) for place, token in places]


def find_seam(before: list, after: list, start: int, overlap: str) -> tuple[int, int] | None:
    """The numbers of tokens of a piece, and of the next one, before a place around which both have the same.

    before, after: their located_tokens. The overlap is what the next piece begins with, and the first one has
    from character `start` on. Blanks alone do not count: what follows a run of them may decide how all of it
    is split. Of several places it is the one closest to the middle; None if there is none.
    """
    skipped = bisect_left(before, (start,))
    before = [(first - start, last - start, token) for first, last, token in before[skipped:]]
    for place in sorted(range(len(overlap)), key=lambda place: abs(place - len(overlap) // 2)):
        ours, theirs = bisect_left(before, (place,)), bisect_left(after, (place,))
        common = before[ours - AROUND : ours + AROUND] if ours >= AROUND else []
        if len(common) == 2 * AROUND and common == after[max(0, theirs - AROUND) : theirs + AROUND]:
            first, middle, last = common[0][0], common[AROUND][0], common[-1][1]
            if overlap[first:middle].strip() and overlap[middle:last].strip():
                return skipped + ours, theirs
    return None
