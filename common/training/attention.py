"""A model's run over a packed row: each sample as if it were alone, attn_implementation="packed"."""

import contextlib
import functools

import numpy as np
import torch
from torch import nn

import common.models.attention  # noqa: F401 - registers "packed"
from common.models.families import geometry, needs_eager
from common.models.forward import attach_windows, passes_on, replaced, rope_switch
from common.models.head import head_of


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
        attach_windows(net)
        self.switch = rope_switch(net.config, net.config.max_position_embeddings, net.name_or_path)
        # StableLM and Nemotron do not: what packed rows need lies in their attention layers instead, which
        # costs compiled layers another compilation
        self.passes_on = passes_on(net.config)
        starts = (replicated or {}).items()
        self.replicated = nn.ParameterDict({name: start.detach().float().clone() for name, start in starts})

    def forward(self, row, head_loss=None):
        head = head_of(self.net)
        options = sample_bounds(row, self.net.config, head.weight)
        for layer in () if self.passes_on else self.net.model.layers:
            layer.self_attn.row = options
        with rope_of_each(row, self.net, self.switch):
            output = self.net.model(
                input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, **options
            )
        hidden = output.last_hidden_state[0]
        return hidden if head_loss is None else head_loss(hidden, head)


@contextlib.contextmanager
def rope_of_each(row, net, switch: int | None):
    """Context manager: RoPE turns each sample of a row by the angles for its own length, where a LongRoPE
    would take them from the longest. switch: tokens beyond which they are others; None: they never are.
    """
    lengths = torch.tensor(row.lengths)
    beyond = lengths > (switch or 0)
    if switch is None or beyond.all() or not beyond.any():
        yield
        return
    beyond = beyond.repeat_interleave(lengths)[:, None].to(row.input_ids.device)

    def by_sample(rope, states, position_ids, *args, **named):
        each = (rope(states, positions, *args, **named)
                for positions in (position_ids, position_ids.clamp(max=switch - 1)))
        return tuple(torch.where(beyond, *pair) for pair in zip(*each, strict=True))

    ropes = [module for module in net.model.modules()
             if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))]
    with replaced({module: functools.partial(by_sample, module.forward) for module in ropes}):
        yield


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
