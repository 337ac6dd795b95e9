"""Batches: the samples of each step, packed into rows, each token's weight in the loss, and the losses.

Packed rows are a pure function of (seed, step, rank, world), so a resumed run needs no sampler state: it goes
on at the step of its checkpoint.
"""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from common.data.rows import Sample
from common.method.losses import bild, chunked, cross_entropy, kl, product


@functools.lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(samples, generator=generator)


def batch_indices(step: int, batch: int, samples: int, seed: int) -> list[int]:
    """Sample indices of step `step` (from 0): consecutive slices of one shuffled epoch after another."""
    positions = range(step * batch, (step + 1) * batch)
    return [int(_order(samples, seed, p // samples)[p % samples]) for p in positions]


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` packed into rows of at most `capacity` tokens by first-fit decreasing.

    A sample longer than the capacity gets a row to itself.
    """
    rows, room = [], []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, left in enumerate(room) if left >= lengths[position]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(position)
        room[row] -= lengths[position]
    return rows


@dataclass
class Row:
    """One micro-batch: samples concatenated into a single sequence of T tokens.

    position_ids restart at every sample. Attention does not cross samples: packed_attention sees to it, or
    the block-diagonal mask that transformers' implementations derive from the restarts. A weight belongs to
    the position that *predicts* a token: 1 / (tokens the sample predicts in that part) / global batch size,
    and 0 elsewhere, so that the weighted sum over all rows and ranks is the batch loss.
    """

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    targets: torch.Tensor  # [T], the next token; 0 where nothing is predicted
    prompt_weight: torch.Tensor  # [T] float32
    answer_weight: torch.Tensor  # [T] float32
    all_weight: torch.Tensor  # [T] float32, prompt and answer as one part
    prompt_at: torch.Tensor  # positions that predict a prompt token
    answer_at: torch.Tensor  # positions that predict an answer token
    starts: torch.Tensor  # [samples + 1] int32, each sample's first token in the row, then T
    lengths: tuple[int, ...]  # tokens in each sample

    @property
    def is_idle(self) -> bool:
        """Whether it predicts nothing."""
        return not len(self.prompt_at) + len(self.answer_at)

    def _each(self, function) -> "Row":
        tensors = [field.name for field in fields(self) if field.name != "lengths"]
        return replace(self, **{name: function(getattr(self, name)) for name in tensors})

    def pinned(self) -> "Row":
        """A copy in page-locked memory, from which a GPU copies while the host goes on."""
        return self._each(torch.Tensor.pin_memory)

    def to(self, device) -> "Row":
        """A copy on a device. The host does not wait for it."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))


def _columns(sample: Sample, batch: int) -> tuple[np.ndarray, ...]:
    """A sample's share of a row: [tokens] each of ids, positions, targets and the three weights."""
    ids, lengths = np.concatenate(sample.segments), list(map(len, sample.segments))
    is_answer = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)  # prompt and answer in turn
    positions = np.arange(len(ids))
    follows = positions < len(ids) - 1  # the last token predicts nothing
    next_is_answer = np.append(is_answer[1:], False)
    parts = (follows & ~next_is_answer, next_is_answer, follows)
    weights = (part / max(1, part.sum()) / batch for part in parts)  # equal, 1 / batch in total
    return ids, positions, np.append(ids[1:], 0), *weights


def build_row(samples: list[Sample], batch: int) -> Row:
    """Concatenate samples into a row. batch: the global batch size, which divides the weights."""
    parts = zip(*(_columns(sample, batch) for sample in samples), strict=True)
    ids, positions, targets, *weights = (torch.from_numpy(np.concatenate(part)) for part in parts)
    prompt, answer, both = (weight.float() for weight in weights)
    lengths = tuple(map(len, samples))
    starts = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)
    return Row(ids.long()[None], positions[None], targets.long(), prompt, answer, both,
               prompt.nonzero()[:, 0], answer.nonzero()[:, 0], starts, lengths)


def dealt(samples: list[Sample], step: int, schedule, world: int) -> list[list[int]]:
    """The sample indices of each rank's share of a step, in the order of the batch.

    The longest is dealt first, each to the rank that has the fewest tokens: the slowest rank makes a step.
    """
    indices = batch_indices(step, schedule.batch, len(samples), schedule.seed)
    lengths, tokens = [len(samples[i]) for i in indices], [0] * world
    shares = [[] for _ in range(world)]
    for position in sorted(range(len(indices)), key=lambda i: (-lengths[i], i)):
        rank = tokens.index(min(tokens))
        shares[rank].append(position)
        tokens[rank] += lengths[position]
    return [[indices[position] for position in sorted(share)] for share in shares]


def rows_of_step(samples: list[Sample], step: int, schedule, ranks) -> list[Row]:
    """This rank's rows for a step, padded with idle rows to the same number on every rank.

    Sharded layers communicate in every row, so ranks need equally many. schedule: an object with batch
    (samples over all ranks), seed and tokens_per_microbatch; ranks: one with rank and world.
    """
    shares = dealt(samples, step, schedule, ranks.world)
    packed = [pack([len(samples[i]) for i in share], schedule.tokens_per_microbatch) for share in shares]
    rows = []
    for row in packed[ranks.rank]:
        rows.append(build_row([samples[shares[ranks.rank][position]] for position in row], schedule.batch))
    idle = max(map(len, packed)) - len(rows)
    return rows + [idle_row(samples[shares[0][0]]) for _ in range(idle)]


def idle_row(sample: Sample) -> Row:
    """A row that predicts nothing: its rank takes part in communication but adds nothing to the loss."""
    row = build_row([sample], 1)
    for weight in (row.prompt_weight, row.answer_weight, row.all_weight):
        weight.zero_()
    return replace(row, prompt_at=row.prompt_at[:0], answer_at=row.answer_at[:0])


def rows_ahead(samples: list[Sample], steps: range, schedule, ranks):
    """Yield rows_of_step for each of these steps. A thread builds the next step's packed rows meanwhile.

    For a GPU they are pinned. Closing the generator ends the thread.
    """
    cuda = ranks.device.type == "cuda"

    def rows_of(step: int) -> list[Row]:
        rows = rows_of_step(samples, step, schedule, ranks)
        return [row.pinned() for row in rows] if cuda else rows

    # a thread starts on the first GPU, where pinning would take memory for every rank
    starts_on = {"initializer": torch.cuda.set_device, "initargs": (ranks.device,)} if cuda else {}
    with ThreadPoolExecutor(1, **starts_on) as thread:
        ahead = thread.submit(rows_of, steps.start)
        for step in steps:
            rows = ahead.result()
            if step + 1 < steps.stop:
                ahead = thread.submit(rows_of, step + 1)
            yield rows


def next_token_loss(
    trainee,
    row,
    at: torch.Tensor,  # [n] positions that predict a token
    weight: torch.Tensor,  # [T] float32, of each position in the batch
    chunk: int,  # tokens whose logits are in memory at a time
) -> torch.Tensor:
    """The row's share of the batch's mean cross-entropy, a scalar.

    SFT counts answer tokens: row.answer_at and row.answer_weight.
    """

    def loss(kind, at, logits):
        return (cross_entropy(logits, row.targets[at]) * weight[at]).sum()

    pieces = [("next token", part) for part in at.split(chunk)]
    return trainee(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight))


def distillation_loss(
    student,
    row,
    teacher_hidden: torch.Tensor,  # [T, hidden], the teacher's for this row
    teacher_head,  # its lm_head
    kl_on: str,  # tokens of the KL term: "prompt", as in the authors' code, or "all"
    temperature: float,  # of the KL term
    chunk: int,  # tokens whose logits are in memory at a time
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Eq. 30: L = KL(teacher || student) on prompt tokens + BiLD(student, teacher) on answer tokens.

    Each term is a mean over a sample's tokens, then over the batch, by the weights in the row; this is the
    row's share. A text has no answer, so all its tokens get the KL. Returns L, differentiable, and its terms
    "kl" and "bild", detached: scalars.
    """
    kl_weight = row.all_weight if kl_on == "all" else row.prompt_weight
    parts = {name: torch.zeros((), device=row.targets.device) for name in ("kl", "bild")}

    def loss(part, at, student_logits):  # [c, V], of the tokens `at`: all prompt or all answer
        with torch.no_grad():
            teacher_logits = product(teacher_hidden[at], teacher_head.weight.T)
        terms = {}
        if part == "prompt" or kl_on == "all":
            terms["kl"] = (kl(student_logits, teacher_logits, temperature) * kl_weight[at]).sum()
        if part == "answer":
            terms["bild"] = (bild(student_logits, teacher_logits) * row.answer_weight[at]).sum()
        for name, term in terms.items():
            parts[name] += term.detach()
        return sum(terms.values())

    pieces = [("prompt", at) for at in row.prompt_at.split(chunk)]
    pieces += [("answer", at) for at in row.answer_at.split(chunk)]
    total = student(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight))
    return total, parts
