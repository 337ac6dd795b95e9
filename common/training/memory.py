"""The memory of a rank in a training step, from configs alone, and what is chosen by it.

Weights, gradients and optimizer state are counted exactly, activations tensor by tensor for a Llama layer as
transformers computes it. Buffers of the allocator, NCCL and CUDA are not counted, hence USABLE.
"""

import copy
import math
import os
import statistics
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.models import blending
from common.models.families import OUTPUTS, geometry
from common.models.load import by_config, empty_model, weight_dtype
from common.training.engine import Schedule
from common.training.flops import products

USABLE = 0.9  # share of a device's memory: the rest is CUDA context, NCCL buffers, fragmentation
ROOMY = 2 / 3  # of the usable memory: whole weights save the host's time, of which large models need little
LOGIT_COPIES = 8  # [chunk, vocabulary] float32 tensors alive at once in a loss and its gradient
LARGE = 2  # standard deviations by which few steps' tokens exceed their mean
BUSIEST = 5  # standard deviations by which no step's tokens exceed their mean


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


class Phase(NamedTuple):
    """A training: of a teacher (student None) or of a student."""

    title: str
    work: Workload
    student: Student | None
    schedule: Schedule


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    memory: float  # GiB


@dataclass(frozen=True)
class Cluster:
    """Nodes that each hold all weights, sharded over `ranks_per_node` ranks with a device each."""

    ranks_per_node: int
    device: Device
    nodes: int = 1

    @property
    def ranks(self) -> int:
        return self.ranks_per_node * self.nodes


def machine_memory() -> float:
    """GiB of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def cluster_of(ranks) -> Cluster:
    """What a sharding.Ranks trains on, with the memory of the smallest device: all ranks, which call it
    together, then decide alike.
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
    return Cluster(local, Device(memory), ranks.world // local)


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


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a rank in a step of fine-tuning (student None), or of distillation from a frozen teacher.

    Gathered weights, gradients, activations and loss are counted at four moments: at the last logits, and in
    the backward pass at the last layer, at the first layer and at the embedding.
    """

    work: Workload
    student: Student | None
    world: int  # ranks that shard the weights
    row: int  # tokens of the packed row
    summed: bool = False  # gradients of several rows are summed before they are reduced
    reduced: bool = True  # over ranks: there are several processes, on one node or on several

    @property
    def model(self) -> Size:
        """What is trained."""
        return size(self.work.config, self.student)

    @property
    def trained(self) -> tuple[int, int, int]:
        """Trained parameters: of the model, of a layer, and of what is outside the layers."""
        return self.model.trained(self.student)

    @property
    def stored(self) -> int:
        """Bytes of a weight that is not trained."""
        return weight_dtype("source", self.work.config).itemsize

    @property
    def summed_gradients(self) -> tuple[float, float]:
        """Gradients in float32: of the rows before, and of all rows."""
        total = 4 * self.trained[0] / (1 if self.summed else self.world)
        return total if self.summed else 0, total

    def layer_by_layer(self) -> tuple[tuple, tuple]:
        """Gathered weights and gradients if each layer is gathered by itself.

        Embedding and head stay gathered from the forward pass to their own backward pass; of the layers, the
        current one is, and in the backward pass of several ranks the next. While gradients are reduced they
        are there in the compute dtype, too.
        """
        model, (_, *counts), compute = self.model, self.trained, self.work.compute
        root, layer, (earlier, total) = compute * model.root, compute * model.layer, self.summed_gradients
        of_layer, of_root = ((compute + 4) * count for count in counts)
        return ((root + layer, root + layer * min(self.world, 2), root + layer, root),
                (earlier, earlier + of_layer, total + of_layer, total + of_root))

    def whole(self) -> tuple[tuple, tuple]:
        """The same if all weights are gathered once a row, which at first has them twice: as gathered, and as
        used. Their gradients are reduced when they are no longer gathered.
        """
        (trained, *_), compute, (earlier, total) = self.trained, self.work.compute, self.summed_gradients
        gathered = compute * self.model.whole
        return ((2 * gathered, gathered, gathered, 0),
                (earlier, earlier, earlier + compute * trained, total + (compute + 4) * trained))

    def alone(self) -> tuple[tuple, tuple]:
        """The same of a process by itself, which copies only what it computes in another dtype."""
        (trained, *_), compute, (earlier, total) = self.trained, self.work.compute, self.summed_gradients
        frozen = self.model.whole - trained
        copies = compute * (trained * (compute < 4) + frozen * (self.stored != compute))
        added = earlier + compute * trained if earlier and copies else total  # this row's to those before
        return (copies,) * 4, (earlier, earlier, added, total)

    def activations(self) -> tuple:
        """Of all layers, or the inputs of all layers and all of the one that is recomputed."""
        config, blended = self.work.config, self.student.blended if self.student else ()
        layer, layer_input = activation_bytes(config, self.row, self.work.compute, blended)
        saved = config.num_hidden_layers * (layer_input if self.work.recompute else layer)
        return saved, saved + layer * self.work.recompute, layer, 0

    def loss(self) -> tuple:
        """A chunk's logits, and the gradient of the head."""
        config, (*_, of_root) = self.work.config, self.trained
        logits = 4 * config.vocab_size * LOGIT_COPIES * min(self.work.chunk, self.row)
        head = config.vocab_size * config.hidden_size if of_root else 0
        return logits + 4 * head, self.work.compute * head, self.work.compute * head, 0

    def teacher(self) -> float:
        """Its shard, and what stays gathered of it: embedding and head, or all from row to row."""
        source = size(self.work.config)
        gathered = source.whole * self.reduced if self.work.whole else source.root
        return self.work.compute * (source.whole / self.world + gathered) if self.student else 0

    def fullest(self) -> dict[str, float]:
        """Bytes by purpose at the moment that takes most; "total" is their sum."""
        way = self.layer_by_layer if not self.work.whole else self.whole if self.reduced else self.alone
        names = ("parameters", "gradients", "activations", "loss")
        parts = dict(zip(names, max(zip(*way(), self.activations(), self.loss(), strict=True), key=sum),
                         strict=True))
        (trained, *_), world = self.trained, self.world
        parts["parameters"] += (4 * trained + self.stored * (self.model.whole - trained)) / world  # its shard
        parts |= {"optimizer": 8 * trained / world, "teacher": self.teacher()}  # Adam's moments in float32
        return parts | {"total": sum(parts.values())}


def peak_memory(work: Workload, student: Student | None, schedule: Schedule,
                cluster: Cluster) -> tuple[dict[str, float], float]:
    """StepMemory.fullest in the step with the most tokens; and the bytes that there are."""
    rows, row = work.rows(schedule, cluster.ranks, BUSIEST)
    summed = rows > 1 and schedule.reduce == "step"
    step = StepMemory(work, student, cluster.ranks_per_node, row, summed, cluster.ranks > 1)
    return step.fullest(), USABLE * cluster.device.memory * 2**30


def longest_share(phases: dict[str, Phase], cluster: Cluster) -> float:
    """Tokens of a rank's share of a batch, in the step with the most."""
    shares = []
    for _, work, _, schedule in phases.values():
        mean, spread = statistics.fmean(work.lengths), statistics.pstdev(work.lengths)
        shares.append((schedule.batch * mean + LARGE * math.sqrt(schedule.batch) * spread) / cluster.ranks)
    return max(shares)


def too_large(phases: dict[str, Phase], cluster: Cluster, share: float = 1) -> bool:
    """Whether a phase needs more than a share of a cluster's usable memory."""
    peaks = [peak_memory(*phase, cluster) for _, *phase in phases.values()]
    return any(need["total"] > share * limit for need, limit in peaks)


def changed(phases: dict[str, Phase], part: str, **fields) -> dict[str, Phase]:
    """The phases with other fields of their "work" or "schedule"."""
    return {name: phase._replace(**{part: replace(getattr(phase, part), **fields)})
            for name, phase in phases.items()}


def fit(phases: dict[str, Phase], cluster: Cluster, recompute: bool, rows: bool) -> dict[str, Phase]:
    """The phases with what only costs or saves memory, as it suffices: weights gathered once a row.

    phases: of the "student" and, if it is trained, the "teacher". recompute: choose this, too, where
    activations do not fit otherwise. rows: choose them, too, as long as a rank's share of a batch.
    """
    if recompute and too_large(phases, cluster):
        phases = changed(phases, "work", recompute=True)
    share, tokens = longest_share(phases, cluster), phases["student"].schedule.tokens_per_microbatch
    while rows and tokens < share:
        tokens *= 2
        longer = changed(phases, "schedule", tokens_per_microbatch=tokens)
        if too_large(longer, cluster):
            break
        phases = longer
    whole = changed(phases, "work", whole=True)
    return phases if too_large(whole, cluster, ROOMY) else whole
