"""Shared by the benchmarks: arguments, timing a call, errors of means, and the machine in words."""

import math
import os
import platform
import statistics
import time
from collections.abc import Sequence

import torch

from common.run.errors import UserError


def named_directories(models: list[str]) -> dict[str, str]:
    """{name: directory} of the arguments NAME=DIR. Raises UserError for one without a name."""
    pairs = [model.partition("=") for model in models]
    for model, parts in zip(models, pairs, strict=True):
        if not all(parts):
            raise UserError(f"--models: expected NAME=DIR, found {model}")
    return {name: directory for name, _, directory in pairs}


def timed(device: str, function, *arguments):
    """The result of a call and its seconds, including work queued on the device."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    result = function(*arguments)
    wait()
    return result, time.perf_counter() - start


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of several independent measurements."""
    return statistics.stdev(values) / math.sqrt(len(values))


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median of the ratios of paired measurements."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def machine(device: str) -> str:
    """The GPU, or the processor with its cores and threads, and torch's version."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    name = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
