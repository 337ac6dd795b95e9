"""The training loop: one plain loop for every phase. What is trained and how it is judged are given to it."""

import contextlib
import datetime
import json
import math
import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.cli import UserError
from common.training import checkpoints
from common.training.budget import peak_flops
from common.training.packing import batch_indices, rows_of_step
from common.training.sharding import Ranks

SHOWN = ("loss", "kl", "bild", "l0", "mask_target", "mask_expected", "grad_norm")  # on the line printed per step


@dataclass(frozen=True)
class Plan:
    """The numbers of one training phase."""

    steps: int
    batch: int  # samples per step, over all ranks
    warmup: int  # steps of linear warm-up; then cosine to 0
    clip: float  # gradient norm, 0 = off
    seed: int
    tokens_per_microbatch: int
    save_steps: int | None  # steps between checkpoints, None: by time alone
    save_minutes: float  # the longest time between checkpoints
    print_every: int


class Phase:
    """What the loop asks of a training phase; see 05_prune_train.py for the two of the paper."""

    def begin_step(self, step: int) -> None:
        """Before the first row of a step."""

    def row_loss(self, row) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One row's share of the batch's loss, and its parts by name; all are summed over rows and ranks."""
        raise NotImplementedError

    def flops(self, row) -> float:
        """Useful floating-point operations of a row, forward and backward, nothing counted twice; 0 where not known."""
        return 0.0

    def end_step(self, step: int) -> dict:
        """After the last backward pass: gradients of what is not sharded. Returns figures for metrics.jsonl."""
        return {}

    def after_update(self, step: int) -> None:
        """After the optimizer's step."""


def cosine(step: int, steps: int, warmup: int) -> float:
    """Learning-rate factor of step `step` (from 0): linear warm-up, then cosine to 0 at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Stopper:
    """Remembers SIGTERM and SIGINT until the end of a step, be it the next phase's."""

    asked = False

    def __init__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    @staticmethod
    def _ask(number, frame) -> None:
        Stopper.asked = True


def train(trainee, optimizer, phase: Phase, samples: list, plan: Plan, directory: str, ranks: Ranks, start: int = 0, until: int | None = None) -> bool:
    """Run a phase's steps start .. until (default: its last) and save at the end.

    optimizer: its groups carry "initial_lr". Writes checkpoints and metrics.jsonl (a line per step) in `directory`.
    Returns False when a signal asked it to stop, after saving. Raises UserError on a non-finite loss or gradient.
    """
    until = until or plan.steps
    metrics = Metrics(directory, start, plan, ranks)
    stopper, stop, saved = Stopper(), False, time.perf_counter()
    for step in range(start, until):
        began = time.perf_counter()
        factor = cosine(step, plan.steps, plan.warmup)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        rows = rows_of_step(samples, step, plan.batch, plan.seed, plan.tokens_per_microbatch, ranks.rank, ranks.world)
        phase.begin_step(step)
        totals: dict[str, torch.Tensor] = {}
        for row in rows:
            loss, parts = phase.row_loss(row.to(ranks.device))
            (loss * ranks.world).backward()  # FSDP averages gradients over ranks; the batch's loss is a sum
            for name, part in (parts | {"loss": loss, "tokens": torch.tensor(row.input_ids.numel())}).items():
                totals[name] = totals.get(name, 0) + part.detach().double().cpu()
        figures = phase.end_step(step)
        totals["flops"] = torch.tensor(sum(map(phase.flops, rows)), dtype=torch.float64)
        totals["stop"] = torch.tensor(float(stopper.asked), dtype=torch.float64)
        late = ranks.first and time.perf_counter() - saved > 60 * plan.save_minutes  # one clock decides for all ranks
        totals["late"] = torch.tensor(float(late), dtype=torch.float64)
        own_loss = float(totals["loss"])
        summed = torch.stack(list(totals.values()))
        dist.all_reduce(summed)
        totals = dict(zip(totals, summed.tolist(), strict=True))
        norm = clip_gradients(trainee, plan.clip)
        if not math.isfinite(totals["loss"] + norm):  # before the update: no checkpoint ever holds what came of it
            _stop_non_finite(own_loss, norm, step, plan, len(samples), ranks)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        phase.after_update(step)

        stop, late = totals.pop("stop") > 0, totals.pop("late") > 0
        metrics.write({"step": step + 1} | totals | figures | {
            "lr": factor * optimizer.param_groups[0]["initial_lr"], "grad_norm": norm,
            "seconds": round(time.perf_counter() - began, 4)})
        if stop or late or step + 1 == until or (plan.save_steps and (step + 1) % plan.save_steps == 0):
            checkpoints.save(directory, step + 1, trainee, optimizer)
            saved = time.perf_counter()
        if stop:
            break
    metrics.close()
    if stop:
        ranks.say(f"stopped by a signal after step {step + 1}; the same command goes on from there")
    return not stop


def clip_gradients(trainee, clip: float) -> float:
    """Scale the model's gradients to a norm of at most `clip` (0: leave them); the masks' are not touched."""
    weights = [p for p in trainee.net.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in weights])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if clip:
        torch.nn.utils.clip_grads_with_norm_(weights, clip, norm)
    return round(float(norm), 6)


def _stop_non_finite(own_loss: float, norm: float, step: int, plan: Plan, samples: int, ranks: Ranks) -> None:
    """Every rank stops, naming the ranks whose loss it was and their samples. The last checkpoint stays."""
    losses = [None] * ranks.world
    dist.all_gather_object(losses, own_loss)
    ids = batch_indices(step, plan.batch, samples, plan.seed)
    found = "; ".join(f"rank {rank}: loss {loss}, samples {ids[rank :: ranks.world]}"
                      for rank, loss in enumerate(losses) if not math.isfinite(loss))
    found = found or f"a gradient of norm {norm}, samples {ids}"
    raise UserError(f"step {step + 1}: expected a finite loss, found {found}; the last checkpoint is kept")


class Metrics:
    """metrics.jsonl and, where tensorboard is installed, its event files; and the line printed per step.

    After a resume all of them go on where the checkpoint was.
    """

    def __init__(self, directory: str, start: int, plan: Plan, ranks: Ranks):
        self.path, self.plan, self.ranks, self.start, self.events = os.path.join(directory, "metrics.jsonl"), plan, ranks, start, None
        self.began = time.perf_counter()
        self.peak = peak_flops(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
        if not ranks.first:
            return
        kept = [line for line in read_metrics(self.path) if line["step"] <= start]
        with open(self.path + ".tmp", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
        os.rename(self.path + ".tmp", self.path)
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(os.path.join(directory, "tensorboard"), purge_step=start + 1)

    def write(self, figures: dict) -> None:
        if not self.ranks.first:
            return
        step, seconds = figures["step"], time.perf_counter() - self.began
        figures["tokens_per_s"] = round(figures["tokens"] / figures["seconds"])
        flops = figures.pop("flops")
        if self.peak:
            figures["mfu"] = round(flops / figures["seconds"] / self.ranks.world / self.peak, 4)
        if self.ranks.device.type == "cuda":
            figures["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
        if self.events:
            for name, number in figures.items():
                if isinstance(number, (int, float)) and name != "step":
                    self.events.add_scalar(name, number, step)
        if step % self.plan.print_every and step != self.plan.steps:
            return
        left = seconds / (step - self.start) * (self.plan.steps - step)
        shown = [f"step {step:5d}/{self.plan.steps}"]
        shown += [f"{name} {figures[name]:.4f}" for name in SHOWN if name in figures]
        shown += [f"lr {figures['lr']:.2e}", f"{figures['tokens_per_s']} tok/s", *([f"MFU {figures['mfu']:.1%}"] if self.peak else []),
                  f"ETA {datetime.timedelta(seconds=round(left))}"]
        print(" | ".join(shown), flush=True)

    def close(self) -> None:
        if self.events:
            self.events.close()


def read_metrics(path: str) -> list[dict]:
    """The whole lines of a metrics.jsonl; a last line cut off by a kill is left out."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
