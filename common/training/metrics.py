"""Writing training metrics: metrics.jsonl (a line per step), TensorBoard events if installed, and the log."""

import contextlib
import datetime
import json
import os
import time

import torch

from common.method.losses import TERMS
from common.models.equivalence import COMPARED
from common.run.files import write_text
from common.training.flops import peak_flops
from common.training.lines import METRICS, SETS, read_metrics

# metric -> its name in TensorBoard, which groups by what is before the slash
TAGS = {f"{prefix}_{name}": f"{prefix}/{name}" for prefix in SETS for name in COMPARED}
SHOWN = {"loss": "loss", **{name: name for name in TERMS}, "mask_expected": "mask", "mask_target": "target",
         "grad_norm": "gradient"}  # metric -> its name on the printed line


class Metrics:
    """Writes metrics.jsonl and, if tensorboard is installed, its event files; prints a line per step.

    On resume, lines and events after the checkpoint are dropped.
    """

    def __init__(self, job, schedule):
        self.path, self.schedule, self.ranks = os.path.join(job.directory, METRICS), schedule, job.ranks
        self.start, self.began, self.events = job.step, time.perf_counter(), None
        cuda = self.ranks.device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(self.ranks.device)) if cuda else None
        if not self.ranks.first:
            return
        kept = [line for line in read_metrics(self.path) if line["step"] <= job.step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            with self.optional():
                directory = os.path.join(job.directory, "tensorboard")
                self.events = SummaryWriter(directory, purge_step=job.step + 1)

    @contextlib.contextmanager
    def optional(self):
        """TensorBoard is optional: if it cannot be written, say so and train on without it."""
        try:
            yield
        except Exception as error:  # its writer re-raises anything from its thread
            self.events = None
            self.ranks.say(f"skipped tensorboard/: cannot be written ({error}); metrics.jsonl has all")

    def write(self, metrics: dict) -> None:
        """Write a step's metrics to metrics.jsonl and TensorBoard, and print them if the schedule says so."""
        if not self.ranks.first:
            return
        if metrics["step"] == self.start + 1:  # the ETA does not count what was measured around this step
            self.began = time.perf_counter() - metrics["seconds"]
        metrics["tokens_per_s"] = round(metrics["tokens"] / metrics["seconds"])
        flops = metrics.pop("flops")
        if self.peak:
            metrics["mfu"] = round(flops / metrics["seconds"] / self.ranks.world / self.peak, 4)
        if self.ranks.device.type == "cuda":
            metrics["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.events:
            with self.optional():
                for name, number in metrics.items():
                    if isinstance(number, (int, float)) and name != "step":
                        self.events.add_scalar(TAGS.get(name, name), number, metrics["step"])
        wanted = metrics["step"] % self.schedule.print_every == 0 or metrics["step"] == self.schedule.steps
        if wanted or "heldout_seconds" in metrics:
            self.show(metrics)

    def show(self, metrics: dict) -> None:
        """Print a step's metrics on one line, and a line for each held-out set measured after it."""
        step, seconds = metrics["step"], time.perf_counter() - self.began
        left = seconds / (step - self.start) * (self.schedule.steps - step)
        columns = [f"step {step:5d}/{self.schedule.steps}"]
        shown = {name: metrics[name] for name in SHOWN if name in metrics}
        if sum(bool(metrics.get(name)) for name in TERMS) == 1:  # without answers: it is the loss
            shown = {name: figure for name, figure in shown.items() if name not in TERMS}
        columns += [f"{SHOWN[name]} {figure:.4f}" for name, figure in shown.items()]
        columns += [f"lr {metrics['lr']:.2e}", f"{metrics['tokens_per_s']} tok/s"]
        if "mfu" in metrics:
            columns.append(f"MFU {metrics['mfu']:.1%}")
        columns.append(f"ETA {datetime.timedelta(seconds=round(left))}")
        self.ranks.say(" | ".join(columns))
        for prefix in SETS:
            if f"{prefix}_kl" in metrics:
                compared = (f"{name} {metrics[f'{prefix}_{name}']:.4f}" for name in COMPARED)
                self.ranks.say(" | ".join([f"{columns[0]} {prefix}", *compared]).replace("_", " "))

    def close(self) -> None:
        if self.events:
            with self.optional():
                self.events.close()
