"""The training loop around a step: packed rows, learning rate, clipping, metrics, checkpoints, signals.

The body of a step is the caller's: `for step in steps(job, ...)`, as in 05_prune_train.py.
"""

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from common.run.errors import UserError
from common.training import checkpoints
from common.training.attention import Trainee
from common.training.metrics import Metrics
from common.training.packing import Row, rows_ahead, split_over_ranks
from common.training.sharding import Ranks, reduce_gradients, signals_to

EPOCHS = {2: 5, 4: 10, 8: 15}  # source kv heads per group -> epochs over the training sets (Table 1)
FEWEST_STEPS, BATCHES = 250, (2, 64)  # the batch is chosen for so many steps within these limits
PARENT = os.getppid()  # of a rank, torchrun's agent: where it is killed, nobody else stops the ranks
STOPPED = 75  # exit code when a signal stopped training: EX_TEMPFAIL of sysexits.h, "try again later"


@dataclass(frozen=True)
class Schedule:
    """The hyperparameters of the loop in one training phase."""

    steps: int
    batch: int  # samples per step, over all ranks
    warmup: int  # steps of linear warm-up, followed by cosine decay
    clip: float  # maximum gradient norm, 0: no clipping
    seed: int
    tokens_per_microbatch: int
    save_steps: int | None  # steps between checkpoints; None: save_minutes alone decides
    save_minutes: float  # maximum time between checkpoints
    print_every: int  # steps between printed lines
    loss_chunk: int = 512  # tokens whose logits are in memory at a time
    reduce: str = "step"  # when gradients are reduced over ranks: once a "step" or after every "row"

    def rate(self, step: int) -> float:
        """Learning rate at `step` (from 0) as a share of the peak: linear warm-up, then cosine decay to 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))

    def to_resume(self) -> dict:
        """The settings that must match on resume: all but those for saving, printing and memory."""
        free = ("save_steps", "save_minutes", "print_every", "loss_chunk")
        return {name: value for name, value in asdict(self).items() if name not in free}


def published_epochs(group_size: int) -> int:
    """The paper's epochs over the training sets. Raises UserError for a group size it does not cover."""
    if group_size not in EPOCHS:
        raise UserError(f"--epochs: no published value for groups of {group_size} kv heads (published: "
                        f"groups of {', '.join(map(str, EPOCHS))}); pass --epochs or --steps")
    return EPOCHS[group_size]


def batch_for(samples: int) -> int:
    """Samples per step where no flag says it: as many as leave FEWEST_STEPS, within BATCHES."""
    return min(max(samples // FEWEST_STEPS, BATCHES[0]), BATCHES[1])


def warmup_for(default: int, steps: int, share: int = 10) -> int:
    """Steps of warm-up where no flag says it: the default, but at most one in `share` steps."""
    return max(1, min(default, steps // share))


def epochs_to_steps(epochs: float, samples: int, batch: int) -> int:
    """Steps of `batch` samples in this many epochs over the training sets; at least 1."""
    return max(1, math.ceil(epochs * samples / batch))


@dataclass
class Job:
    """A training run: the model, its optimizer, the directory of its checkpoints, and the steps completed."""

    trainee: Trainee
    optimizer: torch.optim.Optimizer  # each group carries its peak learning rate as "initial_lr"
    directory: str
    ranks: Ranks
    flops: Callable[[Row], float] = lambda row: 0.0  # model FLOPs of a row, forward and backward; 0: unknown
    step: int = 0
    stopped: bool = False  # by a signal


def make_optimizer(trainee: Trainee, options: dict, special: dict[str, dict]):
    """AdamW over all parameters of a trainee, including the replicated ones; frozen ones get no state.

    special: pattern -> options for parameters whose name it matches (the first match wins); `options` apply
    to the rest, which form the first group. Options are AdamW's, with the peak learning rate as "initial_lr".
    """
    groups = {pattern: {"params": [], **chosen} for pattern, chosen in ({"": options} | special).items()}
    for name, parameter in trainee.named_parameters():
        pattern = next((pattern for pattern in special if re.search(pattern, name)), "")
        groups[pattern]["params"].append(parameter)
    filled = [group for group in groups.values() if group["params"]]
    on_gpu = next(trainee.parameters()).is_cuda
    return torch.optim.AdamW(filled, lr=options["initial_lr"], fused=on_gpu)


class Step:
    """One training step. Its body calls backward for each of the rows, then update once.

    The host reads nothing from the device before all work but the update is queued: it waits for it once, in
    update, to see that the loss and the gradient are finite.
    """

    def __init__(self, job: Job, schedule: Schedule, rows: list[Row], samples: list, began: float = 0.0):
        self.job, self.schedule, self._rows, self.samples = job, schedule, rows, samples
        self.number, self.began = job.step, began  # from 0; by time.perf_counter
        self.metrics: dict = {}  # of metrics.jsonl
        busy = [row for row in rows if not row.is_idle]
        counts = {"tokens": sum(row.input_ids.numel() for row in busy), "flops": sum(map(job.flops, busy))}
        # this rank's sums over its rows, float64 on its device
        self.totals = {name: torch.full((), count, dtype=torch.float64, device=job.ranks.device)
                       for name, count in counts.items()}

    @property
    def rows(self) -> Iterator[Row]:
        """This rank's packed samples, a packed row at a time, on its device."""
        for number, row in enumerate(self._rows, 1):
            last, every_row = number == len(self._rows), self.schedule.reduce == "row"
            reduce_gradients(self.job.trainee, last, every_row)
            yield row.to(self.job.ranks.device)

    def backward(self, loss: torch.Tensor, **terms: torch.Tensor) -> None:
        """Accumulate the gradients of a row's share of the batch loss, and its terms for metrics.jsonl."""
        (loss * self.job.ranks.world).backward()  # FSDP averages over ranks; the batch loss is a sum
        for name, term in (terms | {"loss": loss}).items():
            self.totals[name] = self.totals.get(name, 0) + term.detach().double()

    def update(self, **metrics) -> None:
        """Clip the gradients and take the optimizer's step. metrics: others for metrics.jsonl, numbers or
        tensors on any device.

        Raises UserError on a loss or gradient that is not finite, before the step.
        """
        job, optimizer = self.job, self.job.optimizer
        summed = torch.stack(list(self.totals.values()))
        dist.all_reduce(summed)
        norm = clip_gradients(job.trainee, self.schedule.clip)
        sums = dict(zip(self.totals, summed.tolist(), strict=True))
        if not norm and not job.trainee.replicated:  # masks change by Eq. 29, too
            raise UserError(f"step {self.number + 1}: expected a gradient, found zeros: nothing to learn")
        norm = round(float(norm), 6)
        if not math.isfinite(sums["loss"] + norm):  # before the update, so that no checkpoint contains it
            self._refuse_non_finite(norm)
        optimizer.step()
        optimizer.zero_grad()
        self.metrics |= sums
        for name, figure in metrics.items():
            self.metrics[name] = figure.tolist() if torch.is_tensor(figure) else figure
        seconds = round(time.perf_counter() - self.began, 4)
        self.metrics |= {"lr": optimizer.param_groups[0]["lr"], "grad_norm": norm, "seconds": seconds}

    def _refuse_non_finite(self, norm: float) -> None:
        """Raise UserError on every rank, naming the ranks with a non-finite loss and their samples."""
        schedule, world = self.schedule, self.job.ranks.world
        shares = split_over_ranks(self.samples, self.number, schedule, world)
        losses = [None] * world
        dist.all_gather_object(losses, float(self.totals["loss"]))
        faults = [f"rank {rank}: loss {loss}, samples {shares[rank]}"
                  for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        fault = "; ".join(faults) or f"a gradient of norm {norm}, samples {sorted(sum(shares, []))}"
        raise UserError(f"step {self.number + 1}: expected a finite loss, found {fault}; "
                        "the last checkpoint is kept")


@contextlib.contextmanager
def signals_noted():
    """Context manager: signals that ask to stop set a flag, so that the step and its checkpoint complete.

    Raises KeyboardInterrupt if it is set at the end, by one that came after the last step.
    """
    flag = threading.Event()
    with signals_to(lambda *_: flag.set()):
        yield flag
    if flag.is_set():
        raise KeyboardInterrupt


def steps(job: Job, schedule: Schedule, samples: list, until: int | None = None) -> Iterator[Step]:
    """Yield each Step from job.step to `until` (default: schedule.steps).

    Before its body: this rank's rows and the learning rate. After it: a line of metrics.jsonl, a checkpoint
    as scheduled and at the end, and job.stopped if a signal came, which ends the loop.
    """
    until = until or schedule.steps
    saved, job.stopped = time.perf_counter(), False
    batches = rows_ahead(samples, range(job.step, until), schedule, job.ranks)
    with (signals_noted() as asked_to_stop, contextlib.closing(Metrics(job, schedule)) as metrics,
          contextlib.closing(batches)):
        while job.step < until and not job.stopped:
            began = time.perf_counter()
            step = Step(job, schedule, next(batches), samples, began)
            for group in job.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * schedule.rate(step.number)
            yield step
            job.step += 1
            metrics.write({"step": job.step} | step.metrics)
            minutes = (time.perf_counter() - saved) / 60
            late = job.ranks.first and minutes > schedule.save_minutes  # one clock decides
            orphan = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT
            job.stopped, late = on_any_rank(asked_to_stop.is_set() or orphan, late)
            regular = schedule.save_steps and job.step % schedule.save_steps == 0
            if job.stopped or late or regular or job.step == until:
                if not total_norm(job.trainee.net.parameters()).isfinite():
                    raise UserError(f"step {job.step}: expected finite weights, found NaN or Inf; the last "
                                    "checkpoint is kept")
                checkpoints.save(job)
                saved = time.perf_counter()
        if job.stopped:
            asked_to_stop.clear()  # handled
    if job.stopped:
        job.ranks.say(f"stopped by a signal after step {job.step}; the same command resumes from there")


def on_any_rank(*flags: bool) -> list[bool]:
    """Whether any rank raises each flag; the same result on every rank."""
    raised = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(raised)
    return [count > 0 for count in raised.tolist()]


def clip_gradients(trainee, clip: float) -> torch.Tensor:
    """Clip the model's gradients to norm `clip` (0: no clipping). Returns the norm before clipping, a scalar.

    Replicated parameters are neither counted nor scaled.
    """
    weights = [p for p in trainee.net.parameters() if p.grad is not None]
    norm = total_norm(p.grad for p in weights)
    if clip:
        torch.nn.utils.clip_grads_with_norm_(weights, clip, norm)
    return norm


@torch.no_grad()
def total_norm(tensors) -> torch.Tensor:
    """The norm of all tensors, sharded or not; a scalar, the same on every rank."""
    norm = torch.nn.utils.get_total_norm(list(tensors))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
