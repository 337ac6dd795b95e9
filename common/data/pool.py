"""The samples to train on: tasks, chats and texts, tokenized, in one pool."""

import array
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.data.chat import load_chats
from common.data.documents import NONE, TRAIN, is_generated, parse_source
from common.data.rows import Sample, as_samples
from common.data.sources import DataContext, generated
from common.data.tasks import TASKS, check_lengths, load_task, require_split, size_note, tokenize
from common.data.text import TOKENS, TextSamples, write_text_tokens
from common.models.load import bos_prefix, fingerprint, load_config
from common.run.errors import UserError, printable

SPLIT = "split"  # --heldout-text: the held-out parts of --text


@dataclass(frozen=True)
class Sources:
    """What to train on and to measure on: the flags of stage 5 that have these names."""

    tasks: str = NONE  # a directory, "hub" or NONE
    only: Sequence[str] = TASKS
    text: Sequence[str] = ()
    chat: Sequence[str] = ()
    text_length: int = 512  # tokens of a sample
    text_tokens: int | None = None  # of each source of text, and of chats without end; None: all
    heldout_text: str = NONE  # a source, SPLIT or NONE
    heldout_sequences: int = 0  # texts, and chats
    heldout_questions: int | None = None  # of each task; None: heldout.QUESTIONS, where it has them


class Pool(Sequence):
    """The samples to train on. Those with answers come first, then texts."""

    def __init__(self, answered: Sequence[Sample], texts: Sequence[Sample] = ()):
        self.answered, self.texts = answered, texts

    def __len__(self) -> int:
        return len(self.answered) + len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        beyond = index - len(self.answered)
        return self.answered[index] if beyond < 0 else self.texts[beyond]

    def description(self) -> dict:
        """The training data as recorded in the settings: numbers of samples and their digest."""
        digest = samples_digest(self.answered)
        if self.texts:
            digest = hashlib.sha256(f"{digest} {self.texts.digest}".encode()).hexdigest()
        return {"samples": len(self), "texts": len(self.texts), "samples_sha256": digest}


def load_pool(sources: Sources, context: DataContext) -> Pool:
    """Tasks, chats and texts, tokenized for the checkpoint context.model. All of context.ranks call it.

    Raises UserError if there are none, and for data that cannot be read or used.
    """
    tokenizer, positions = context.tokenizer(), load_config(context.model).max_position_embeddings
    answered = load_tasks(sources, tokenizer, positions, context.ranks) if sources.tasks != NONE else []
    load_chats_of = partial(load_chat_source, sources, context, tokenizer, positions)
    # files first: a fault in one is found before minutes of generating
    chats = {source: load_chats_of(source) for source in sources.chat if not is_generated(source)}
    texts = load_texts(sources, context, tokenizer) if sources.text else ()
    for source in sources.chat:
        samples, description = chats.get(source) or load_chats_of(source)
        context.ranks.say(f"reads   {description}")
        answered += samples
    if not answered and not texts:
        raise UserError("--tasks none: expected --text or --chat with it, found neither")
    return Pool(answered, texts)


def load_tasks(sources: Sources, tokenizer, positions: int, ranks) -> list[Sample]:
    """The training sets of the tasks. Raises UserError for one without a file, and for a sample of more than
    `positions` tokens.
    """
    require_split(sources.only, "train", sources.tasks)
    samples = []
    for task in sources.only:
        examples, origin = load_task(task, "train", sources.tasks)
        tokenized = [tokenize(example, tokenizer) for example in examples]
        check_lengths(enumerate(tokenized, 1), positions, origin)
        samples += tokenized
        note = size_note(task, "train", origin, len(examples))
        ranks.say(f"reads   {origin}: {len(examples)} samples{note}")
    return samples


def load_chat_source(sources: Sources, context: DataContext, tokenizer, positions: int,
                     source: str) -> tuple[list[Sample], str]:
    """Chats of a source and their description. Raises UserError if none has an answer."""
    if is_generated(source):
        rows = generated(source, context, generated_rows(sources), sources.text_length, chats=True)
        samples = as_samples(rows)
        if not samples:
            raise UserError(f"--chat {source}: expected answers within --text-length {sources.text_length} "
                            "tokens, found none")
        return samples, source
    tokens = sources.text_tokens if parse_source(source).endless else None
    return context.kept(source, [TRAIN, tokens], partial(
        load_chats, source, tokenizer, positions, TRAIN, tokens=tokens))


def load_texts(sources: Sources, context: DataContext, tokenizer) -> TextSamples:
    """The texts, memory-mapped from RUN/tokens/, where the first rank writes their tokens unless it has."""
    prefix, length = bos_prefix(tokenizer), sources.text_length
    stored = length - len(prefix)  # of a sample's tokens in the file
    texts = []
    for source in sources.text:
        if is_generated(source):
            rows = generated(source, context, generated_rows(sources, len(prefix)), length)
            texts.append(np.ascontiguousarray(rows[:, len(prefix) :]))
        else:
            texts.append(source)

    def write(directory: str) -> str:
        path = os.path.join(directory, TOKENS)
        return "; ".join(write_text_tokens(texts, tokenizer, stored, sources.text_tokens, path))

    digests = [hashlib.sha256(text).hexdigest() for text in texts if isinstance(text, np.ndarray)]
    files = [(source, parse_source(source).version()) for source in sources.text]
    depends_on = [TRAIN, files, digests, stored, sources.text_tokens, fingerprint(context.model)]
    path, _ = context.stored("", depends_on, write)
    samples = TextSamples(os.path.join(path, TOKENS), length, prefix)
    begin = f", {printable(tokenizer.bos_token)} first" if prefix else ""
    context.ranks.say(f"reads   {' '.join(sources.text)}: {len(samples)} samples of {length} tokens{begin}")
    return samples


def generated_rows(sources: Sources, begin=0) -> int:
    """The rows of `text_length` that have `text_tokens`, without the first `begin` of each."""
    return -(-sources.text_tokens // (sources.text_length - begin))


def samples_digest(samples: Sequence[Sample]) -> str:
    """sha256 of all samples' token ids, in order: it changes with the training data."""
    digest = hashlib.sha256()
    for sample in samples:
        for segment in sample.segments:
            digest.update(array.array("q", (len(segment), *segment)).tobytes())
    return digest.hexdigest()
