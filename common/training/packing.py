"""Batches: which samples step t holds, how a rank packs its share into rows, and what each token weighs in the loss.

Everything here is a pure function of (seed, step, rank, world), so a resumed run needs no sampler state.
"""

import functools
from dataclasses import dataclass, fields, replace

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.data.tasks import Sample
from common.models import window_mask


@functools.lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def batch_indices(step: int, batch: int, samples: int, seed: int) -> list[int]:
    """Sample numbers of step `step` (from 0): consecutive pieces of one shuffle after another."""
    positions = range(step * batch, (step + 1) * batch)
    return [int(_order(samples, seed, p // samples)[p % samples]) for p in positions]


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Positions in `lengths` laid into rows of at most `capacity` tokens, longest first, first row that fits.

    A sample longer than the capacity gets a row of its own.
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
    """One micro-batch: samples end to end in a single sequence of T tokens.

    position_ids restart at every sample: attention does not cross samples, by `packed_attention` or, under transformers'
    own implementations, by the block-diagonal mask they derive from the restarts.
    Weights belong to the position that *predicts* a token: 1 / (the sample's predicted tokens of that part) / global
    batch size, and 0 elsewhere, so that a weighted sum over all rows and ranks is the batch's loss. targets: the next
    token, 0 where nothing is predicted. The positions of either part are listed apart, since they carry other losses.
    """

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    targets: torch.Tensor  # [T]
    prompt_weight: torch.Tensor  # [T] float32
    answer_weight: torch.Tensor  # [T] float32
    all_weight: torch.Tensor  # [T] float32, both parts as one
    prompt_at: torch.Tensor  # positions that predict a prompt token
    answer_at: torch.Tensor  # positions that predict an answer token
    lengths: tuple[int, ...]  # tokens of each sample

    def to(self, device) -> "Row":
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self) if field.name != "lengths"}
        return replace(self, **moved)


def packed_attention(module, query, key, value, attention_mask, sample_lengths=None, sliding_window=None, **kwargs):
    """Causal attention of each sample of a row by itself, with torch's fused kernel and without a T x T mask.

    query [1, H, T, d], key and value [1, G, T, d] -> [1, T, H, d]. transformers calls it in models built with
    attn_implementation="packed"; sample_lengths, which sum to T, reach it through the model's forward. None: one sample.
    sliding_window: positions that a token sees, its own included; None for all. Only a sample that is longer needs a mask.
    """
    parts = (states.split(sample_lengths or query.shape[2], dim=2) for states in (query, key, value))
    alone = []
    for sample in zip(*parts, strict=True):
        mask = window_mask(sample[0].shape[2], sliding_window, query.device)
        alone.append(sdpa_attention_forward(module, *sample, mask, is_causal=mask is None, **kwargs)[0])
    return torch.cat(alone, dim=1), None


AttentionInterface.register("packed", packed_attention)


def build_row(samples: list[Sample], batch: int) -> Row:
    """Lay samples end to end. batch: the global batch size that the weights divide by."""
    ids, positions, targets, prompt_weight, answer_weight, all_weight = [], [], [], [], [], []
    for sample in samples:
        tokens = [*sample.prompt, *sample.answer]
        prompt, answer = len(sample.prompt) - 1, len(sample.answer)  # predicted tokens of either part
        ids += tokens
        positions += range(len(tokens))
        targets += [*tokens[1:], 0]
        prompt_weight += [1 / prompt / batch] * prompt + [0] * (answer + 1)
        answer_weight += [0] * prompt + [1 / answer / batch] * answer + [0]
        all_weight += [1 / (prompt + answer) / batch] * (prompt + answer) + [0]
    weights = [torch.tensor(weight) for weight in (prompt_weight, answer_weight, all_weight)]
    return Row(torch.tensor([ids]), torch.tensor([positions]), torch.tensor(targets), *weights,
               *(weight.nonzero()[:, 0] for weight in weights[:2]), tuple(map(len, samples)))


def rows_of_step(samples: list[Sample], step: int, batch: int, seed: int, capacity: int, rank: int, world: int) -> list[Row]:
    """This rank's rows of a step. Every rank gets the same number (a row that predicts nothing where it has fewer),
    because sharded layers communicate in step."""
    indices = batch_indices(step, batch, len(samples), seed)
    shares = [indices[r::world] for r in range(world)]
    packed = [pack([len(samples[i]) for i in share], capacity) for share in shares]
    rows = [build_row([samples[shares[rank][p]] for p in row], batch) for row in packed[rank]]
    for _ in range(max(map(len, packed)) - len(rows)):
        idle = build_row([samples[indices[0]]], batch)
        for of_losses in (idle.prompt_weight, idle.answer_weight, idle.all_weight):
            of_losses.zero_()
        rows.append(replace(idle, prompt_at=idle.prompt_at[:0], answer_at=idle.answer_at[:0]))
    return rows
