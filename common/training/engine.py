"""The training loop, shared by all phases: a Job says what is trained, a Phase how its loss is computed."""

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
from common.training.heldout import Heldout
from common.training.metrics import Metrics
from common.training.packing import batch_indices, rows_ahead
from common.training.sharding import Ranks, Trainee, reduce_gradients, sum_over_ranks

STOPPED = 75  # exit code when a signal stopped training: EX_TEMPFAIL of sysexits.h, "try again later"


@dataclass(frozen=True)
class Plan:
    """The hyperparameters of one training phase."""

    steps: int
    batch: int  # samples per step, over all ranks
    warmup: int  # steps of linear warm-up, followed by cosine decay
    clip: float  # maximum gradient norm, 0: no clipping
    seed: int
    tokens_per_microbatch: int
    save_steps: int | None  # steps between checkpoints; None: save_minutes alone decides
    save_minutes: float  # maximum time between checkpoints
    print_every: int  # steps between printed lines
    final_share: float = 0.0  # learning rate at the end of the cosine, as a share of the peak
    reduce: str = "step"  # when gradients are reduced over ranks: once a "step" or after every "row"

    def to_resume(self) -> dict:
        """The settings that must match on resume: all but those for saving and printing."""
        free = ("save_steps", "save_minutes", "print_every")
        return {name: value for name, value in asdict(self).items() if name not in free}


@dataclass
class Job:
    """A training run: the model, its optimizer, the directory of its checkpoints, and the steps completed."""

    trainee: Trainee
    optimizer: torch.optim.Optimizer  # each group carries its peak learning rate as "initial_lr"
    directory: str
    ranks: Ranks
    step: int = 0


class Phase:
    """The interface of a training phase; common/training/distill.py has the paper's."""

    def begin_step(self, step: int) -> None:
        """Called before the first row of a step."""

    def row_loss(self, row) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One row's share of the batch loss, and its terms by name; all are summed over rows and ranks."""
        raise NotImplementedError

    def flops(self, row) -> float:
        """Model FLOPs of a row, forward and backward, without recomputation; 0 if unknown."""
        return 0.0

    def leaves(self, trainee: Trainee) -> list[torch.Tensor]:
        """Tensors held whole by every rank, whose gradients must be summed over ranks."""
        return list(trainee.replicated.values())

    def end_step(self, step: int) -> dict:
        """Called after gradients are summed, to add any others.

        Returns figures for metrics.jsonl, numbers or tensors on any device.
        """
        return {}

    def after_update(self, step: int) -> None:
        """Called after the optimizer step."""


def learning_rate(step: int, plan: Plan) -> float:
    """Learning rate at `step` (from 0) as a share of the peak: linear warm-up, then cosine decay.

    The cosine ends at plan.final_share.
    """
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - plan.warmup) / max(1, plan.steps - plan.warmup)))
    return plan.final_share + (1 - plan.final_share) * cosine


def make_optimizer(trainee: Trainee, options: dict, special: dict[str, dict] | None = None):
    """AdamW over all parameters of a trainee, including the replicated ones; frozen ones get no state.

    special: pattern -> options for parameters whose name it matches (the first match wins); `options` apply
    to the rest, which form the first group. Options are AdamW's, with the peak learning rate as "initial_lr".
    """
    special = special or {}
    groups = {pattern: {"params": [], **chosen} for pattern, chosen in ({"": options} | special).items()}
    for name, parameter in trainee.named_parameters():
        pattern = next((pattern for pattern in special if re.search(pattern, name)), "")
        groups[pattern]["params"].append(parameter)
    filled = [group for group in groups.values() if group["params"]]
    on_gpu = next(trainee.parameters()).is_cuda
    return torch.optim.AdamW(filled, lr=options["initial_lr"], fused=on_gpu)


class Signals:
    """Records SIGTERM and SIGINT within its block, so that the current step and its checkpoint complete."""

    def __enter__(self):
        self.asked: int | None = None
        self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number, frame) -> None:
        self.asked = number

    def __exit__(self, error, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.asked and error is None:  # arrived after the last step: leave it to the previous handler
            signal.raise_signal(self.asked)


def train(
    job: Job,
    phase: Phase,
    samples: list,
    plan: Plan,
    until: int | None = None,
    heldout: Heldout | None = None,
) -> bool:
    """Train from job.step to `until` (default: plan.steps), saving as planned and at the end.

    Writes checkpoints and metrics.jsonl (a line per step) to job.directory. heldout: samples to measure on
    now and then, which takes a Distillation. Returns False if SIGTERM or SIGINT stopped it, after saving.
    Raises UserError on a non-finite loss or gradient, before the update.
    """
    until = until or plan.steps
    metrics = Metrics(job, plan)
    batches = rows_ahead(samples, range(job.step, until), plan, job.ranks)
    saved, stop = time.perf_counter(), False
    with Signals() as signals, contextlib.closing(metrics), contextlib.closing(batches):
        while job.step < until and not stop:
            began = time.perf_counter()
            figures = run_step(job, phase, next(batches), samples, plan)
            job.step += 1
            figures["seconds"] = round(time.perf_counter() - began, 4)
            if heldout and heldout.due(job.step, plan.steps):
                figures |= heldout.figures(phase, plan, job.ranks)
            metrics.write({"step": job.step} | figures)
            minutes = (time.perf_counter() - saved) / 60
            late = job.ranks.first and minutes > plan.save_minutes  # one clock decides
            stop, late = on_any_rank(bool(signals.asked), late)
            if stop or late or job.step == until or (plan.save_steps and job.step % plan.save_steps == 0):
                checkpoints.save(job)
                saved = time.perf_counter()
        if stop:
            signals.asked = None  # handled
    if stop:
        job.ranks.say(f"stopped by a signal after step {job.step}; the same command resumes from there")
    return not stop


def on_any_rank(*flags: bool) -> list[bool]:
    """Whether any rank raises each flag; the same result on every rank."""
    raised = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(raised)
    return [count > 0 for count in raised.tolist()]


def run_step(job: Job, phase: Phase, rows: list, samples: list, plan: Plan) -> dict:
    """One training step on this rank's rows. Returns its figures, among them the batch's loss and tokens.

    The host reads nothing from the device before all work but the update is queued: it waits for it once, to
    see that the update is finite.
    """
    step = job.step
    factor = learning_rate(step, plan)
    for group in job.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    phase.begin_step(step)
    totals = backward(job, phase, rows, plan)
    figures = phase.end_step(step)
    summed = torch.stack(list(totals.values()))
    dist.all_reduce(summed)
    norm = clip_gradients(job.trainee, plan.clip)
    sums = dict(zip(totals, summed.tolist(), strict=True))
    norm = round(float(norm), 6)
    if not math.isfinite(sums["loss"] + norm):  # before the update, so that no checkpoint contains it
        batch = batch_indices(step, plan.batch, len(samples), plan.seed)
        _refuse_non_finite(float(totals["loss"]), norm, batch, job)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    phase.after_update(step)
    for name, figure in figures.items():
        sums[name] = figure.tolist() if torch.is_tensor(figure) else figure
    return sums | {"lr": factor * job.optimizer.param_groups[0]["initial_lr"], "grad_norm": norm}


def backward(job: Job, phase: Phase, rows: list, plan: Plan) -> dict[str, torch.Tensor]:
    """Accumulate the gradients of all rows of a step, reduced over ranks.

    Returns this rank's sums over rows of the loss, its terms, tokens and FLOPs: float64 on its device.
    """
    ranks = job.ranks
    busy = [row for row in rows if not row.is_idle]
    counts = {"tokens": sum(row.input_ids.numel() for row in busy), "flops": sum(map(phase.flops, busy))}
    totals = {name: torch.full((), count, dtype=torch.float64, device=ranks.device)
              for name, count in counts.items()}
    for number, row in enumerate(rows, 1):
        reduce_gradients(job.trainee, last=number == len(rows), every_row=plan.reduce == "row")
        loss, parts = phase.row_loss(row.to(ranks.device))
        (loss * ranks.world).backward()  # FSDP averages gradients over ranks; the batch loss is a sum
        for name, part in (parts | {"loss": loss}).items():
            totals[name] = totals.get(name, 0) + part.detach().double()
    sum_over_ranks(phase.leaves(job.trainee))
    return totals


def clip_gradients(trainee, clip: float) -> torch.Tensor:
    """Clip the model's gradients to norm `clip` (0: no clipping). Returns the norm before clipping, a scalar.

    Replicated parameters are neither counted nor scaled.
    """
    weights = [p for p in trainee.net.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in weights])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if clip:
        torch.nn.utils.clip_grads_with_norm_(weights, clip, norm)
    return norm


def _refuse_non_finite(rank_loss: float, norm: float, batch: list[int], job: Job) -> None:
    """Raise UserError on every rank, naming the ranks with a non-finite loss and their samples."""
    losses = [None] * job.ranks.world
    dist.all_gather_object(losses, rank_loss)
    faults = [f"rank {rank}: loss {loss}, samples {batch[rank :: job.ranks.world]}"
              for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    fault = "; ".join(faults) or f"a gradient of norm {norm}, samples {batch}"
    raise UserError(f"step {job.step + 1}: expected a finite loss, found {fault}; "
                    "the last checkpoint is kept")
