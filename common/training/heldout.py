"""Held-out measurement: how close the student is to its teacher on samples that it is not trained on."""

import os
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from common.data import documents
from common.data.chat import load_chats, token_lines
from common.data.documents import EVALUATION, HELDOUT, NONE, TRAIN, digest_of, is_generated, parse_source
from common.data.pool import SPLIT, Sources, generated_rows, samples_digest
from common.data.rows import Sample, as_samples
from common.data.sources import DataContext, generated, read_sequences
from common.data.tasks import check_lengths, has_split, load_task, tokenize
from common.data.text import TOKEN, TOKENS, TooShort, packed_rows
from common.models.equivalence import COMPARED, compare
from common.models.head import head_of
from common.models.load import bos_prefix, load_config
from common.run.artifact import load_record, resolved
from common.run.errors import UserError
from common.run.files import write_text
from common.training.checkpoints import of_first_rank
from common.training.lines import CHAT_SET, START, TASK_SET, TEXT_SET
from common.training.packing import rows_of_step
from common.training.sharding import release

QUESTIONS = 16  # of each task, where it has a validation split
CHAT_TOKENS = "chats.jsonl"  # beside TOKENS, in a directory of RUN/tokens/


@dataclass(frozen=True)
class Heldout:
    """Sets of samples kept out of training, and how often the student is measured on them.

    A set whose samples have answers is measured on its answer tokens, a set of texts on every token but each
    text's first. The measured texts and chats choose the checkpoint that stage 6 exports; as many others are
    left for stage 7, and are neither trained on nor measured here.
    """

    sets: dict[str, list[Sample]]  # some of SETS -> samples, at least one
    every: int  # steps between measurements
    left: str | None = None  # the directory of the others, from keep_unmeasured

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
    Raises UserError for chats or questions that cannot be read, and for questions that are too long.
    """
    chats = split_samples(list(dict.fromkeys(sources.chat)), sources, context, chats=True)
    sets = {TEXT_SET: texts[::2], CHAT_SET: chats[::2], TASK_SET: heldout_questions(sources, context)}
    sets = {name: samples for name, samples in sets.items() if samples}
    return Heldout(sets, every, keep_unmeasured(texts[1::2], chats[1::2], context))


def keep_unmeasured(texts: list[Sample], chats: list[Sample], context: DataContext) -> str | None:
    """Write texts of one length to TOKENS, [n, length], and chats to CHAT_TOKENS, for stage 7's --text and
    --chat, in a directory of RUN/tokens/, unless it has them. Returns the directory; None without samples.
    """
    if not texts and not chats:
        return None

    def write(directory: str) -> str:
        if texts:
            np.save(os.path.join(directory, TOKENS), np.array([text.prompt for text in texts], TOKEN))
        if chats:
            write_text(os.path.join(directory, CHAT_TOKENS), token_lines(chats))
        return f"{len(texts)} texts and {len(chats)} chats held out for stage 7"

    return context.stored("held-out-", [samples_digest([*texts, *chats])], write)[0]


def heldout_texts(sources: Sources, context: DataContext) -> list[Sample]:
    """Twice `heldout_sequences` texts of `text_length` tokens; with SPLIT at most as many.

    Raises UserError for text that cannot be read, is too short, or is trained on.
    """
    source, length, count = sources.heldout_text, sources.text_length, 2 * sources.heldout_sequences
    if source == SPLIT:  # files first: a fault in one is found before text is generated
        return split_samples(sorted(dict.fromkeys(sources.text), key=is_generated), sources, context)
    if source == NONE:
        return []
    trained_on = set()
    if is_text_file(parse_source(source)):
        trained_on = of_first_rank(shared_with_training(sources, context) if context.ranks.first else None)

    def read() -> tuple[list[Sample], str]:
        tokens, description = read_sequences(source, None, context, count, length, EVALUATION, trained_on)
        return [Sample(ids) for ids in tokens.tolist()], description

    samples, description = context.kept(source, ["held out", count, length], read)
    without = f" without {len(trained_on)} documents or blocks that training or calibration reads"
    context.ranks.say(f"reads   {description}; held out{without if trained_on else ''}")
    return samples


def is_text_file(source: documents.Source) -> bool:
    """Whether it is a file, and has text, not tokens."""
    has_text = not source.endless and not isinstance(source, documents.TokenFile)
    return has_text and os.path.isfile(source.name)


def shared_with_training(sources: Sources, context: DataContext) -> set[bytes]:
    """The digests of what a file for --heldout-text shares with --text and with what RUN's calibration read.

    Raises UserError if they share all of it.
    """
    source, run = parse_source(sources.heldout_text), context.run
    source.check()
    record = load_record(os.path.join(run, "calibration"))
    calibrated = resolved(run, record["arguments"]["text"]) if record else NONE
    others = list(filter(is_text_file, map(parse_source, dict.fromkeys([*sources.text, calibrated]))))
    own = set(map(digest_of, source.contents(EVALUATION)))
    shared = {digest for text in others for digest in map(digest_of, text.contents(TRAIN)) if digest in own}
    if shared and shared == own:
        raise UserError(f"--heldout-text {source.name}: expected text that training and calibration do not "
                        f"read, found all of it in {' '.join(text.name for text in others)}")
    return shared


def split_samples(names: list[str], sources: Sources, context: DataContext, chats=False) -> list[Sample]:
    """At most twice `heldout_sequences` texts or chats of the held-out parts of these sources, from each as
    many, as far as it has them. Raises UserError for what cannot be read.
    """
    count, length, samples = 2 * sources.heldout_sequences, sources.text_length, []
    kind, begin = ("chats", []) if chats else (f"texts of {length} tokens", bos_prefix(context.tokenizer()))
    for name in names if count else ():
        if is_generated(name):
            share = heldout_share(name, names, count, generated_rows(sources, len(begin)))
            found = generated_samples(name, context, share, length, chats)
        else:
            share = heldout_share(name, names, count)
            read = partial(read_held_out, name, context, share, length, chats)
            found, _ = context.kept(name, [kind, share], read)
        samples += found
        few = "" if found else ": its held-out part is too short"
        context.ranks.say(f"reads   {name}: {len(found)} {kind}, held out{few}")
    return samples[:count]


def heldout_share(source: str, sources, count: int, trained: int = 0) -> int:
    """Of `count` samples to hold out of all sources, this one's share; of generated ones at most a tenth of
    those `trained` on, but two.
    """
    share = -(-count // len(sources))
    return min(share, max(2, trained // 10)) if is_generated(source) else share


def generated_samples(source: str, context: DataContext, count: int, length: int,
                      chats: bool) -> list[Sample]:
    """Texts or chats of the model, of the held-out seed; none where documents to continue are too short."""
    try:
        rows = generated(source, context, count, length, HELDOUT, chats)
    except TooShort:
        return []
    return as_samples(rows) if chats else list(map(Sample, rows.tolist()))


def read_held_out(source: str, context: DataContext, count: int, length: int,
                  chats: bool) -> tuple[list[Sample], str]:
    """At most `count` texts or chats of a source's held-out part, for DataContext.kept."""
    tokenizer = context.tokenizer()
    if not chats:
        begin = bos_prefix(tokenizer)
        rows = packed_rows(source, tokenizer, count, length - len(begin), HELDOUT)
        return [Sample(begin + row) for row in rows], ""
    try:
        positions = load_config(context.model).max_position_embeddings
        return load_chats(source, tokenizer, positions, HELDOUT, most=count)
    except TooShort:
        return [], ""


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
