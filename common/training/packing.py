"""Batches: the samples of each step, packed into rows, and each token's weight in the loss.

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


def split_over_ranks(samples: list[Sample], step: int, schedule, world: int) -> list[list[int]]:
    """The sample indices of each rank's share of a step, in the order of the batch.

    The longest go first, each to the rank that has the fewest tokens: the slowest rank makes a step.
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
    shares = split_over_ranks(samples, step, schedule, ranks.world)
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
