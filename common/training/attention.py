"""Attention within each sample of a packed row: transformers' attn_implementation="packed"."""

import functools
import inspect

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.models import window_mask


def packed_attention(module, query, key, value, attention_mask, row=None, sliding_window=None, scaling=None,
                     dropout=0.0, **kwargs):
    """Causal attention within each sample of a row, by torch's fused kernels, without a T x T mask.

    query [1, H, T, d], key and value [1, G, T, d] -> [1, T, H, d]. transformers calls it in models built
    with attn_implementation="packed". row: a packing.Row of T tokens, passed through the model's forward;
    None: one sample. sliding_window: number of positions a token attends to, including its own; None for all.

    On GPUs one kernel call covers all samples, if torch has the kernel and it supports these shapes;
    otherwise there is one call per sample, with a mask if the sample is longer than the window.
    """
    if row is not None and dropout == 0 and varlen_applies(query):
        states = (query, key, value)
        return varlen_attention(varlen_kernel(), states, row, sliding_window, scaling), None
    lengths = row.lengths if row is not None else query.shape[2]
    parts = (states.split(lengths, dim=2) for states in (query, key, value))
    options = {"scaling": scaling, "dropout": dropout} | kwargs
    alone = []
    for sample in zip(*parts, strict=True):
        mask = window_mask(sample[0].shape[2], sliding_window, query.device)
        alone.append(sdpa_attention_forward(module, *sample, mask, is_causal=mask is None, **options)[0])
    return torch.cat(alone, dim=1), None


@functools.cache
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


def varlen_applies(query: torch.Tensor) -> bool:
    """Whether varlen_kernel takes these queries: FlashAttention's dtypes, head sizes and GPUs."""
    if not query.is_cuda or varlen_kernel() is None:
        return False
    head_dim, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return half and head_dim <= 256 and head_dim % 8 == 0 and torch.cuda.get_device_capability() >= (8, 0)


def varlen_attention(kernel, states, row, window: int | None, scale: float | None) -> torch.Tensor:
    """packed_attention's result [1, T, H, d] from one call of a kernel with varlen_attn's signature.

    states: query [1, H, T, d], key and value [1, G, T, d]; window: as sliding_window there.
    """
    by_token = (tensor[0].transpose(0, 1) for tensor in states)  # [T, H or G, d]
    longest = max(row.lengths)
    reach = (-1 if window is None else window - 1, 0)  # tokens before and after its own; -1: all
    output = kernel(*by_token, row.starts, row.starts, longest, longest, scale=scale, window_size=reach,
                    enable_gqa=True)
    return output[None]


# torch.compile would compile it anew for every row: its samples' lengths are Python numbers
AttentionInterface.register("packed", torch.compiler.disable(packed_attention))
