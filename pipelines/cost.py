"""What a conversion costs on given hardware, from configs alone: seconds and traffic of a step, and disk.

Disk is what a run directory holds at its fullest. Not counted are tokens, 4 bytes each, and what is small:
tokenizers, groups, similarities, metrics, pictures.
"""

import functools
import math
import re
import time
from dataclasses import dataclass

import torch

from common.method.stats import LayerStats
from common.models.calibration import SAMPLED
from common.models.families import geometry, norm_kind
from common.models.load import empty_model, weight_dtype
from common.run.errors import UserError
from common.training.checkpoints import KEPT
from common.training.engine import Schedule
from common.training.flops import PEAK, forward_flops, products, training_flops
from common.training.memory import Cluster, Device, Phase, Student, Workload, machine_memory, size

EFFICIENCY = 0.34  # share of peak FLOP/s that compute-bound dense training reaches; on an H200 0.33, 0.345
REACHED = 0.75  # share of a link's rated bytes/s that NCCL moves: some 230 of an A100's 300 GB/s
# seconds to launch a layer's forward pass, a backward pass twice: beside an H200 2 to 2.7 ms, an H100 2.8;
# with whole weights 2.0 there
HOST = {False: 0.0025, True: 0.002}


@dataclass(frozen=True)
class Hardware(Device):
    """One accelerator. Bytes per second are those in one direction."""

    flops_per_s: float  # dense, bf16; of a CPU float32
    link_bytes_per_s: float  # to the others of its node
    network_bytes_per_s: float  # to other nodes


HARDWARE = {  # from data sheets; a network port per device, as in DGX
    f"{name}-{memory}GB": Hardware(memory, PEAK[name], link, network) for name, memory, link, network in (
        ("A100", 40, 300e9, 25e9), ("A100", 80, 300e9, 25e9), ("H100", 80, 450e9, 50e9),
        ("H200", 141, 450e9, 50e9), ("B200", 180, 900e9, 50e9), ("L40S", 48, 32e9, 25e9),
        ("RTX4090", 24, 32e9, 12.5e9))
}  # fmt: skip
OWN = "TFLOPS:GiB:LINK:NETWORK"  # a device by its own numbers, links in GB/s
NUMBER = re.compile(r"(?=.*[1-9])\d+(\.\d+)?")  # above 0
CPU = "CPU"  # this machine's processor, shared by all ranks


def parse_hardware(text: str) -> Cluster:
    """"8xA100-80GB" -> 8 ranks of that device, "2x8xA100-80GB" -> two such nodes; "2xCPU" -> two ranks here;
    "8x400:64:200:25" -> 8 ranks of a device of these numbers, as OWN: dense bf16, links in one direction.

    Raises UserError for anything else.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x(.+)", text, re.ASCII)
    if match:
        nodes, ranks, name = int(match[1] or 1), int(match[2]), match[3]
        numbers = name.split(":")
        if name == CPU:
            return Cluster(ranks, processor(ranks), nodes)
        if name in HARDWARE:
            return Cluster(ranks, HARDWARE[name], nodes)
        if len(numbers) == 4 and all(map(NUMBER.fullmatch, numbers)):
            tflops, gib, link, network = map(float, numbers)
            return Cluster(ranks, Hardware(gib, tflops * 1e12, link * 1e9, network * 1e9), nodes)
    raise UserError(f"--on: expected COUNTxDEVICE or NODESxCOUNTxDEVICE, a device of {', '.join(HARDWARE)}, "
                    f"{CPU}, {OWN}, found {text!r}")


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
    return Hardware(machine_memory() / ranks, 2 * 1024**3 / fastest / ranks, math.inf, math.inf)


def processor_dtype() -> str:
    """"bfloat16" if this machine's processor has instructions for products of it, else "float32"."""
    instructions = torch.cpu.get_capabilities()
    return "bfloat16" if instructions.get("avx512_bf16") or instructions.get("amx_bf16") else "float32"


def seconds(flops: float, traffic: float, network: float, cluster: Cluster, host: float = 0) -> float:
    """Expected seconds per step: the longest of four that overlap.

    They are compute at EFFICIENCY of peak, the bytes per rank within a node and between nodes at REACHED of
    the links' bandwidth, and the `host` seconds of launches.
    """
    device = cluster.device
    compute = flops / (cluster.ranks * device.flops_per_s * EFFICIENCY)
    links = traffic / device.link_bytes_per_s, network / device.network_bytes_per_s
    return max(compute, max(links) / REACHED, host)


@dataclass(frozen=True)
class StepCost:
    """The cost of one training step on a cluster."""

    rows: int  # per rank
    row: int  # tokens in the longest row
    flops: float  # without recomputation
    traffic: float  # bytes moved per rank within its node
    network: float  # bytes moved per rank between nodes
    seconds: float
    by_host: bool  # whether the host's launches take the longest
    mfu: float  # expected model FLOPs utilization


def step_cost(work: Workload, student: Student | None, schedule: Schedule, cluster: Cluster) -> StepCost:
    """The cost of a step of fine-tuning (student None) or distillation."""
    count, ranks = len(work.lengths), cluster.ranks
    tokens = schedule.batch * sum(work.lengths) / count
    predicted = tokens if student else schedule.batch * sum(work.answers) / count
    attended = schedule.batch * sum(length * (length + 1) / 2 for length in work.lengths) / count
    model = products(work.config)
    forward = forward_flops(model, tokens, attended, predicted)
    useful = training_flops(model, tokens, attended, predicted, student.train if student else "all")
    if student:
        useful += forward  # the teacher's
    rows, row = work.rows(schedule, ranks)
    trained, traffic = traffic_within(work, student, rows, schedule.reduce)
    traffic *= cluster.ranks_per_node > 1
    # a rank's shard of the gradients, once a step: a ring passes it round twice
    network = 2 * (1 - 1 / cluster.nodes) * 4 * trained / cluster.ranks_per_node
    launches = rows * work.config.num_hidden_layers * (3 + work.recompute + bool(student))
    host = launches * HOST[work.whole]
    expected = seconds(useful + forward * work.recompute, traffic, network, cluster, host)
    mfu = useful / (expected * ranks * cluster.device.flops_per_s)
    return StepCost(rows, row, useful, traffic, network, expected, expected == host, mfu)


def traffic_within(work: Workload, student: Student | None, rows: int, reduce: str) -> tuple[int, int]:
    """The parameters that are trained, and the bytes that a rank of several moves in a step of so many rows:
    weights are gathered in bfloat16 and gradients reduced in float32.
    """
    model, source = size(work.config, student), size(work.config).whole
    trained, *_ = model.trained(student)
    gathered = 2 * 2 * model.whole + (2 * source if student else 0)  # twice, the teacher once
    if work.whole:
        gathered = 2 * model.whole  # once, the teacher never again
    return trained, rows * gathered + (rows if reduce == "row" else 1) * 4 * trained


def calibration_bytes(config, sampled: int = SAMPLED) -> int:
    """Bytes of a layer's file of stage 1, with the raw head vectors of so many tokens."""
    shape = geometry(config)
    attention = empty_model("", config, torch.float32).model.layers[0].self_attn
    sums = LayerStats(shape.kv_heads, shape.head_dim, "meta", norm_kind(attention) == "head").sums
    grams = sum(tensor.nbytes for tensor in (*sums.values(), sums["query.gram"]))  # that of W_O is as large
    return grams + 2 * 4 * sampled * shape.kv_heads * shape.head_dim


def checkpoint_bytes(config, student: Student | None) -> int:
    """Bytes of a training checkpoint: float32 weights and AdamW's moments; frozen weights as stored."""
    model = size(config, student)
    trained, *_ = model.trained(student)
    return 12 * trained + weight_dtype("source", config).itemsize * (model.whole - trained)


def disk_bytes(phases: dict[str, Phase], teacher: bool, best: bool) -> dict[str, int]:
    """Bytes of a run directory by purpose; "total" is their sum.

    phases: of each training, by name. teacher: whether the run has one of its own; best: whether
    the best checkpoint is kept besides the last KEPT. The checkpoints are those of the largest training, with
    the one that is being written: a fine-tuned teacher's are removed before the student's are written, and
    the masked student's as the GQA student's take their place.
    """
    _, work, student, _ = phases["student"]
    config, stored = work.config, weight_dtype("source", work.config).itemsize
    gqa = Student(student.kv_heads, (), student.train)
    source, merged = (stored * size(config, each).whole for each in (None, gqa))
    trainings = [(phase.student, KEPT + 1) for phase in phases.values()] + [(gqa, KEPT + 1 + best)]
    parts = {"calibration": config.num_hidden_layers * calibration_bytes(config), "aligned": source,
             "merged": merged, "teacher": source * teacher,
             "checkpoints": max(count * checkpoint_bytes(config, each) for each, count in trainings),
             "gqa": merged}
    return parts | {"total": sum(parts.values())}
