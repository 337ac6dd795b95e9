"""Attention functions by which packed rows, and single tokens after a cache, are read: "packed" and
"single-query" among transformers' own.

Both take a layer's window from `module.window`, which models/forward.py reads from the model's own mask.
"""

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from common.models.families import needs_eager
from common.models.forward import attention_function


def packed_attention(module, query, key, value, attention_mask, lengths=None, starts=None, longest=None,
                     sliding_window=None, scaling=None, dropout=0.0, **kwargs):
    """Causal attention within each sample of a row, by torch's fused kernels, without a T x T mask.

    query [1, H, T, d], key and value [1, G, T, d] -> [1, T, H, d]. transformers calls it in models built
    with attn_implementation="packed". lengths, starts and longest: sample_bounds' for a row of T tokens,
    passed through the model's forward, or in module.row; without them, one sample. What no fused kernel
    knows, soft caps and sinks, is left to the model's own eager function. sliding_window: not all classes
    with a window say so here.
    """
    if lengths is None and starts is None:
        lengths, starts, longest = map(vars(module).get("row", {}).get, ("lengths", "starts", "longest"))
    if starts is None:
        options = {"scaling": scaling, "dropout": dropout} | kwargs
        lengths = np.array([query.shape[2]]) if lengths is None else lengths
        return one_by_one(module, (query, key, value), lengths, options), None
    by_token = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, H or G, d]
    reach = (-1 if module.window is None else module.window - 1, 0)  # tokens before and after; -1: all
    output = varlen_attn(*by_token, starts, starts, longest, longest, scale=scaling, window_size=reach,
                         enable_gqa=True)
    return output[None], None


def window_mask(length: int, window: int | None, device) -> torch.Tensor | None:
    """[1, 1, T, T] bool, true where a token attends; None if plain causal attention suffices."""
    if window is None or window >= length:
        return None
    positions = torch.arange(length, device=device)
    behind = positions[:, None] - positions
    return ((behind >= 0) & (behind < window))[None, None]


@torch.compiler.disable  # the loop would be compiled anew for every number of samples
def one_by_one(module, states, lengths, options: dict) -> torch.Tensor:
    """packed_attention's result from one call of sdpa per sample."""
    alone = []
    eager, attend = needs_eager(module.config), attention_function(module)
    for sample in zip(*(tensor.split(lengths.tolist(), dim=2) for tensor in states), strict=True):
        length, device = sample[0].shape[2], sample[0].device
        mask = window_mask(length, module.window, device)  # without one sdpa is causal
        if eager:
            seen = torch.ones(1, 1, length, length, device=device).tril().bool() if mask is None else mask
            mask = torch.zeros_like(seen, dtype=sample[0].dtype).masked_fill_(~seen, -torch.inf)
        alone.append(attend(module, *sample, mask, **options)[0])
    return torch.cat(alone, dim=1)


def single_query(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """Attention of one token a row: query [n, H, 1, d], key and value [n, G, S, d] -> [n, 1, H, d].

    module.ages [S]: by how many positions the token is later; below zero: not written yet. Every key is read
    once, not once a query head. softcap, s_aux [H]: the cap of a Gemma 2 on scores, the sinks of a GPT-OSS.
    """
    (n, groups, _, head_dim), heads = key.shape, query.shape[1]
    ages, window = module.ages, module.window
    unread = ages < 0 if window is None else (ages < 0) | (ages >= window)
    scores = (query * scaling).view(n, groups, heads // groups, head_dim) @ key.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill_(unread, -torch.inf)
    if s_aux is not None:  # a sink takes its share of a query head's attention
        sinks = s_aux.to(scores.dtype).view(1, groups, heads // groups, 1).expand(n, -1, -1, -1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).view(n, 1, heads, head_dim), None


AttentionInterface.register("packed", packed_attention)
AttentionInterface.register("single-query", single_query)
