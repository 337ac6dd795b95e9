"""Text as tokens: a matrix for calibration and perplexity, a memory-mapped file for training.

Every source has two parts, told apart where it is read. Calibration, refit and training read TRAIN, so that
they cannot see HELDOUT: other files of c4 and demo; of generated text what another seed gives; of all else
the documents, chats, blocks of a .txt file or rows of a .npy file whose sha256 is below a tenth of its range,
which puts copies on the same side. EVALUATION is for what a user names to evaluate on: the entire file; of
c4, demo and data sets of the hub HELDOUT.

A .txt file is one document, read in blocks that end where the content of a line says so: what is repeated
elsewhere, or in another file, is cut into the same blocks. So memory is constant, too.
"""

import functools
import hashlib
import itertools
import os
import zlib
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
PIECE = 2**18  # characters of a document tokenized at a time, at least: some 50 MB
SEARCHED = 64  # tokens of documents that are searched for long ones, for each token that is needed
BLOCK, LONGEST_BLOCK = 2**11, 2**16  # characters of a .txt file's blocks: on average, and of a line at most


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


def load_tokens(source: str, tokenizer, sequences: int, length: int, split: str = TRAIN,
                without=frozenset()) -> tuple[torch.Tensor, str]:
    """[sequences, length] int64 token ids, and a one-line description of what was read.

    source: "c4" or hf:NAME[:CONFIG[:SPLIT]] (streamed from the hub), "demo", a .txt file, or a .jsonl, .json,
    .json.gz or .parquet file with a column "text", or a .npy file of tokens, which may have fewer. split:
    TRAIN, HELDOUT or EVALUATION. without: as for documents_of. A begin-of-sequence token, by bos_prefix, is
    one of the `length` tokens. Rows of a .npy file that all begin with it stay as they are.

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
        for document in documents_of(source, split, without):
            ids = list(itertools.islice(token_ids(document, tokenizer), needed))
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
    begin = [] if (rows[:, : len(prefix)] == prefix).all() else prefix
    rows = rows[[in_part(row.tobytes(), split) for row in rows]]
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
        for document in documents_of(source, split):
            yield from token_lists(document, tokenizer)
        yield [end]
        return
    for batch in gathered(read_documents(source, split), BATCH):
        ids = []
        for document in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            ids += [*document, end]
        yield ids


def located(source: str, split: str) -> tuple[str, str]:
    """A source and its part, as they are read: the demo model's text has a file for either part."""
    if (source in ("c4", DEMO) or is_data_set(source)) and split == EVALUATION:
        split = HELDOUT
    if source == DEMO:
        return os.path.join(demo_home(), "text", f"{split}.txt"), EVALUATION
    return source, split


def in_part(content: str | bytes, split: str) -> bool:
    """Whether a document, chat, block or row with this content is in a part of its source."""
    if split == EVALUATION:
        return True
    content = content.encode() if isinstance(content, str) else content
    held_out = int.from_bytes(hashlib.sha256(content).digest()) < 2**256 // 10
    return held_out == (split == HELDOUT)


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


def contents(source: str, split: str) -> Iterator[str]:
    """Yield what is in a part of a source or not: blocks of a .txt file, documents of any other."""
    if not source.endswith(".txt"):
        return read_documents(source, split)
    check_source(source)
    return (block for block in blocks(source) if in_part(block, split))


def digest_of(content: str) -> bytes:
    """By which contents are compared."""
    return hashlib.sha256(content.encode()).digest()


def shared_contents(source: str, others: Iterable[str]) -> set[bytes]:
    """The digests of what a source shares with the training parts of others."""
    own = set(map(digest_of, contents(source, EVALUATION)))
    return {digest for other in others for digest in map(digest_of, contents(other, TRAIN)) if digest in own}


def documents_of(source: str, split: str, without=frozenset()) -> Iterator[Iterator[str]]:
    """Yield the documents of a part of a source, each as successive lines or blocks of it. A .txt file is one
    document. without: digests of contents that are left out.
    """
    kept = (content for content in contents(source, split)
            if not without or digest_of(content) not in without)
    if source.endswith(".txt"):
        yield kept
    else:
        for document in kept:
            yield iter(document.splitlines(keepends=True))


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
        for block in contents(source, split):
            yield from block.removesuffix("\n").split("\n")
    else:
        for place, row in read_rows(source):
            try:
                document = text_column(row, "text")
            except ValueError as error:
                raise UserError(f"{source} {place}: {error}") from error
            if in_part(document, split):
                yield document


def token_ids(document: Iterable[str], tokenizer) -> Iterator[int]:
    """The tokens of a document as documents_of gives it, without special tokens, as they are asked for."""
    return itertools.chain.from_iterable(token_lists(document, tokenizer))


def token_lists(document: Iterable[str], tokenizer) -> Iterator[list[int]]:
    """As token_ids, in lists: those of successive lines of at least PIECE characters, but the last."""
    for piece in gathered(document, PIECE):
        yield tokenizer("".join(piece), add_special_tokens=False, verbose=False)["input_ids"]


def gathered(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Successive texts in lists of at least so many characters, except for the last."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
