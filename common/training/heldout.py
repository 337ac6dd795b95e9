"""Held-out measurement: how close the student is to its teacher on samples that it is not trained on."""

import io
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from common.data.chat import load_chats, token_lines
from common.data.documents import EVALUATION, HELDOUT, NONE, TRAIN, digest_of, is_generated, parse_source
from common.data.pool import SPLIT, Sources, generated_rows
from common.data.rows import TABLES, Sample, as_samples
from common.data.sources import DataContext, generated, read_sequences
from common.data.tasks import check_lengths, has_split, load_task, tokenize
from common.data.text import TOKEN, TooShort, packed_rows
from common.models.equivalence import COMPARED, compare
from common.models.head import head_of
from common.models.load import bos_prefix, load_config
from common.run.artifact import RECORD, resolved
from common.run.errors import UserError
from common.run.files import read_json, write_file
from common.training import checkpoints
from common.training.checkpoints import HELDOUT_CHATS, HELDOUT_TEXT
from common.training.lines import CHAT_SET, START, TASK_SET, TEXT_SET
from common.training.packing import rows_of_step
from common.training.sharding import release

TEXTS = (".txt", *TABLES)  # files whose contents are compared
QUESTIONS = 16  # of each task, where it has a validation split


@dataclass(frozen=True)
class Heldout:
    """Sets of samples kept out of training, and how often the student is measured on them.

    A set whose samples have answers is measured on its answer tokens, a set of texts on every token but each
    text's first. The measured texts and chats choose the checkpoint that stage 6 exports; as many others are
    left for stage 7, and are neither trained on nor measured here.
    """

    sets: dict[str, list[Sample]]  # some of SETS -> samples, at least one
    every: int  # steps between measurements
    unmeasured: Sequence[Sample] = ()  # texts and chats

    def due(self, step: int, steps: int) -> bool:
        """Whether to measure after `step` (from 1) of `steps`: the first, the last and every `every`-th."""
        return bool(self.sets) and (step in (1, steps) or step % self.every == 0)

    def measure_start(self, step, teacher) -> None:
        """Add the untrained student's metrics, named START_NAME, to the first engine.Step, whose time begins
        after this measurement.
        """
        if self.sets and step.number == 0:
            metrics = self.metrics(step.job, teacher, step.schedule)
            step.metrics |= {f"{START}_{name}": figure for name, figure in metrics.items()}
            step.began += metrics["heldout_seconds"]

    def write_unmeasured(self, directory: str) -> None:
        """Write the unmeasured texts, if any, to heldout.npy, [n, length] int32, for 07_eval.py --text, and
        the unmeasured chats to heldout_chats.jsonl, for its --chat.
        """
        texts = [sample.prompt for sample in self.unmeasured if not sample.answer_tokens]
        chats = [sample for sample in self.unmeasured if sample.answer_tokens]
        array = io.BytesIO()
        np.save(array, np.array(texts, TOKEN))
        for name, content in ((HELDOUT_TEXT, array.getvalue() if texts else b""),
                              (HELDOUT_CHATS, token_lines(chats).encode())):
            if content:
                with write_file(os.path.join(directory, name)) as file:
                    file.write(content)

    def measurements(self, steps: int) -> int:
        """The number of measurements in `steps` steps."""
        others = sum(step % self.every > 0 for step in {1, steps})  # the first and the last
        return (steps // self.every + others) * bool(self.sets)

    def measure(self, step, teacher) -> None:
        """Add the metrics to those of an engine.Step after which they are due."""
        if self.due(step.number + 1, step.schedule.steps):
            step.metrics |= self.metrics(step.job, teacher, step.schedule)

    @torch.no_grad()
    def metrics(self, job, teacher, schedule) -> dict[str, float]:
        """Means over a set's tokens, named PREFIX_NAME for NAME in COMPARED, and heldout_seconds.

        job: the student's. All ranks call this, each for its share of the samples, and get the same metrics.
        The next training step is the same with and without it.
        """
        began, metrics, student, ranks = time.perf_counter(), {}, job.trainee, job.ranks
        for prefix, samples in self.sets.items():
            answers = any(sample.answer_tokens for sample in samples)
            rows = rows_of_step(samples, 0, replace(schedule, batch=len(samples)), ranks)  # each sample once
            sums = torch.zeros(1 + len(COMPARED), dtype=torch.float64, device=ranks.device)
            for row in rows:
                row = row.to(ranks.device)
                positions = row.answer_at if answers else row.prompt_at
                sums += sums_at(positions, student, teacher, row, schedule.loss_chunk)
            dist.all_reduce(sums)
            tokens, *totals = sums.tolist()
            for name, total in zip(COMPARED, totals, strict=True):
                metrics[f"{prefix}_{name}"] = total / tokens
        release(student)
        return metrics | {"heldout_seconds": round(time.perf_counter() - began, 4)}


def sums_at(
    positions: torch.Tensor,  # [n] of the row's tokens that predict one
    student,
    teacher,
    row,
    chunk: int,  # tokens whose logits are in memory at a time
) -> torch.Tensor:
    """[1 + len(COMPARED)] float64: n, and sums over these positions of the metrics in COMPARED."""
    teacher_hidden, teacher_head = teacher(row), head_of(teacher.net)

    def sums_of(hidden, head):
        sums = torch.zeros(1 + len(COMPARED), dtype=torch.float64, device=hidden.device)
        for at in positions.split(chunk):
            columns = compare(head(hidden[at]), teacher_head(teacher_hidden[at]), row.targets[at])
            sums[0] += len(at)
            sums[1:] += torch.stack([column.double().sum() for column in columns])
        return sums

    return student(row, sums_of)


def load_heldout(sources: Sources, context: DataContext, texts: list[Sample], every: int) -> Heldout:
    """What is held out, tokenized for the checkpoint context.model.

    texts: heldout_texts. Every second one of the texts and of the chats is measured, every so many steps.
    Raises UserError for questions that cannot be read or are too long.
    """
    chats, questions = heldout_chats(sources, context), heldout_questions(sources, context)
    sets = {TEXT_SET: texts[::2], CHAT_SET: chats[::2], TASK_SET: questions}
    sets = {name: samples for name, samples in sets.items() if samples}
    return Heldout(sets, every, [*texts[1::2], *chats[1::2]])


def heldout_texts(sources: Sources, context: DataContext) -> list[Sample]:
    """Twice `heldout_sequences` texts of `text_length` tokens; with SPLIT at most as many.

    Raises UserError for text that cannot be read, is too short, or is trained on.
    """
    source, length, count = sources.heldout_text, sources.text_length, 2 * sources.heldout_sequences
    if source == SPLIT:
        return split_texts(sources, context, count)
    if source == NONE:
        return []
    trained_on = set()
    if os.path.isfile(source) and source.endswith(TEXTS):
        trained_on = checkpoints.of_first_rank(
            shared_with_training(sources, context) if context.ranks.first else None)

    def read() -> tuple[list[Sample], str]:
        tokens, description = read_sequences(source, None, context, count, length, EVALUATION, trained_on)
        return [Sample(ids) for ids in tokens.tolist()], description

    samples, description = context.kept(source, ["held out", count, length], read)
    without = f" without {len(trained_on)} documents or blocks that training or calibration reads"
    context.ranks.say(f"reads   {description}; held out{without if trained_on else ''}")
    return samples


def shared_with_training(sources: Sources, context: DataContext) -> set[bytes]:
    """The digests of what a file for --heldout-text shares with --text and with what RUN's calibration read.

    Raises UserError if they share all of it.
    """
    source, run = sources.heldout_text, context.run
    record = read_json(os.path.join(run, "calibration", RECORD))
    calibrated = resolved(run, record["arguments"]["text"]) if isinstance(record, dict) else NONE
    others = [text for text in dict.fromkeys([*sources.text, calibrated])
              if os.path.isfile(text) and text.endswith(TEXTS)]
    own = set(map(digest_of, parse_source(source).contents(EVALUATION)))
    shared = {digest for text in others for digest in map(digest_of, parse_source(text).contents(TRAIN))
              if digest in own}
    if shared and shared == own:
        raise UserError(f"--heldout-text {source}: expected text that training and calibration do not read, "
                        f"found all of it in {' '.join(others)}")
    return shared


def split_texts(sources: Sources, context: DataContext, count: int) -> list[Sample]:
    """At most `count` texts of the held-out parts of --text, from each source as many, as far as it has them.

    Of generated text at most a tenth of what is trained on, but two. Raises UserError for text that cannot be
    read.
    """
    tokenizer, length, samples = context.tokenizer(), sources.text_length, []
    prefix, texts = bos_prefix(tokenizer), list(dict.fromkeys(sources.text))
    for source in sorted(texts, key=is_generated):  # a fault in a file is found before text is generated
        if is_generated(source):
            rows = heldout_share(source, texts, count, generated_rows(sources, len(prefix)))
            try:
                rows = generated(source, context, rows, length, HELDOUT).tolist()
            except TooShort:  # of documents to continue
                rows = []
        else:
            share = heldout_share(source, texts, count)
            found, _ = context.kept(source, ["texts", share, length], partial(
                held_out_rows, source, tokenizer, share, length - len(prefix)))
            rows = [prefix + sample.prompt for sample in found]
        samples += map(Sample, rows)
        say_held_out(context, source, len(rows), f"texts of {length} tokens")
    return samples[:count]


def heldout_share(source: str, sources, count: int, trained: int = 0) -> int:
    """Of `count` samples to hold out of all sources, this one's share; of generated ones at most a tenth of
    those `trained` on, but two.
    """
    share = -(-count // len(sources))
    return min(share, max(2, trained // 10)) if is_generated(source) else share


def heldout_chats(sources: Sources, context: DataContext) -> list[Sample]:
    """At most twice `heldout_sequences` chats of the held-out parts of --chat, from each source as many.

    Of generated ones at most a tenth of what is trained on, but two. Raises UserError for chats that cannot
    be read.
    """
    count, samples, chats = 2 * sources.heldout_sequences, [], list(dict.fromkeys(sources.chat))
    for source in chats if count else ():
        if is_generated(source):
            rows = heldout_share(source, chats, count, generated_rows(sources))
            found = as_samples(generated(source, context, rows, sources.text_length, HELDOUT, chats=True))
        else:
            positions = load_config(context.model).max_position_embeddings
            share = heldout_share(source, chats, count)
            found, _ = context.kept(source, ["chats", share], partial(
                held_out_chats, source, context.tokenizer(), positions, share))
        samples += found
        say_held_out(context, source, len(found), "chats")
    return samples[:count]


def held_out_rows(source: str, tokenizer, count: int, length: int) -> tuple[list[Sample], str]:
    """At most `count` texts of a source's held-out part, for DataContext.kept."""
    return [Sample(row) for row in packed_rows(source, tokenizer, count, length, HELDOUT)], ""


def held_out_chats(source: str, tokenizer, longest: int, count: int) -> tuple[list[Sample], str]:
    """At most `count` chats of a source's held-out part, for DataContext.kept."""
    try:
        return load_chats(source, tokenizer, longest, HELDOUT, most=count)
    except TooShort:
        return [], ""


def say_held_out(context: DataContext, source: str, count: int, kind: str) -> None:
    """Print how many samples of a source's held-out part there are."""
    few = "" if count else ": its held-out part is too short"
    context.ranks.say(f"reads   {source}: {count} {kind}, held out{few}")


def heldout_questions(sources: Sources, context: DataContext) -> list[Sample]:
    """The first `heldout_questions` of each task's validation split.

    None of them asked for: QUESTIONS of each task that has that split. Raises UserError if some are and a
    task has none.
    """
    asked, samples = sources.heldout_questions, []
    if sources.tasks == NONE and asked:
        raise UserError(f"--heldout-questions {asked}: expected --tasks with it, found --tasks none")
    if sources.tasks == NONE or asked == 0:
        return []
    tokenizer, positions = context.tokenizer(), load_config(context.model).max_position_embeddings
    for task in sources.only:
        if asked is None and not has_split(task, "validation", sources.tasks):
            continue
        examples, place = load_task(task, "validation", sources.tasks)
        chosen = [tokenize(example, tokenizer) for example in examples[: asked or QUESTIONS]]
        check_lengths(enumerate(chosen), positions, place)
        samples += chosen
    if samples:
        context.ranks.say(f"reads   {sources.tasks}: {len(samples)} validation questions, held out")
    return samples
