"""Devices that training runs on, by the names of --plan and of CUDA, and how many of them there are."""

import argparse
import functools
import math
import os
import re
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.run.errors import UserError
from common.run.flags import number_type


@dataclass(frozen=True)
class Hardware:
    """One accelerator. Bytes per second are those in one direction."""

    flops_per_s: float  # dense, bf16; of a CPU float32
    memory: float  # GiB
    link_bytes_per_s: float  # to the others of its node
    network_bytes_per_s: float  # to other nodes


HARDWARE = {  # from data sheets: dense bf16 with float32 accumulation; a network port per device, as in DGX
    "A100-40GB": Hardware(312e12, 40, 300e9, 25e9),
    "A100-80GB": Hardware(312e12, 80, 300e9, 25e9),
    "H100-80GB": Hardware(989e12, 80, 450e9, 50e9),
    "H200-141GB": Hardware(989e12, 141, 450e9, 50e9),
    "B200-180GB": Hardware(2250e12, 180, 900e9, 50e9),
    "L40S-48GB": Hardware(362e12, 48, 32e9, 25e9),
    "RTX4090-24GB": Hardware(165e12, 24, 32e9, 12.5e9),
}
OWN = "TFLOPS:GiB:LINK:NETWORK"  # a device by its own numbers, links in GB/s
OWN_NUMBER = number_type(float, "numbers from 0.001 to 10^6", at_least=1e-3, at_most=1e6)
CPU = "CPU"  # the device of --plan that is this machine's processor, shared by all ranks


@functools.cache
def processor(ranks: int) -> Hardware:
    """A rank's share of this machine: the float32 FLOP/s of a large product, measured, and the memory.

    Ranks exchange data through memory, which is no limit compared with that.
    """
    matrix, fastest = torch.ones(1024, 1024), math.inf
    for _ in range(5):
        began = time.perf_counter()
        matrix @ matrix
        fastest = min(fastest, time.perf_counter() - began)
    return Hardware(2 * 1024**3 / fastest / ranks, machine_memory() / ranks, math.inf, math.inf)


def machine_memory() -> float:
    """GiB of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def on_gpus(plan: str | None, ranks) -> bool:
    """Whether a run is on GPUs: the planned one where there is a --plan, else that of these ranks."""
    return not plan.endswith(f"x{CPU}") if plan else ranks.device.type == "cuda"


def processor_dtype() -> str:
    """"bfloat16" if this machine's processor has instructions for products of it, else "float32"."""
    instructions = torch.cpu.get_capabilities()
    return "bfloat16" if instructions.get("avx512_bf16") or instructions.get("amx_bf16") else "float32"


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its CUDA name ("NVIDIA A100-SXM4-80GB"); None if unknown."""
    for name, hardware in HARDWARE.items():
        if name.split("-")[0] in device_name.replace(" ", "") and "PCIe" not in device_name:
            return hardware.flops_per_s
    return None


@dataclass(frozen=True)
class Cluster:
    """Nodes that each hold all weights, sharded over `ranks_per_node` ranks with a device each."""

    ranks_per_node: int
    device: Hardware
    nodes: int = 1

    @property
    def ranks(self) -> int:
        return self.ranks_per_node * self.nodes


def parse_hardware(text: str) -> Cluster:
    """"8xA100-80GB" -> 8 ranks of that device, "2x8xA100-80GB" -> two such nodes; "2xCPU" -> two ranks here;
    "8x400:64:200:25" -> 8 ranks of a device of these numbers, as OWN.

    Raises UserError for anything else.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x(.+)", text, re.ASCII)
    named = match and match[3] in (*HARDWARE, CPU)
    if not match or not (named or match[3].count(":") == OWN.count(":")):
        raise UserError(f"--plan: expected COUNTxDEVICE or NODESxCOUNTxDEVICE, a device of "
                        f"{', '.join(HARDWARE)}, {CPU}, {OWN}, found {text!r}")
    ranks, nodes = int(match[2]), int(match[1] or 1)
    if not named:
        return Cluster(ranks, own_device(match[3]), nodes)
    return Cluster(ranks, processor(ranks) if match[3] == CPU else HARDWARE[match[3]], nodes)


def own_device(text: str) -> Hardware:
    """The device of these numbers, as OWN: dense bf16, links in one direction. Raises UserError."""
    try:
        tflops, memory, link, network = map(OWN_NUMBER, text.split(":"))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--plan: {OWN}: {error} in {text}") from error
    return Hardware(tflops * 1e12, memory, link * 1e9, network * 1e9)


def cluster_of(ranks) -> Cluster:
    """What a sharding.Ranks trains on, of which only the memory is known, the smallest device's: all ranks,
    which call it together, then decide alike.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
    if ranks.device.type == "cuda":
        memory = torch.cuda.get_device_properties(ranks.device).total_memory / 2**30
    else:
        memory = machine_memory() / local
    if ranks.world > 1:
        smallest = torch.tensor(memory)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        memory = float(smallest)
    return Cluster(local, Hardware(math.nan, memory, math.nan, math.nan), ranks.world // local)
