"""What a training costs on given hardware, in FLOPs, bytes moved, time and memory: 05_prune_train.py --plan.

All of it follows from configs alone; common/training/budget.py counts FLOPs and memory.
"""

from dataclasses import dataclass

from common.cli import UserError
from common.data.text import is_generated
from common.training.budget import (
    Student,
    Workload,
    forward_flops,
    peak_memory,
    phases_of,
    size,
    training_flops,
    workload,
)
from common.training.hardware import Cluster, parse_hardware

EFFICIENCY = 0.4  # share of peak FLOP/s that compute-bound dense training reaches on these devices
REACHED = 0.75  # share of a link's rated bytes/s that NCCL moves: some 230 of an A100's 300 GB/s
HOST = 0.004  # seconds to launch a layer's forward pass with FSDP's hooks, a backward pass twice; on a Xeon


def seconds(flops: float, traffic: float, network: float, cluster: Cluster, launches: int = 0) -> float:
    """Expected seconds per step: the longest of four that overlap.

    They are compute at EFFICIENCY of peak, the bytes per rank within a node and between nodes at REACHED of
    the links' rates, and the host's launches of a layer's pass at HOST each.
    """
    device = cluster.device
    compute = flops / (cluster.nodes * cluster.ranks_per_node * device.flops_per_s * EFFICIENCY)
    links = traffic / device.link_bytes_per_s, network / device.network_bytes_per_s
    return max(compute, max(links) / REACHED, launches * HOST)


def duration(hours: float) -> str:
    """Hours as one reads them: "12 s", "25 min", "4.1 h"."""
    if hours >= 1:
        return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    return f"{60 * hours:.2g} min" if hours >= 1 / 60 else f"{3600 * hours:.2g} s"


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


def step_cost(work: Workload, student: Student | None, schedule, cluster: Cluster) -> StepCost:
    """The cost of a step of fine-tuning (student None) or distillation.

    schedule: an object with batch, tokens_per_microbatch and reduce.
    """
    count, ranks = len(work.lengths), cluster.ranks_per_node * cluster.nodes
    tokens = schedule.batch * sum(work.lengths) / count
    predicted = tokens if student else schedule.batch * sum(work.answers) / count
    attended = schedule.batch * sum(length * (length + 1) / 2 for length in work.lengths) / count
    forward = forward_flops(work.config, tokens, attended, predicted)
    useful = training_flops(work.config, tokens, attended, predicted, student.train if student else "all")
    if student:
        useful += forward  # the teacher's
    rows, row = work.rows(schedule, ranks)
    student_size, source = size(work.config, student), size(work.config).whole
    trained, *_ = student_size.trained(student)
    gathered = 2 * 2 * student_size.whole + (2 * source if student else 0)  # in bf16: twice, the teacher once
    reductions = rows if schedule.reduce == "row" else 1
    sharded = cluster.ranks_per_node > 1
    traffic = (rows * gathered + reductions * 4 * trained) * sharded  # gradients are reduced in float32
    # a rank's shard of the gradients, once a step: a ring passes it round twice
    network = 2 * (1 - 1 / cluster.nodes) * 4 * trained / cluster.ranks_per_node
    launches = rows * work.config.num_hidden_layers * (3 + work.recompute + bool(student))
    expected = seconds(useful + forward * work.recompute, traffic, network, cluster, launches)
    mfu = useful / (expected * ranks * cluster.device.flops_per_s)
    return StepCost(rows, row, useful, traffic, network, expected, expected == launches * HOST, mfu)


def report(title: str, work: Workload, student: Student | None, schedule, cluster: Cluster) -> tuple:
    """The cost of a phase: (lines to print, hours, whether it fits in memory)."""
    step = step_cost(work, student, schedule, cluster)
    need, limit = peak_memory(work, student, schedule, cluster)
    fits, hours = need["total"] <= limit, schedule.steps * step.seconds / 3600
    mean = sum(work.lengths) / len(work.lengths)
    gib = " | ".join(f"{name} {number / 2**30:.3g}" for name, number in need.items())
    moved = f"{step.traffic / 2**30:.3g} GiB moved per rank"
    if cluster.nodes > 1:
        moved += f", {step.network / 2**30:.3g} GiB between nodes"
    lines = [
        f"{title}: {schedule.steps} steps of {schedule.batch} samples, {mean:.0f} tokens each, "
        f"{schedule.steps * schedule.batch * mean:,.0f} in all; "
        f"{step.rows} row(s) of {step.row} tokens per rank{', recomputed' if work.recompute else ''}",
        f"  GiB per rank | {gib} of {limit / 2**30:.0f} usable",
        f"  per step     | {step.flops / 1e12:.3g} TFLOP | {moved} | "
        f"{step.seconds:.2g} s, {step.mfu:.0%} MFU | {duration(hours)} in total",
    ]
    if fits:
        advice = "; the host limits it: try a larger --tokens-per-microbatch"
        return [*lines, f"  fits{advice if step.by_host and step.rows > 1 else ''}"], hours, True
    if need["total"] - need["activations"] - need["loss"] > limit:
        advice = "more ranks, devices with more memory, or --reduce row"
    else:
        advice = "a smaller --tokens-per-microbatch or --loss-chunk, or --recompute"
    excess = (need["total"] - limit) / 2**30
    return [*lines, f"  does NOT fit: {excess:.1f} GiB too much; try {advice}"], hours, False


def print_phases(phases: list[tuple], hardware: str) -> float:
    """Print the cost of each (title, work, student, schedule) on hardware like "8xA100-80GB".

    Returns the hours. Raises UserError if one does not fit.
    """
    cluster, hours, all_fit = parse_hardware(hardware), 0.0, True
    for title, work, student, schedule in phases:
        lines, phase_hours, fits = report(title, work, student, schedule, cluster)
        print("\n".join(lines))
        hours, all_fit = hours + phase_hours, all_fit and fits
    if not all_fit:
        raise UserError(f"--plan: expected all phases to fit on {hardware}, found that not all do; see above")
    return hours


def print_heldout(work: Workload, times: int, hardware: str) -> float:
    """Print the cost of measuring `times` times on all samples of `work`; return the hours.

    An upper bound: a student has fewer kv heads than its teacher, and not every token is predicted.
    """
    tokens, attended = sum(work.lengths), sum(length * (length + 1) // 2 for length in work.lengths)
    flops = 2 * forward_flops(work.config, tokens, attended, tokens)  # of the student and the teacher
    hours = times * seconds(flops, 0, 0, parse_hardware(hardware)) / 3600
    print(f"held-out measurement: {times} of {tokens} tokens | {flops / 1e12:.3g} TFLOP each | "
          f"{duration(hours)} in total")
    return hours


def print_plan(run, schedules: dict) -> None:
    """Print what a stage-5 run needs on --plan's hardware. Raises UserError if a phase does not fit."""
    args, phases = run.args, phases_of(run, schedules)
    hours = print_phases(phases, args.plan)
    if run.heldout.sets:
        work = workload(run, [sample for samples in run.heldout.sets.values() for sample in samples])
        times = 1 + run.heldout.measurements(schedules["student"].steps)  # merged/ first
        hours += print_heldout(work, times, args.plan)
    sources = *args.text, *args.chat, args.heldout_text
    print(f"05_prune_train: {duration(hours)} on {args.plan}{', including the teacher' * (len(phases) > 1)}"
          f"{', besides generating text' * any(map(is_generated, sources))}")
