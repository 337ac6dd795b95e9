"""Held-out measurement: how close the student is to its teacher on samples that it is not trained on."""

import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from common.data.samples import Sample
from common.method.losses import cross_entropy, kl
from common.training.packing import rows_of_step

TEXT_SET, TASK_SET = SETS = ("heldout", "heldout_task")  # prefixes of the figures' names
COMPARED = ("kl", "loss", "teacher_loss", "agreement")  # figures of a set of samples


@dataclass(frozen=True)
class Heldout:
    """Sets of samples kept out of training, and how often the student is measured on them.

    A set whose samples have answers is measured on its answer tokens, a set of texts on every token but each
    text's first.
    """

    sets: dict[str, list[Sample]]  # TEXT_SET, TASK_SET or both -> samples, at least one
    every: int  # steps between measurements

    def due(self, step: int, steps: int) -> bool:
        """Whether to measure after `step` (from 1) of `steps`: the first, the last and every `every`-th."""
        return step in (1, steps) or step % self.every == 0

    def measurements(self, steps: int) -> int:
        """The number of measurements in `steps` steps."""
        return sum(self.due(step, steps) for step in range(1, steps + 1))

    @torch.no_grad()
    def figures(self, phase, plan, ranks) -> dict[str, float]:
        """Means over a set's tokens, named PREFIX_NAME for NAME in COMPARED, and heldout_seconds.

        kl: KL(teacher || student); loss, teacher_loss: next-token loss of either, in nats; agreement: share
        of positions at which both predict the same token. phase: a Distillation. All ranks call this, each
        for its share of the samples, and get the same figures. The next training step is the same with and
        without it.
        """
        began, figures = time.perf_counter(), {}
        phase.begin_measurement()
        phase.student.eval()
        for prefix, samples in self.sets.items():
            answers = any(sample.answer_tokens for sample in samples)
            rows = rows_of_step(samples, 0, replace(plan, batch=len(samples)), ranks)  # each sample once
            sums = torch.zeros(1 + len(COMPARED), dtype=torch.float64, device=ranks.device)
            for row in rows:
                row = row.to(ranks.device)
                sums += compare(phase, row, row.answer_at if answers else row.prompt_at)
            dist.all_reduce(sums)
            tokens, *totals = sums.tolist()
            for name, total in zip(COMPARED, totals, strict=True):
                figures[f"{prefix}_{name}"] = total / tokens
        phase.student.train()
        phase.student.reshard()  # without a backward pass, FSDP keeps the root's weights gathered
        return figures | {"heldout_seconds": round(time.perf_counter() - began, 4)}


def compare(
    phase,
    row,
    positions: torch.Tensor,  # [n] of the row's tokens that predict one
) -> torch.Tensor:
    """[5] float64: n, and sums over these positions of the figures in COMPARED.

    Logits are in memory for phase.settings.loss_chunk tokens at a time.
    """
    teacher_hidden, teacher_head = phase.teacher(row), phase.teacher.net.lm_head

    def sums_of(hidden, lm_head):
        sums = torch.zeros(1 + len(COMPARED), dtype=torch.float64, device=hidden.device)
        for at in positions.split(phase.settings.loss_chunk):
            student, teacher = lm_head(hidden[at]).float(), teacher_head(teacher_hidden[at]).float()
            losses = (cross_entropy(logits, row.targets[at]) for logits in (student, teacher))
            columns = (kl(student, teacher), *losses, student.argmax(-1) == teacher.argmax(-1))
            sums[0] += len(at)
            sums[1:] += torch.stack([column.double().sum() for column in columns])
        return sums

    return phase.student(row, sums_of)
