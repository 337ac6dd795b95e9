"""Attention within each sample of a packed row: transformers' attn_implementation="packed"."""

import functools
import inspect

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.families import geometry, window_mask


def packed_attention(module, query, key, value, attention_mask, lengths=None, starts=None, longest=None,
                     sliding_window=None, scaling=None, dropout=0.0, **kwargs):
    """Causal attention within each sample of a row, by torch's fused kernels, without a T x T mask.

    query [1, H, T, d], key and value [1, G, T, d] -> [1, T, H, d]. transformers calls it in models built
    with attn_implementation="packed". lengths, starts and longest: sample_bounds' for a row of T tokens,
    passed through the model's forward; without them, one sample. sliding_window: number of positions a token
    attends to, including its own; None for all.
    """
    if starts is not None:
        return varlen_attention((query, key, value), starts, longest, sliding_window, scaling), None
    options = {"scaling": scaling, "dropout": dropout} | kwargs
    return one_by_one(module, (query, key, value), lengths or query.shape[2], sliding_window, options), None


@torch.compiler.disable  # it would be compiled anew for every row: the lengths are Python numbers
def one_by_one(module, states, lengths, sliding_window, options: dict) -> torch.Tensor:
    """packed_attention's result from one call of sdpa per sample."""
    alone = []
    for sample in zip(*(tensor.split(lengths, dim=2) for tensor in states), strict=True):
        mask = window_mask(sample[0].shape[2], sliding_window, sample[0].device)
        alone.append(sdpa_attention_forward(module, *sample, mask, is_causal=mask is None, **options)[0])
    return torch.cat(alone, dim=1)


def sample_bounds(row, config, weight: torch.Tensor) -> dict:
    """packed_attention's arguments for a packing.Row. weight: one of the model's, as it is computed with.

    On GPUs one kernel call covers all samples, if torch has the kernel and it supports the model; otherwise
    there is one call per sample, with a mask if the sample is longer than the window.
    """
    if not config.attention_dropout and varlen_applies(weight, geometry(config).head_dim):
        return {"starts": row.starts, "longest": max(row.lengths)}
    return {"lengths": row.lengths}


def varlen_kernel():
    """torch's attention for samples of different lengths, or None if this torch has none that suffices."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    takes = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= takes.keys():
        return None
    return varlen_attn if "enable_gqa" in takes else functools.partial(with_repeated_heads, varlen_attn)


def with_repeated_heads(kernel, query, key, value, *arguments, enable_gqa=True, **options):
    """A call of a kernel that needs as many key and value heads as query heads: torch 2.11's."""
    times = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    return kernel(query, key, value, *arguments, **options)


KERNEL = varlen_kernel()


def varlen_applies(weight: torch.Tensor, head_dim: int) -> bool:
    """Whether KERNEL takes a model's queries: FlashAttention's dtypes, head sizes and GPUs."""
    if not weight.is_cuda or KERNEL is None:
        return False
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and head_dim <= 256 and head_dim % 8 == 0 and torch.cuda.get_device_capability() >= (8, 0)


def varlen_attention(
    states,  # query [1, H, T, d], key and value [1, G, T, d]
    starts: torch.Tensor,  # [samples + 1] int32, each sample's first token, then T
    longest: int,  # tokens in the longest sample
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """packed_attention's result [1, T, H, d] from one call of KERNEL. window: as sliding_window there."""
    by_token = (tensor[0].transpose(0, 1) for tensor in states)  # [T, H or G, d]
    reach = (-1 if window is None else window - 1, 0)  # tokens before and after its own; -1: all
    output = KERNEL(*by_token, starts, starts, longest, longest, scale=scale, window_size=reach,
                    enable_gqa=True)
    return output[None]


AttentionInterface.register("packed", packed_attention)
