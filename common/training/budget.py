"""What training costs, from configs alone: memory per rank, floating-point operations per step, time on given hardware.

Weights, gradients and optimizer are counted exactly. Activations are counted tensor by tensor for a Llama layer as
transformers computes it; buffers of the allocator, of nccl and of CUDA itself are not counted, hence USABLE.
"""

import copy
import math
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from common.cli import UserError
from common.method import masks

USABLE = 0.9  # of a device's memory: the rest is the CUDA context, nccl's buffers and what the allocator cannot use
EFFICIENCY = 0.4  # of peak, what well-fed dense training reaches on these devices
LOGIT_COPIES = 8  # [chunk, vocabulary] float32 tensors alive at once in KL or BiLD and its gradient, teacher's included


@dataclass(frozen=True)
class Hardware:
    """One accelerator: dense bf16 operations/s, GiB, bytes/s to the others of its node (one direction)."""

    flops: float
    memory: float
    link: float


HARDWARE = {  # data sheets: dense bf16 with float32 accumulation
    "A100-40GB": Hardware(312e12, 40, 300e9),
    "A100-80GB": Hardware(312e12, 80, 300e9),
    "H100-80GB": Hardware(989e12, 80, 450e9),
    "H200-141GB": Hardware(989e12, 141, 450e9),
    "B200-180GB": Hardware(2250e12, 180, 900e9),
    "L40S-48GB": Hardware(362e12, 48, 32e9),
    "RTX4090-24GB": Hardware(165e12, 24, 32e9),
}


def peak_flops(device_name: str) -> float | None:
    """bf16 operations/s of a device by the name CUDA gives it ("NVIDIA A100-SXM4-80GB"); None when it is not known."""
    for name, hardware in HARDWARE.items():
        if name.split("-")[0] in device_name.replace(" ", "") and "PCIe" not in device_name:
            return hardware.flops
    return None


def parse_hardware(text: str) -> tuple[int, Hardware]:
    """"8xA100-80GB" -> 8 ranks of that device. Raises UserError."""
    count, _, name = text.partition("x")
    if not count.isdecimal() or int(count) < 1 or name not in HARDWARE:
        raise UserError(f"--plan: expected COUNTxDEVICE, a device of {', '.join(HARDWARE)}, found {text!r}")
    return int(count), HARDWARE[name]


@dataclass(frozen=True)
class Student:
    """A model being pruned: its shared heads, and the projections that masks blend (none: it is a GQA model from the start)."""

    kv_heads: int
    blended: tuple[str, ...] = masks.KEY_VALUE


@dataclass(frozen=True)
class Size:
    """Parameters of a model: in all, in one layer, and outside the layers (embedding, head, last norm)."""

    whole: int
    layer: int
    root: int


def size(config, student: Student | None = None) -> Size:
    """Of a model of this config, or of the student made from it."""
    config = copy.deepcopy(config)
    if student and not student.blended:
        config.num_key_value_heads = student.kv_heads
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if student and student.blended:
            masks.patch(model, student.kv_heads, student.blended)
    whole = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    return Size(whole, layer, whole - layer * config.num_hidden_layers)


def forward_flops(config, tokens: int, attended: int, predicted: int) -> int:
    """Multiply-adds of one forward pass, times two: matrix products alone.

    tokens: all of them; attended: (query, key) pairs of each layer and head; predicted: tokens whose logits are formed.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    projections = config.hidden_size * head_dim * (2 * heads + 2 * kv) + 3 * config.hidden_size * config.intermediate_size
    attention = 2 * heads * head_dim  # scores and weighted sum
    layers = config.num_hidden_layers * (projections * tokens + attention * attended)
    return 2 * (layers + config.hidden_size * config.vocab_size * predicted)


def activation_bytes(config, tokens: int, compute: int, blended: tuple[str, ...] = ()) -> tuple[int, int]:
    """Bytes that the backward pass of one layer needs, and those of its input alone. compute: bytes per number."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_attention_heads * head_dim
    wide = 4 if compute < 4 else 0  # a norm's own float32 copy of its input
    norms = 2 * ((2 * compute + wide) * hidden + 4)  # input, normalised input, output less what is shared
    attention = compute * (hidden + 4 * width)  # input of q, k and v; q, k, v after RoPE; output
    mlp = compute * (hidden + 4 * inner)  # input; gate, its silu, up, their product
    kept = {"q_proj": 1, "k_proj": 3, "v_proj": 3, "o_proj": 1}  # matrices: the blended one; shared heads are repeated, too
    blend = compute * hidden * width * sum(kept[name] for name in blended)
    return tokens * (norms + attention + mlp) + blend, tokens * hidden * compute


def memory(config, student: Student | None, world: int, tokens: int, chunk: int, compute: int, recompute: bool, teacher: bool) -> dict[str, float]:
    """Bytes per rank at the worst moment of a step, by what they hold; "total" is their sum.

    student: None for plain fine-tuning; world: ranks that share the weights; tokens: of a row;
    compute: bytes per number of the forward pass; teacher: a frozen model of the same config in `compute` beside it.
    """
    own, plain = size(config, student), size(config)
    layer_activations, layer_input = activation_bytes(config, tokens, compute, student.blended if student else ())
    held = layer_input * config.num_hidden_layers + layer_activations if recompute else layer_activations * config.num_hidden_layers
    gathered = 2 if world > 1 else 1  # layers whose weights are whole at once: one computes, the next is on its way
    parts = {
        "parameters": 4 * own.whole / world + compute * (own.root + gathered * own.layer),
        "gradients": 4 * own.whole / world + (compute + 4) * max(own.root, own.layer),  # sharded; one whole, being reduced
        "optimizer": 8 * own.whole / world,
        "activations": held,
        "teacher": compute * (plain.whole / world + plain.root + gathered * plain.layer) if teacher else 0,
        "loss": 4 * config.vocab_size * (LOGIT_COPIES * min(chunk, tokens) + config.hidden_size),
    }
    return parts | {"total": sum(parts.values())}


def seconds(flops: float, traffic: float, world: int, hardware: Hardware) -> float:
    """Expected time of a step: computing at EFFICIENCY of peak, or moving `traffic` bytes per rank if that takes longer."""
    return max(flops / (world * hardware.flops * EFFICIENCY), traffic / hardware.link)


def report(title: str, config, student: Student | None, lengths: list[int], answers: list[int], plan, chunk: int, recompute: bool, world: int,
           hardware: Hardware) -> tuple[list[str], float, bool]:
    """Lines that say what a phase takes, its hours, and whether it fits. lengths, answers: tokens of each sample."""
    distils = student is not None
    mean = sum(lengths) / len(lengths)
    tokens = mean * plan.batch
    predicted = tokens if distils else plan.batch * sum(answers) / len(answers)
    attended = plan.batch * sum(length * (length + 1) / 2 for length in lengths) / len(lengths)
    forward = forward_flops(config, tokens, attended, predicted)
    useful = forward * (4 if distils else 3)  # forward and twice that backward; the teacher forward
    row = int(min(plan.tokens_per_microbatch, max(tokens / world, max(lengths))))
    rows = max(1, math.ceil(tokens / world / plan.tokens_per_microbatch))
    need = memory(config, student, world, row, chunk, 2, recompute, distils)
    own, plain = size(config, student).whole, size(config).whole
    traffic = rows * (2 * 2 * own + 4 * own + (2 * plain if distils else 0)) * (world > 1)  # gather twice, reduce once; teacher
    step = seconds(useful + forward * recompute, traffic, world, hardware)
    limit = USABLE * hardware.memory * 2**30
    fits = need["total"] <= limit
    lines = [f"{title}: {plan.steps} steps of {plan.batch} samples, {mean:.0f} tokens each; {rows} row(s) of up to {row} tokens per rank",
             "  GiB per rank | " + " | ".join(f"{name} {number / 2**30:.3g}" for name, number in need.items()) + f" of {limit / 2**30:.0f} usable"]
    lines.append(f"  per step     | {useful / 1e12:.3g} TFLOP | {traffic / 2**30:.3g} GiB moved per rank | {step:.2g} s at {EFFICIENCY:.0%} of peak "
                 f"| {plan.steps * step / 3600:.2g} h in all")
    if fits:
        lines.append("  fits")
    else:
        held = need["total"] - need["activations"] - need["loss"]
        advice = "more ranks, or devices with more memory" if held > limit else "a smaller --tokens-per-microbatch or --loss-chunk, or --recompute"
        lines.append(f"  does NOT fit: {(need['total'] - limit) / 2**30:.1f} GiB too much; try {advice}")
    return lines, plan.steps * step / 3600, fits
