"""What training costs on given hardware, from configs alone: memory per rank, FLOPs, bytes moved, and time.

05_prune_train.py --plan prints it. Weights, gradients and optimizer state are counted exactly, activations
tensor by tensor for a Llama layer as transformers computes it. Buffers of the allocator, NCCL and CUDA are
not counted, hence USABLE.
"""

import copy
import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.models import blending
from common.models.families import OUTPUTS, geometry
from common.models.load import by_config, empty_model
from common.run.errors import UserError
from common.training.hardware import Cluster, parse_hardware

USABLE = 0.9  # share of a device's memory: the rest is CUDA context, NCCL buffers, fragmentation
LOGIT_COPIES = 8  # [chunk, vocabulary] float32 tensors alive at once in a loss and its gradient
LARGE = 2  # standard deviations by which few steps' tokens exceed their mean
BUSIEST = 5  # standard deviations by which no step's tokens exceed their mean
EFFICIENCY = 0.34  # share of peak FLOP/s that compute-bound dense training reaches; on an H200 0.33, 0.345
REACHED = 0.75  # share of a link's rated bytes/s that NCCL moves: some 230 of an A100's 300 GB/s
# seconds to launch a layer's forward pass, a backward pass twice: beside an H200 2 to 2.7 ms, an H100 2.8;
# with whole weights 2.0 there
HOST = {False: 0.0025, True: 0.002}
# what configs call the number of experts that a token is sent to
CHOSEN = "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"


@dataclass(frozen=True)
class Student:
    """A model being pruned: kv heads, projections that masks blend (empty: no masks), what is trained."""

    kv_heads: int
    blended: tuple[str, ...] = blending.KEY_VALUE
    train: str = "all"  # or "attention"


@dataclass(frozen=True)
class Workload:
    """The model and data of a phase."""

    config: object  # of the source model
    lengths: list[int]  # tokens in each sample
    answers: list[int]  # answer tokens in each sample
    chunk: int  # tokens whose logits are in memory at a time
    recompute: bool  # activation checkpointing
    compute: int = 2  # bytes per number in the forward pass
    whole: bool = False  # weights gathered once a row, as sharding.Execution says

    @classmethod
    def of(cls, config, samples, *execution) -> "Workload":
        lengths, answers = [len(sample) for sample in samples], [sample.answer_tokens for sample in samples]
        return cls(config, lengths, answers, *execution)

    def rows(self, schedule, ranks: int, deviations: float = 0) -> tuple[int, int]:
        """Rows per rank and tokens in the longest: of a batch of mean length, or so many deviations above."""
        capacity = schedule.tokens_per_microbatch
        filled = [min(length / capacity, 1) for length in self.lengths]  # a longer sample is a row by itself
        excess = deviations * math.sqrt(schedule.batch) * statistics.pstdev(filled)
        share = (schedule.batch * statistics.fmean(filled) + excess) / ranks
        return max(1, math.ceil(share)), max(*self.lengths, int(capacity * min(share, 1)))


@dataclass(frozen=True)
class Size:
    """Parameter counts of a model: in total, of its largest layer, and outside of layers."""

    whole: int
    layer: int
    root: int
    attention: int  # of one layer
    layers: int  # how many there are

    def trained(self, student: Student | None) -> tuple[int, int, int]:
        """Trained parameters: of the model, of a layer, and of what is outside the layers."""
        if student and student.train == "attention":
            return self.layers * self.attention, self.attention, 0
        return self.whole, self.layer, self.root


@by_config
def size(config, student: Student | None = None) -> Size:
    """Parameter counts for a config, or for the student made from it."""
    config = copy.deepcopy(config)
    if student and not student.blended:
        config.num_key_value_heads = student.kv_heads
    model = empty_model("", config, torch.float32)
    if student and student.blended:
        with torch.device("meta"):
            blending.patch(model, student.kv_heads, student.blended)
    whole, layers = (sum(p.numel() for p in part.parameters()) for part in (model, model.model.layers))
    largest = max(model.model.layers, key=lambda layer: sum(p.numel() for p in layer.parameters()))
    layer, attention = (sum(p.numel() for p in part.parameters()) for part in (largest, largest.self_attn))
    return Size(whole, layer, whole - layers, attention, config.num_hidden_layers)


@dataclass(frozen=True)
class Products:
    """Multiply-adds of a forward pass."""

    projections: int  # a token, of attention in all layers
    mlps: int  # a token, of all else in all layers: of a mixture only the experts that a token is sent to
    attention: int  # a (query, key) pair, in all layers: scores and weighted sum
    head: int  # a token whose logits are computed


@by_config
def products(config) -> Products:
    """The multiply-adds of a config's model."""
    shape, layers = geometry(config), config.num_hidden_layers
    width = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    decoder = empty_model("", config, torch.float32).model
    mlps = sum(active(config, parameter) for name, parameter in decoder.layers.named_parameters()
               if ".self_attn." not in name and parameter.ndim > 1)
    return Products(layers * shape.hidden * width, mlps, layers * 2 * shape.heads * shape.head_dim,
                    shape.hidden * config.vocab_size)


def active(config, parameter: torch.Tensor) -> int:
    """Elements of a parameter that a token meets: of experts, [experts, ...], those that it is sent to."""
    chosen = next((getattr(config, name) for name in CHOSEN if getattr(config, name, None)), None)
    if parameter.ndim < 3 or not chosen:
        return parameter.numel()
    return min(chosen, len(parameter)) * parameter[0].numel()


def forward_flops(model: Products, tokens: int, attended: int, predicted: int) -> int:
    """FLOPs of the matrix products in one forward pass, two per multiply-add.

    tokens: in total; attended: (query, key) pairs per layer and head; predicted: tokens whose logits are
    computed.
    """
    of_tokens, of_pairs = (model.projections + model.mlps) * tokens, model.attention * attended
    return 2 * (of_tokens + of_pairs + model.head * predicted)


def training_flops(model: Products, tokens: int, attended: int, predicted: int, train: str = "all") -> int:
    """FLOPs of a forward and backward pass, the latter at twice the cost. Arguments as in forward_flops.

    train "attention": the other weights get no gradients.
    """
    whole = 3 * forward_flops(model, tokens, attended, predicted)
    return whole if train == "all" else whole - 2 * (model.mlps * tokens + model.head * predicted)


def row_flops(model: Products, row, predicted: int, train: str | None) -> int:
    """FLOPs of a packed row, of which so many tokens are predicted; train None: of the forward pass alone."""
    tokens, pairs = row.input_ids.numel(), sum(length * (length + 1) // 2 for length in row.lengths)
    if train is None:
        return forward_flops(model, tokens, pairs, predicted)
    return training_flops(model, tokens, pairs, predicted, train)


def sft_flops(trainee) -> Callable:
    """A row's FLOPs in fine-tuning, forward and backward, without recomputation."""
    model = functools.cache(lambda: products(trainee.net.config))
    return lambda row: row_flops(model(), row, len(row.answer_at), "all")


def distillation_flops(student, teacher, train: str) -> Callable:
    """A row's FLOPs in distillation: the student's, forward and backward, and the teacher's forward pass."""
    both = functools.cache(lambda: [products(trainee.net.config) for trainee in (student, teacher)])

    def flops(row) -> int:
        (of_student, of_teacher), predicted = both(), len(row.prompt_at) + len(row.answer_at)
        return row_flops(of_student, row, predicted, train) + row_flops(of_teacher, row, predicted, None)

    return flops


def activation_bytes(config, tokens: int, compute: int, blended: tuple[str, ...] = ()) -> tuple[int, int]:
    """Activation bytes that one layer saves for its backward pass, and those of its input alone.

    compute: bytes per activation.
    """
    hidden, shape = config.hidden_size, geometry(config)
    inner = products(config).mlps / (3 * hidden * config.num_hidden_layers)  # of gated MLPs: their width
    width = shape.heads * shape.head_dim
    wide = 4 if compute < 4 else 0  # a norm's float32 copy of its input
    norms = 2 * ((2 * compute + wide) * hidden + 4)  # input, normalised input; its output counts below
    attention = compute * (hidden + 4 * width)  # input of q, k and v; q, k, v after RoPE; output
    mlp = compute * (hidden + 4 * inner)  # input; gate, its silu, up, their product
    matrices = dict.fromkeys(("q_proj", "k_proj", "v_proj", *OUTPUTS), 1) | {"qkv_proj": 3}  # norms are small
    blend = compute * hidden * width * sum(matrices.get(name, 0) for name in blended)
    return tokens * (norms + attention + mlp) + blend, tokens * hidden * compute


def memory(work: Workload, student: Student | None, world: int, row: int, whole_gradients=False,
           alone: bool | None = None) -> dict:
    """Bytes per rank at the fullest moment of a step, by purpose; "total" is their sum.

    student: None for plain fine-tuning; otherwise a frozen teacher is in memory, too. world: ranks that shard
    the weights. row: tokens in a row. whole_gradients: summed over several rows before they are reduced.
    alone: there is one process (default: if world is 1), not one on each of several nodes.

    Embedding and head stay gathered from the forward pass to their own backward pass; of the layers, the
    current one is, and in the backward pass of several ranks the next. Gradients are reduced in float32. If
    the weights are `whole`, all stay gathered, the teacher's from row to row, and gradients are reduced
    when the student's are no longer; a process by itself reduces none, and copies only what it computes in
    another dtype.
    """
    config, layers, compute = work.config, work.config.num_hidden_layers, work.compute
    student_size, source = size(config, student), size(config)
    trained, of_layer, of_root = student_size.trained(student)
    stored = config.dtype.itemsize if config.dtype else 4  # bytes of a weight, kept where it is not trained
    kept = (4 * trained + stored * (student_size.whole - trained)) / world
    per_layer, layer_input = activation_bytes(config, row, compute, student.blended if student else ())
    saved = (layer_input if work.recompute else per_layer) * layers  # by the forward pass
    recomputed = per_layer if work.recompute else 0
    head = config.vocab_size * config.hidden_size if of_root else 0  # its gradient
    logits = 4 * config.vocab_size * LOGIT_COPIES * min(work.chunk, row)
    gradients = 4 * trained / (1 if whole_gradients else world)
    earlier = gradients if whole_gradients else 0  # of the rows before
    reduced = compute + 4  # bytes of a gradient while it is reduced
    # bytes of weights, gradients, activations, loss: at the last logits; in the backward pass at the last
    # layer, the first one, and the embedding
    if work.whole:
        ranks = not (world == 1 if alone is None else alone)
        of_teacher = source.whole if ranks else 0
        copied = trained * (compute < 4) + (student_size.whole - trained) * (stored != compute)
        copies = compute * (student_size.whole if ranks else copied)
        unreduced = earlier + compute * trained if ranks or earlier and copies else gradients
        moments = (
            (kept + copies + copies * ranks, earlier, saved, logits + 4 * head),  # as gathered, too
            (kept + copies, earlier, saved + recomputed, compute * head),
            (kept + copies, unreduced, per_layer, compute * head),
            (kept + copies * (not ranks), gradients + reduced * trained * ranks, 0, 0),
        )
    else:
        weights, layer = kept + compute * student_size.root, compute * student_size.layer
        of_teacher = source.root
        moments = (
            (weights + layer, earlier, saved, logits + 4 * head),
            (weights + layer * (2 if world > 1 else 1), earlier + reduced * of_layer, saved + recomputed,
             compute * head),
            (weights + layer, gradients + reduced * of_layer, per_layer, compute * head),
            (weights, gradients + reduced * of_root, 0, 0),
        )
    fullest = max(moments, key=sum)
    parts = dict(zip(("parameters", "gradients", "activations", "loss"), fullest, strict=True))
    parts["optimizer"] = 8 * trained / world
    parts["teacher"] = compute * (source.whole / world + of_teacher) if student else 0
    return parts | {"total": sum(parts.values())}


def peak_memory(work: Workload, student: Student | None, schedule, cluster: Cluster) -> tuple[dict, float]:
    """As memory, in the step with the most tokens; and the bytes that there are."""
    rows, row = work.rows(schedule, cluster.ranks, BUSIEST)
    whole_gradients = rows > 1 and schedule.reduce == "step"
    need = memory(work, student, cluster.ranks_per_node, row, whole_gradients, alone=cluster.ranks == 1)
    return need, USABLE * cluster.device.memory * 2**30


def longest_share(phases: list[tuple], cluster: Cluster) -> float:
    """Tokens of a rank's share of a batch, in the step with the most."""
    shares = []
    for _, work, _, schedule in phases:
        mean, spread = statistics.fmean(work.lengths), statistics.pstdev(work.lengths)
        shares.append((schedule.batch * mean + LARGE * math.sqrt(schedule.batch) * spread) / cluster.ranks)
    return max(shares)


def too_large(phases: list[tuple], cluster: Cluster, share: float = 1) -> bool:
    """Whether a phase needs more than a share of a cluster's usable memory."""
    peaks = [peak_memory(*phase, cluster) for _, *phase in phases]
    return any(need["total"] > share * limit for need, limit in peaks)


def seconds(flops: float, traffic: float, network: float, cluster: Cluster, host: float = 0) -> float:
    """Expected seconds per step: the longest of four that overlap.

    They are compute at EFFICIENCY of peak, the bytes per rank within a node and between nodes at REACHED of
    the links' bandwidth, and the `host` seconds of launches.
    """
    device = cluster.device
    compute = flops / (cluster.ranks * device.flops_per_s * EFFICIENCY)
    links = traffic / device.link_bytes_per_s, network / device.network_bytes_per_s
    return max(compute, max(links) / REACHED, host)


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
    student_size, source = size(work.config, student), size(work.config).whole
    trained, *_ = student_size.trained(student)
    gathered = 2 * 2 * student_size.whole + (2 * source if student else 0)  # in bf16: twice, the teacher once
    if work.whole:
        gathered = 2 * student_size.whole  # once, the teacher never again
    reductions = rows if schedule.reduce == "row" else 1
    sharded = cluster.ranks_per_node > 1
    traffic = (rows * gathered + reductions * 4 * trained) * sharded  # gradients are reduced in float32
    # a rank's shard of the gradients, once a step: a ring passes it round twice
    network = 2 * (1 - 1 / cluster.nodes) * 4 * trained / cluster.ranks_per_node
    launches = rows * work.config.num_hidden_layers * (3 + work.recompute + bool(student))
    host = launches * HOST[work.whole]
    expected = seconds(useful + forward * work.recompute, traffic, network, cluster, host)
    mfu = useful / (expected * ranks * cluster.device.flops_per_s)
    return StepCost(rows, row, useful, traffic, network, expected, expected == host, mfu)


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
        f"{step.rows} row(s) of {step.row} tokens per rank{', recomputed' if work.recompute else ''}"
        f"{', weights gathered once a row' if work.whole and cluster.ranks_per_node > 1 else ''}",
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
    config = phases[0][1].config
    if any(getattr(config, name, None) for name in CHOSEN):
        model, whole = products(config), size(config).whole
        met = model.projections + model.mlps + model.head
        print(f"{whole:,} parameters, of which a token meets {met:,}: it is sent to some of the experts")
    for phase in phases:
        lines, phase_hours, fits = report(*phase, cluster)
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
    model = products(work.config)  # of the teacher; its student's are fewer
    flops = 2 * forward_flops(model, tokens, attended, tokens)
    hours = times * seconds(flops, 0, 0, parse_hardware(hardware)) / 3600
    print(f"held-out measurement: {times} of {tokens} tokens | {flops / 1e12:.3g} TFLOP each | "
          f"{duration(hours)} in total")
    return hours
