"""A model's run over a packed row: attention within each sample, attn_implementation="packed"."""

import numpy as np
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from common.families import geometry, needs_eager
from common.forward import attention_function, passes_on
from common.head import head_of


class Trainee(nn.Module):
    """The root that FSDP shards: a causal language model, and parameters that every rank holds unsharded.

    replicated: name -> a small float32 parameter, such as the masks' log_alpha. Its gradient is summed over
    ranks by sum_over_ranks; in optimizers and checkpoints its name is replicated.NAME.

    forward(row, head_loss) runs the decoder over one packed row and returns head_loss(hidden [T, hidden],
    head), so that the loss can form logits a chunk at a time. Without head_loss it returns the hidden
    states.
    """

    def __init__(self, net, replicated: dict[str, torch.Tensor] | None = None):
        super().__init__()
        self.net = net
        # StableLM and Nemotron do not: what packed rows need lies in their attention layers instead
        self.passes_on = passes_on(net.config)
        starts = (replicated or {}).items()
        self.replicated = nn.ParameterDict({name: start.detach().float().clone() for name, start in starts})

    def forward(self, row, head_loss=None):
        # use_cache=False lets transformers derive a block-diagonal mask from the restarting position ids
        config, head = self.net.config, head_of(self.net)
        packed = config._attn_implementation == "packed"
        options = sample_bounds(row, config, head.weight) if packed else {}
        for layer in () if self.passes_on else self.net.model.layers:
            layer.self_attn.row = options
        output = self.net.model(
            input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, **options
        )
        hidden = output.last_hidden_state[0]
        return hidden if head_loss is None else head_loss(hidden, head)


def packed_attention(module, query, key, value, attention_mask, lengths=None, starts=None, longest=None,
                     sliding_window=None, scaling=None, dropout=0.0, **kwargs):
    """Causal attention within each sample of a row, by torch's fused kernels, without a T x T mask.

    query [1, H, T, d], key and value [1, G, T, d] -> [1, T, H, d]. transformers calls it in models built
    with attn_implementation="packed". lengths, starts and longest: sample_bounds' for a row of T tokens,
    passed through the model's forward, or in module.row; without them, one sample. sliding_window: number of
    positions a token attends to, including its own; None for all. What no fused kernel knows, soft caps and
    sinks, is left to the model's own eager function.
    """
    if lengths is None and starts is None:
        lengths, starts, longest = map(vars(module).get("row", {}).get, ("lengths", "starts", "longest"))
    if starts is None:
        options = {"scaling": scaling, "dropout": dropout} | kwargs
        lengths = np.array([query.shape[2]]) if lengths is None else lengths
        return one_by_one(module, (query, key, value), lengths, sliding_window, options), None
    by_token = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, H or G, d]
    reach = (-1 if sliding_window is None else sliding_window - 1, 0)  # tokens before and after; -1: all
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
def one_by_one(module, states, lengths, sliding_window, options: dict) -> torch.Tensor:
    """packed_attention's result from one call of sdpa per sample."""
    alone = []
    eager, attend = needs_eager(module.config), attention_function(module)
    for sample in zip(*(tensor.split(lengths.tolist(), dim=2) for tensor in states), strict=True):
        length, device = sample[0].shape[2], sample[0].device
        mask = window_mask(length, sliding_window, device)  # without one sdpa is causal
        if eager:
            seen = torch.ones(1, 1, length, length, device=device).tril().bool() if mask is None else mask
            mask = torch.zeros_like(seen, dtype=sample[0].dtype).masked_fill_(~seen, -torch.inf)
        alone.append(attend(module, *sample, mask, **options)[0])
    return torch.cat(alone, dim=1)


def sample_bounds(row, config, weight: torch.Tensor) -> dict:
    """packed_attention's arguments for a packing.Row. weight: one of the model's, as it is computed with.

    On GPUs one kernel call covers all samples, if the kernel supports the model; otherwise
    there is one call per sample, with a mask if the sample is longer than the window.
    """
    if varlen_applies(weight, geometry(config).head_dim) and not needs_eager(config):
        return {"starts": row.starts, "longest": max(row.lengths)}
    return {"lengths": np.array(row.lengths)}  # as Python numbers they would be compiled into a layer


def varlen_applies(weight: torch.Tensor, head_dim: int) -> bool:
    """Whether varlen_attn takes a model's queries: FlashAttention's dtypes, head sizes and GPUs."""
    if not weight.is_cuda:
        return False
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and head_dim <= 256 and head_dim % 8 == 0 and torch.cuda.get_device_capability() >= (8, 0)


AttentionInterface.register("packed", packed_attention)
