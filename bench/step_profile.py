"""Where the time of a training step goes, by category, from the events of torch.profiler.

An operation belongs to the first category whose pattern matches its name or that of an operation it is part
of; what runs in another thread while the loss is computed, gradients of logits, belongs to the loss. On a GPU
an operation's time is that of its kernels, and "host" is the share of the step in which none runs: waiting
for Python to launch one, or for another rank. Kernels of two streams may overlap, so that shares then sum to
more than 100 %. On a CPU an operation's time is its own without its parts', and "host" is Python.
"""

import bisect
import re
import time

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from common.reporting.tables import markdown_table

CATEGORIES = {  # in this order
    "communication": r"FSDP::|nccl|c10d|gloo",  # with FSDP's casts to the compute dtype and its copies
    "optimizer": r"^Optimizer\.|_foreach_",  # and clipping
    "loss": r"_Chunked",  # common/method/losses.py, logits included
    "attention": r"(?i)attention|scaleddotproduct|varlen",
    "matmul": r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear)$",
}
OTHER, HOST = "other", "host"  # other: normalisation, activations, blended weights, copies
LOSS = "_Chunked"  # the forward pass of the loss, which computes gradients too


def profiled(step, cuda: bool) -> tuple[list, float]:
    """The events of one call of step(), and its seconds under the profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    wait = torch.cuda.synchronize if cuda else lambda: None
    wait()
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        step()
        wait()
        seconds = time.perf_counter() - began
    return list(profiler.events()), seconds


def shares(events: list, seconds: float, cuda: bool) -> dict[str, float]:
    """Category -> its share of a step of so many seconds; the largest first, HOST last."""
    loss = merged([interval(event) for event in events if event.name == LOSS and on_host(event)])
    spent = dict.fromkeys((*CATEGORIES, OTHER), 0.0)  # microseconds
    for event in events:
        if on_host(event):
            spent[category(event, loss)] += own_time(event, cuda)
    busy = sum(spent.values())
    if cuda:
        kernels = [event for event in events if not on_host(event) and not event.is_user_annotation]
        spent[OTHER] += max(0.0, sum(event.time_range.elapsed_us() for event in kernels) - busy)  # unlinked
        busy = sum(end - start for start, end in merged([interval(event) for event in kernels]))
    spent = dict(sorted(spent.items(), key=lambda item: -item[1])) | {HOST: max(0.0, seconds * 1e6 - busy)}
    return {name: round(microseconds / (seconds * 1e6), 4) for name, microseconds in spent.items()}


def on_host(event) -> bool:
    return event.device_type == DeviceType.CPU


def interval(event) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def own_time(event, cuda: bool) -> float:
    """Microseconds of the kernels that an operation launches itself, or on the host, outside its parts."""
    if not cuda:
        return event.self_cpu_time_total
    if event.is_user_annotation or event.name.startswith("cu"):  # their kernels are others', once more
        return 0.0
    return sum(kernel.duration for kernel in event.kernels)


def category(event, loss: list[tuple[float, float]]) -> str:
    """The category of a host operation. loss: disjoint intervals in ascending order."""
    names, part_of = [], event
    while part_of is not None:
        names.append(part_of.name)
        part_of = part_of.cpu_parent
    matching = (name for name, pattern in CATEGORIES.items() if any(re.search(pattern, n) for n in names))
    before = bisect.bisect_right(loss, (event.time_range.start, float("inf"))) - 1
    if before >= 0 and event.time_range.start < loss[before][1]:
        return "loss"
    return next(matching, OTHER)


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals as disjoint ones, in ascending order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def table(parts: dict[str, float]) -> str:
    """One line per category."""
    return markdown_table(("a step's time", "share"), [(name, f"{part:.1%}") for name, part in parts.items()])
