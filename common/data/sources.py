"""Reads text and chats from every source: files, the hub, the model that is converted."""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass

import torch

from common.data.chat import load_chats, read_chats
from common.data.documents import GENERATED, HELDOUT, NONE, PARTS, TRAIN, DataSet, is_generated, source_read
from common.data.generate import chat_form, generated
from common.data.rows import Sample, decoded
from common.data.text import TooShort, load_tokens, sequence_length
from common.models.load import load_config, load_tokenizer
from common.models.weights import fingerprint
from common.run.artifact import find_part, sweep, write_directory, write_record
from common.run.errors import UserError
from common.run.files import locked, write_text

SAMPLES = "samples.jsonl"  # in a directory of RUN/tokens/: a sample's segments of token ids, one a line
CHECKED = 512  # tokens per sequence on which models are compared, where they have that many positions


@dataclass(frozen=True)
class DataContext:
    """The generating model's checkpoint directory and device; and the run directory that gets the tokens."""

    model: str
    run: str
    device: str | torch.device
    ranks: object = None  # common.training.sharding.Ranks, all of which take part; None: this process alone
    layerwise: bool = False  # the model is too large for memory
    bos: bool | None = None  # as for load_tokenizer

    def tokenizer(self):
        return load_tokenizer(self.model, self.bos)

    @property
    def first(self) -> bool:
        """Whether this process writes what all ranks read."""
        return self.ranks is None or self.ranks.first

    @contextlib.contextmanager
    def writing_tokens(self, *others: str):
        """Context manager: no other command writes to RUN/tokens/, nor to other directories in it, in which
        killed processes' work is finished first. All ranks enter and leave it together.
        """
        home = os.path.join(self.run, "tokens")
        with contextlib.ExitStack() as stack:
            if self.first:
                stack.enter_context(locked(home, "tokenizing"))
                for directory in (home, *others):
                    sweep(directory)
            if self.ranks:
                stack.enter_context(self.ranks.waiting())
            yield

    def stored(self, prefix: str, settings: list, write) -> tuple[str, str]:
        """A directory in RUN/tokens/ that depends on settings, and its description: what write(directory)
        writes and returns on the first rank, unless it is there.
        """
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        path, made_by = os.path.join(self.run, "tokens", f"{prefix}{key[:16]}"), {"key": key}
        with self.writing_tokens():
            if self.first and find_part(path, made_by) is None:
                with write_directory(path) as aside:
                    description = write(aside)
                    write_record(aside, made_by | {"description": description})
                print(f"wrote   {path}: {description}", flush=True)
        return path, find_part(path, made_by).get("description")

    def kept(self, source: str, settings: list, read) -> tuple[list[Sample], str]:
        """read(), samples of a source and their description. Those of a data set of the hub are kept in
        RUN/tokens/: neither other ranks nor a training that goes on ask the hub. settings: what else they
        depend on.
        """
        kind = source_read(source)
        if not isinstance(kind, DataSet):
            return read()

        def write(directory: str) -> str:
            samples, description = read()
            lines = (json.dumps([list(map(int, part)) for part in each.segments]) for each in samples)
            write_text(os.path.join(directory, SAMPLES), "".join(f"{line}\n" for line in lines))
            return description

        depends_on = [source, kind.version(), fingerprint(self.model), self.bos, settings]
        path, description = self.stored("samples-", depends_on, write)
        with open(os.path.join(path, SAMPLES)) as file:
            return [Sample(*json.loads(line)) for line in file], description


def choose_chats(chat: list[str] | None, text: list[str], model: str) -> list[str]:
    """Where chats come from: --chat, unless it is none. Left out, the model generates them if it generates
    its --text and has a chat template. Raises UserError for a template that cannot generate them.
    """
    asked = chat if chat is not None else [GENERATED] if GENERATED in text else [NONE]
    if GENERATED in asked:
        tokenizer = load_tokenizer(model)
        if chat is None and not tokenizer.chat_template:
            return []
        chat_form(tokenizer)  # before text is generated
    return [] if asked == [NONE] else asked


def hub_commits(sources) -> dict[str, str]:
    """The commits of the data sets of the hub among sources, or among what generated ones continue."""
    return {kind.name: kind.version() for kind in map(source_read, sources) if isinstance(kind, DataSet)}


def check_sources(text: list[str], chat: list[str]) -> None:
    """Raise UserError where the first document or chat of a source, or what it continues, cannot be read: a
    fault there is found before hours of other work.
    """
    for chats, sources in ((False, text), (True, chat)):
        for kind in map(source_read, sources):
            if kind.name not in (GENERATED, NONE):
                next(read_chats(kind.name, TRAIN) if chats else kind.texts(TRAIN), None)


def read_sequences(text: str, chat: str | None, context: DataContext, sequences: int, length: int,
                   split=TRAIN, without=frozenset()) -> tuple[torch.Tensor, str]:
    """As load_tokens, of text that may be generated. With `chat`, half of the sequences are of chats, one
    after another; all of them if text is none. Chats begin as their template says, generated text with the
    token that it is sampled after. Raises UserError for tokens beyond the vocabulary, too.
    """
    count = 0 if chat is None else sequences if text == NONE else sequences // 2
    if count and is_generated(text):
        check_sources([], [chat])  # before minutes of generating
    parts = []
    if count < sequences:
        parts.append(_read_texts(text, context, sequences - count, length, split, without))
    if count:
        parts.append(_read_chats(chat, context, count, length, split))
    tokens, descriptions = zip(*parts, strict=True)
    tokens, description = torch.cat(tokens), "; ".join(descriptions)
    vocabulary = load_config(context.model).vocab_size
    if tokens.max() >= vocabulary:  # of a .npy file
        raise UserError(f"{description}: expected token ids below {vocabulary}, the vocabulary, found "
                        f"{tokens.max()}")
    return tokens, description


def _read_texts(source: str, context: DataContext, rows: int, length: int, split: str,
                without) -> tuple[torch.Tensor, str]:
    """[rows, length] token ids of texts, and their description."""
    if not is_generated(source):
        return load_tokens(source, context.tokenizer(), rows, length, split, without)
    ids = decoded(generated(source, context, rows, length, split))
    return torch.from_numpy(ids), f"{source}: {rows} texts"


def _read_chats(source: str, context: DataContext, rows: int, length: int,
                split: str) -> tuple[torch.Tensor, str]:
    """[rows, length] token ids of chats, one after another, and their description."""
    if is_generated(source):
        ids = decoded(generated(source, context, rows, length, split, chats=True))
        return torch.from_numpy(ids), f"{source}: {rows} chats"
    positions, needed = load_config(context.model).max_position_embeddings, rows * length
    samples, description = load_chats(source, context.tokenizer(), positions, split, tokens=needed)
    ids = [token for sample in samples for segment in sample.segments for token in segment]
    if len(ids) < needed:
        raise TooShort(f"{source}: expected {needed} tokens{PARTS[split]}, found {len(ids)}")
    return torch.tensor(ids[:needed]).view(rows, length), description


def begins_with_bos(calibration: dict) -> bool:
    """Whether the texts of a calibration, by its record, begin with the begin-of-sequence token."""
    return calibration["arguments"].get("bos") is True


def unread_length(calibration: dict, requested: int | None, positions: int) -> int:
    """Tokens per sequence for read_unread: CHECKED, or the calibration's length if shorter, unless requested.

    Raises UserError for a request that is less than 2 tokens, which predict one, or beyond the positions.
    """
    default = max(2, min(CHECKED, calibration["summary"]["length"]))
    return sequence_length(requested, default, positions, least=2)


def read_unread(calibration: dict, context: DataContext, sequences: int,
                length: int) -> tuple[torch.Tensor, str]:
    """[sequences, length] token ids of the calibration's sources that it has not read, and what was read.

    calibration: its record; context.bos is what begins_with_bos says of it. They are of the held-out part
    or, where that is too short, of what the calibration has read, which the description then says; then there
    are no more than it has.
    """
    arguments = calibration["arguments"]
    text, chat = arguments["text"], arguments.get("chat")
    try:
        return read_sequences(text, chat, context, sequences, length, HELDOUT)
    except TooShort:
        sequences = min(sequences, calibration["summary"]["sequences"])
        tokens, description = read_sequences(text, chat, context, sequences, length)
        description += ", part of the calibration's text: perplexity on other text may be higher"
        return tokens, description
