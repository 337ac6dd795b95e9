"""Shared by the benchmarks: timing a call, and describing the machine."""

import os
import platform
import time

import torch


def timed(device: str, function, *arguments):
    """The result of a call and its seconds, including work queued on the device."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function(*arguments)
    if cuda:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def machine(device: str) -> str:
    """The GPU, or the processor with its cores and threads, and torch's version."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    name = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        name = models[0] if models else name
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return f"{name}, {cores} cores, {threads} threads, torch {torch.__version__}"
