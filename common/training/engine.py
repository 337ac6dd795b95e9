"""The training loop: one plain loop for every phase. What is trained and how it is judged are given to it."""

import contextlib
import math
import re
import signal
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from common.cli import UserError
from common.training import checkpoints
from common.training.metrics import Metrics
from common.training.packing import batch_indices, rows_of_step
from common.training.sharding import Ranks, Trainee, sum_over_ranks

STOPPED = 75  # exit code of a training that a signal stopped: EX_TEMPFAIL of sysexits.h, "try again later"


@dataclass(frozen=True)
class Plan:
    """The numbers of one training phase."""

    steps: int
    batch: int  # samples per step, over all ranks
    warmup: int  # steps of linear warm-up, then a cosine
    clip: float  # largest gradient norm, 0: any
    seed: int
    tokens_per_microbatch: int
    save_steps: int | None  # steps between checkpoints, None: by time alone
    save_minutes: float  # the longest time between checkpoints
    print_every: int
    final_share: float = 0.0  # of the peak learning rate, where the cosine ends

    def to_resume(self) -> dict:
        """What a resumed training must share: all but when to save and print."""
        free = ("save_steps", "save_minutes", "print_every")
        return {name: value for name, value in asdict(self).items() if name not in free}


@dataclass
class Job:
    """A training under way: what is trained, how it is updated, where its checkpoints lie, and the steps
    done.
    """

    trainee: Trainee
    optimizer: torch.optim.Optimizer  # each group carries its peak learning rate as "initial_lr"
    directory: str
    ranks: Ranks
    step: int = 0


class Phase:
    """What the loop asks of a training phase; see common/training/distill.py for those of the paper."""

    def begin_step(self, step: int) -> None:
        """Before the first row of a step."""

    def row_loss(self, row) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One row's share of the batch's loss, and its parts by name; all are summed over rows and ranks."""
        raise NotImplementedError

    def flops(self, row) -> float:
        """Useful floating-point operations of a row, forward and backward, nothing counted twice; 0 if not
        known.
        """
        return 0.0

    def leaves(self, trainee: Trainee) -> list[torch.Tensor]:
        """Tensors that every rank holds whole and rows add gradients to: those gradients are summed over
        ranks.
        """
        return list(trainee.replicated.values())

    def end_step(self, step: int) -> dict:
        """After all gradients are summed: add those that rows do not give. Returns figures for
        metrics.jsonl.
        """
        return {}

    def after_update(self, step: int) -> None:
        """After the optimizer's step."""


def learning_rate(step: int, plan: Plan) -> float:
    """Share of the peak at step `step` (from 0): linear warm-up, then a cosine to plan.final_share at the
    last step.
    """
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - plan.warmup) / max(1, plan.steps - plan.warmup)))
    return plan.final_share + (1 - plan.final_share) * cosine


def make_optimizer(trainee: Trainee, options: dict, special: dict[str, dict] | None = None):
    """AdamW over all parameters of a trainee, the replicated ones included.

    special: pattern -> options of the parameters whose name it matches (the first pattern counts);
    `options` are those of the rest, the first group. Options are AdamW's, with the peak learning rate as
    "initial_lr".
    """
    special = special or {}
    groups = {pattern: {"params": [], **chosen} for pattern, chosen in ({"": options} | special).items()}
    for name, parameter in trainee.named_parameters():
        pattern = next((pattern for pattern in special if re.search(pattern, name)), "")
        groups[pattern]["params"].append(parameter)
    filled = [group for group in groups.values() if group["params"]]
    return torch.optim.AdamW(filled, lr=options["initial_lr"])


class Signals:
    """Turns SIGTERM and SIGINT into a note for the length of a block, so that a step and its checkpoint end
    whole.
    """

    def __enter__(self):
        self.asked: int | None = None
        self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number, frame) -> None:
        self.asked = number

    def __exit__(self, error, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.asked and error is None:  # too late for a step: the handler before this block answers
            signal.raise_signal(self.asked)


def train(job: Job, phase: Phase, samples: list, plan: Plan, until: int | None = None) -> bool:
    """Run a phase's steps from job.step to `until` (default: plan.steps), saving at the end and as often as
    the plan says.

    Writes checkpoints and metrics.jsonl (a line per step) in job.directory. Returns False when SIGTERM or
    SIGINT stopped it, after saving. Raises UserError on a non-finite loss or gradient, before the update.
    """
    until = until or plan.steps
    metrics = Metrics(job, plan)
    saved, stop = time.perf_counter(), False
    with Signals() as signals, contextlib.closing(metrics):
        while job.step < until and not stop:
            began = time.perf_counter()
            figures = run_step(job, phase, samples, plan)
            job.step += 1
            ended = time.perf_counter()
            metrics.write({"step": job.step} | figures | {"seconds": round(ended - began, 4)})
            late = job.ranks.first and ended - saved > 60 * plan.save_minutes  # by one clock
            stop, late = on_any_rank(bool(signals.asked), late)
            if stop or late or job.step == until or (plan.save_steps and job.step % plan.save_steps == 0):
                checkpoints.save(job)
                saved = time.perf_counter()
        if stop:
            signals.asked = None  # and answered
    if stop:
        job.ranks.say(f"stopped by a signal after step {job.step}; the same command resumes from there")
    return not stop


def on_any_rank(*flags: bool) -> list[bool]:
    """Whether any rank raises each flag: the same answer on all of them."""
    raised = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(raised)
    return [count > 0 for count in raised.tolist()]


def run_step(job: Job, phase: Phase, samples: list, plan: Plan) -> dict:
    """One step of training; returns its figures, the batch's loss and tokens among them."""
    ranks, step = job.ranks, job.step
    factor = learning_rate(step, plan)
    for group in job.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    rows = rows_of_step(samples, step, plan, ranks)
    phase.begin_step(step)
    totals: dict[str, torch.Tensor] = {}
    for row in rows:
        loss, parts = phase.row_loss(row.to(ranks.device))
        (loss * ranks.world).backward()  # FSDP averages gradients over ranks; the batch's loss is a sum
        for name, part in (parts | {"loss": loss, "tokens": torch.tensor(row.input_ids.numel())}).items():
            totals[name] = totals.get(name, 0) + part.detach().double().cpu()
    sum_over_ranks(phase.leaves(job.trainee))
    figures = phase.end_step(step)
    totals["flops"] = torch.tensor(sum(map(phase.flops, rows)), dtype=torch.float64)
    rank_loss = float(totals["loss"])
    summed = torch.stack(list(totals.values()))
    dist.all_reduce(summed)
    sums = dict(zip(totals, summed.tolist(), strict=True))
    norm = clip_gradients(job.trainee, plan.clip)
    if not math.isfinite(sums["loss"] + norm):  # before the update: no checkpoint ever holds what came of it
        _refuse_non_finite(rank_loss, norm, batch_indices(step, plan.batch, len(samples), plan.seed), job)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    phase.after_update(step)
    return sums | figures | {"lr": factor * job.optimizer.param_groups[0]["initial_lr"], "grad_norm": norm}


def clip_gradients(trainee, clip: float) -> float:
    """Scale the model's gradients to a norm of at most `clip` (0: leave them); returns the norm before.

    Replicated parameters neither count nor are scaled.
    """
    weights = [p for p in trainee.net.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in weights])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if clip:
        torch.nn.utils.clip_grads_with_norm_(weights, clip, norm)
    return round(float(norm), 6)


def _refuse_non_finite(rank_loss: float, norm: float, batch: list[int], job: Job) -> None:
    """Every rank raises UserError, naming the ranks whose loss it was and their samples. The last
    checkpoint stays.
    """
    losses = [None] * job.ranks.world
    dist.all_gather_object(losses, rank_loss)
    faults = [f"rank {rank}: loss {loss}, samples {batch[rank :: job.ranks.world]}"
              for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    fault = "; ".join(faults) or f"a gradient of norm {norm}, samples {batch}"
    raise UserError(f"step {job.step + 1}: expected a finite loss, found {fault}; "
                    "the last checkpoint is kept")
