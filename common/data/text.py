"""Text as tokens: a matrix for calibration and perplexity, a memory-mapped file for training."""

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.lib.format import write_array_header_1_0

from common.data.documents import GENERATED, PARTS, TRAIN, Source, TokenFile, in_part, parse_source
from common.data.rows import Sample
from common.models.load import bos_prefix
from common.models.weights import first_line
from common.run.errors import UserError
from common.run.progress import Progress

TOKEN = np.dtype("<i4")
TOKENS = "tokens.npy"  # in a directory of RUN/tokens/
BATCH = 2**20  # characters tokenized at a time: some 100 MB in the tokenizer
PIECE = 2**18  # characters of a document tokenized at a time, at least: some 50 MB
CHUNK = 2**16  # tokens written at a time
SEARCHED = 64  # tokens of documents that are searched for long ones, for each token that is needed


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

    source: any but generated; a .npy file may have fewer. without: as for Source.documents. A begin-of-
    sequence token, by bos_prefix, is one of the `length` tokens. Rows of a .npy file that all begin with it
    stay as they are.

    As in the authors' code: the first `sequences` documents of at least `length` tokens, each truncated to
    it. If there are too few, among the first SEARCHED times as many tokens as are needed, documents are
    packed instead: concatenated in order, separated by end-of-sequence, and cut into sequences. Raises
    TooShort if that gives too few tokens, and UserError for text that cannot be read.
    """
    kind, prefix = parse_source(source), bos_prefix(tokenizer)
    if isinstance(kind, TokenFile):
        tokens = _first_rows(source, sequences, prefix, split)[:, :length]
        return tokens, f"{source}: {len(tokens)} sequences of {tokens.shape[1]} tokens"
    rows, description = _first_documents(kind, tokenizer, sequences, length - len(prefix), split, without)
    return torch.tensor([prefix + row for row in rows]), f"{kind.origin(split)}: {description}"


def _first_documents(kind: Source, tokenizer, sequences: int, length: int, split: str,
                     without) -> tuple[list[list[int]], str]:
    """Sequences of `length` tokens of documents, whole or packed, as by load_tokens, and which of them."""
    needed = sequences * length
    whole, packed, documents, read = [], [], 0, 0
    with Progress(total=sequences, desc="tokenizing", unit="seq", leave=False) as bar:
        for document in kind.documents(split, without):
            ids = list(itertools.islice(token_ids(document, tokenizer), needed))
            documents += 1
            if len(ids) >= length:
                whole.append(ids[:length])
                bar.update()
                if len(whole) == sequences:
                    return whole, f"first {sequences} documents of at least {length} tokens"
            if len(packed) < needed:
                packed += [*ids, tokenizer.eos_token_id]
            read += len(ids)
            if read > SEARCHED * needed:
                break
    if len(packed) < needed:
        raise TooShort(f"{kind.origin(split)}: expected {sequences} x {length} = {needed} "
                       f"tokens{PARTS[split]}, found {len(packed)}")
    rows = [packed[start : start + length] for start in range(0, needed, length)]
    return rows, f"packed ({len(whole)} of {documents} documents have {length} tokens, {sequences} needed)"


def _first_rows(path: str, count: int, prefix: list[int], split: str) -> torch.Tensor:
    """The first rows of a part of a .npy file as int64, each after the prefix, unless all of the file's rows
    begin with it. Raises UserError for a file of anything but tokens.
    """
    try:
        rows = np.load(path)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"text {path}: expected a .npy file of tokens: {first_line(error)}") from error
    if rows.ndim != 2 or rows.dtype != TOKEN or not rows.size or rows.min() < 0:
        raise UserError(f"text {path}: expected rows of token ids, {TOKEN}, found {rows.dtype} of shape "
                        f"{list(rows.shape)}")
    begin = [] if (rows[:, : len(prefix)] == prefix).all() else prefix
    rows = rows[[in_part(row.tobytes(), split) for row in rows]]
    if not rows.size:
        raise TooShort(f"text {path}: expected rows{PARTS[split]}, found none")
    return torch.tensor([[*begin, *row] for row in rows[:count].tolist()])


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
    """Write the tokens of the sources' training parts to a .npy file (int32), for TextSamples, in constant
    memory. Returns a line per source.

    sources: as for load_tokens, or generated tokens. Documents are concatenated in order, each followed by
    end-of-sequence; what remains after the last complete sequence of `length` tokens is dropped. tokens: how
    many to take from each source; None takes all. Raises UserError for too few tokens.
    """
    names, lines, written = [each if isinstance(each, str) else GENERATED for each in sources], [], 0
    with open(path, "wb") as file:
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
    count, ids = 0, itertools.islice(_packed(source, tokenizer, TRAIN), tokens)
    with Progress(total=tokens, desc=f"tokenizing {source}", unit="tok", unit_scale=True, leave=False) as bar:
        while len(chunk := np.fromiter(itertools.islice(ids, CHUNK), TOKEN)):
            file.write(chunk.tobytes())
            count += len(chunk)
            bar.update(len(chunk))
    if tokens is not None and count < tokens:
        raise UserError(f"--text {source}: expected {tokens} tokens{PARTS[TRAIN]} (--text-tokens), found "
                        f"{count}")
    return count


def packed_rows(source: str, tokenizer, count: int, length: int, split: str) -> list[list[int]]:
    """The first `count` sequences of a part of a source, packed as write_text_tokens does, or as many as it
    has.
    """
    tokens = list(itertools.islice(_packed(source, tokenizer, split), count * length))
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


def _packed(source: str, tokenizer, split: str) -> Iterator[int]:
    """The tokens of a source's documents, each followed by end-of-sequence, one by one."""
    kind, end = parse_source(source), tokenizer.eos_token_id
    if kind.one_document:
        for document in kind.documents(split):
            yield from token_ids(document, tokenizer)
        yield end
        return
    for batch in gathered(kind.texts(split), BATCH):
        for document in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            yield from document
            yield end


def token_ids(document: Iterable[str], tokenizer) -> Iterator[int]:
    """The tokens of a document as Source.documents gives it, without special tokens, one by one.

    Successive lines of at least PIECE characters are tokenized together.
    """
    for piece in gathered(document, PIECE):
        yield from tokenizer("".join(piece), add_special_tokens=False, verbose=False)["input_ids"]


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
