"""FLOPs of forward and backward passes, for the metrics of training and for plans."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.models.families import geometry
from common.models.load import by_config, empty_model

PEAK = {  # by the name of a device in CUDA's: dense bf16 FLOP/s with float32 accumulation, of data sheets
    "A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12, "RTX4090": 165e12,
}  # fmt: skip
# what configs call the number of experts that a token is sent to
CHOSEN = "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"


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


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its CUDA name ("NVIDIA A100-SXM4-80GB"); None if unknown."""
    name = "" if "PCIe" in device_name else device_name.replace(" ", "")
    return next((peak for device, peak in PEAK.items() if device in name), None)
