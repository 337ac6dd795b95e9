"""The inputs of training, validated: the pair of checkpoints from stage 4, and the pool of samples."""

import argparse
import array
import datetime
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from common.artifacts import check_input, read_record, verify_files
from common.cli import Clock, UserError
from common.data.chat import load_chats
from common.data.samples import Sample
from common.data.tasks import check_lengths, has_split, load_task, size_note, tokenize
from common.data.text import TextSamples, load_tokens, write_text_tokens
from common.files import sha256
from common.method import masks
from common.models import fingerprint, load_config, load_tokenizer, source_model
from common.records import SOURCE
from common.training.heldout import TASK_SET, TEXT_SET, Heldout
from common.training.sharding import Execution, Ranks

STAGE = "05_prune_train.py"
NONE = "none"  # --tasks, --text, --heldout-text: no such data
TOKENIZING = datetime.timedelta(days=2)  # how long ranks wait for the first one; by default half an hour
HELDOUT_QUESTIONS = 16  # of each task, where it has a validation split


@dataclass(frozen=True)
class Pair:
    """aligned/ and merged/: the same model and grouping before and after merging."""

    aligned: str
    merged: str
    model: dict  # description of the source model
    kv_heads: int
    merge: str  # "mean", "first" or "closed-form"
    blended: tuple[str, ...]  # projections that merging changed

    @property
    def title(self) -> str:
        return f"{self.model['kv_heads']} -> {self.kv_heads} kv heads"


def read_pair(run: str, ranks) -> Pair:
    """The pair in a run directory.

    Raises UserError unless both are intact and belong together, and the source model is unchanged since
    stage 1.
    """
    aligned, merged = (os.path.join(run, name) for name in ("aligned", "merged"))
    aligned_record, merged_record = (read_record(path, "04_align.py") for path in (aligned, merged))
    check_input(merged_record, aligned)
    if ranks.first:  # hash the weights once, not on every rank
        verify_files(aligned, aligned_record)
        verify_files(merged, merged_record)
    summary = aligned_record["summary"]
    whole_head = summary["merge"] == "closed-form" or summary["refit"]  # merging changed W_Q and W_O too
    blended = masks.WHOLE_HEAD if whole_head else masks.KEY_VALUE
    return Pair(aligned, merged, source_model(aligned_record), summary["kv_heads"], summary["merge"], blended)


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
        """The training data as recorded in the settings: number of samples and their digest."""
        digest = samples_digest(self.answered)
        if self.texts:
            digest = hashlib.sha256(f"{digest} {self.texts.digest}".encode()).hexdigest()
        return {"samples": len(self), "texts": len(self.texts), "samples_sha256": digest}


def load_pool(args, model: str, ranks) -> Pool:
    """Tasks, chats and texts as stage 5's flags name them, tokenized for the checkpoint `model`.

    Raises UserError if there are none, and for data that cannot be read or used.
    """
    tokenizer, positions = load_tokenizer(model), load_config(model).max_position_embeddings
    answered = load_tasks(args.only, args.tasks, tokenizer, positions, ranks) if args.tasks != NONE else []
    for path in args.chat:
        chats, description = load_chats(path, tokenizer, positions)
        ranks.say(f"reads   {description}")
        answered += chats
    texts = load_texts(args, model, tokenizer, ranks) if args.text else ()
    if not answered and not texts:
        raise UserError("--tasks none: expected --text or --chat with it, found neither")
    return Pool(answered, texts)


def load_tasks(tasks: list[str], source: str, tokenizer, positions: int, ranks) -> list[Sample]:
    """The training sets of the tasks, concatenated. source: as for load_task.

    Raises UserError for a sample of more than `positions` tokens or without a prompt.
    """
    samples = []
    for task in tasks:
        examples, origin = load_task(task, "train", source)
        for number, example in enumerate(examples, 1):
            sample = tokenize(example, tokenizer)
            if not sample.prompt:
                raise UserError(f"{origin} row {number}: expected a prompt, found none")
            if len(sample) > positions:
                raise UserError(f"{origin} row {number}: expected at most {positions} tokens (the model's "
                                f"positions), found {len(sample)}")
            samples.append(sample)
        note = size_note(task, "train", origin, len(examples))
        ranks.say(f"reads   {origin}: {len(examples)} samples{note}")
    return samples


def load_texts(args, model: str, tokenizer, ranks) -> TextSamples:
    """The texts, memory-mapped from RUN/tokens/, where the first rank writes their tokens unless it has."""
    read = [*args.text, *sorted(glob.glob(os.path.join(model, "tokenizer*")))]
    files = [(path, sha256(path) if os.path.isfile(path) else None) for path in read]
    key = json.dumps([files, args.text_length, args.text_tokens, fingerprint(model)])
    path = os.path.join(args.run, "tokens", f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy")
    tokenized = dist.new_group(backend="gloo", timeout=TOKENIZING)
    if ranks.first and not os.path.exists(path):
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)  # of other texts
        os.makedirs(os.path.dirname(path))
        counts = write_text_tokens(args.text, tokenizer, args.text_length, args.text_tokens, path)
        print(f"wrote   {path}: {'; '.join(counts)}", flush=True)
    dist.barrier(tokenized)
    texts = TextSamples(path, args.text_length)
    ranks.say(f"reads   {' '.join(args.text)}: {len(texts)} samples of {args.text_length} tokens")
    return texts


def load_heldout(args, model: str, ranks) -> Heldout | None:
    """What stage 5's flags hold out, tokenized for the checkpoint `model`; None if nothing.

    Raises UserError for data that cannot be read, is too short, or is trained on.
    """
    tokenizer, positions = load_tokenizer(model), load_config(model).max_position_embeddings
    sets = {}
    if args.heldout_text != NONE:
        sets[TEXT_SET] = heldout_texts(args, tokenizer, ranks)
    questions = heldout_questions(args, tokenizer, positions)
    if questions:
        ranks.say(f"reads   {args.tasks}: {len(questions)} validation questions, held out")
        sets[TASK_SET] = questions
    return Heldout(sets, args.heldout_every) if sets else None


def heldout_texts(args, tokenizer, ranks) -> list[Sample]:
    """--heldout-sequences texts of --text-length tokens. Raises UserError if --text has the same file."""
    source = args.heldout_text
    if os.path.isfile(source) and os.path.realpath(source) in map(os.path.realpath, args.text):
        raise UserError(f"--heldout-text: expected text that is not in --text, found {source} in both")
    tokens, description = load_tokens(source, tokenizer, args.heldout_sequences, args.text_length, "heldout")
    ranks.say(f"reads   {description}; held out")
    return [Sample(ids) for ids in tokens.tolist()]


def heldout_questions(args, tokenizer, positions: int) -> list[Sample]:
    """The first --heldout-questions of each task's validation split.

    Left out: HELDOUT_QUESTIONS of each task that has that split. Raises UserError if it is passed and a task
    has none.
    """
    asked, samples = args.heldout_questions, []
    if args.tasks == NONE and asked:
        raise UserError(f"--heldout-questions {asked}: expected --tasks with it, found --tasks none")
    if args.tasks == NONE or asked == 0:
        return []
    for task in args.only:
        if asked is None and not has_split(task, "validation", args.tasks):
            continue
        examples, origin = load_task(task, "validation", args.tasks)
        chosen = [tokenize(example, tokenizer) for example in examples[: asked or HELDOUT_QUESTIONS]]
        check_lengths(enumerate(chosen), positions, origin)
        samples += chosen
    return samples


def samples_digest(samples: Sequence[Sample]) -> str:
    """sha256 of all samples' token ids, in order: it changes with the training data."""
    digest = hashlib.sha256()
    for sample in samples:
        for segment in sample.segments:
            digest.update(array.array("q", (len(segment), *segment)).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Run:
    """State shared by all phases."""

    args: argparse.Namespace
    ranks: Ranks
    pair: Pair
    pool: Pool
    execution: Execution
    clock: Clock
    heldout: Heldout | None = None

    @property
    def teacher(self) -> str:
        """The teacher's checkpoint directory."""
        if self.args.teacher == SOURCE:
            return self.pair.model["path"]
        return self.args.teacher or os.path.join(self.args.run, "teacher")

    @property
    def directory(self) -> str:
        return os.path.join(self.args.run, "train")
