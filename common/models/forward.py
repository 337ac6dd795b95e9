"""A model's own forward pass, taken apart: what its layers are called with, and its parts by themselves.

Masks, positions, embeddings and logits are what the model's class makes of them: nothing of it is repeated
here, so whatever stands around attention in a family needs no code of ours.
"""

import bisect
import contextlib
import sys

import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.models.families import needs_eager
from common.models.load import by_config, empty_model
from common.run.errors import UserError

MOST_POSITIONS = 2**20  # at which masks are looked at, where a model has as many
FARTHEST = 2**24  # a position beyond every switch of RoPE
ALL = -1  # in place of a window


class Reached(Exception):
    """Ends a forward pass as soon as it has come to what is asked for: its args."""


@contextlib.contextmanager
def replaced(functions: dict):
    """Context manager: modules run these functions in place of their forward methods. module -> function."""
    before = {module: vars(module).get("forward") for module in functions}
    for module, function in functions.items():
        module.forward = function
    try:
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


@contextlib.contextmanager
def attending(model, name: str):
    """Context manager: the model attends by transformers' function of this name."""
    before, model.config._attn_implementation = model.config._attn_implementation, name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def call_of(module, function, *args, **named) -> tuple[tuple, dict]:
    """What function(*args, **named) calls a module with first, args and kwargs; it ends there."""
    def reach(*args, **named):
        raise Reached(args, named)

    with replaced({module: reach}):
        try:
            function(*args, **named)
        except Reached as reached:
            return reached.args


def layer_arguments(model, hidden: torch.Tensor, positions: torch.Tensor | None = None,
                    **options) -> list[tuple[tuple, dict]]:
    """What the model calls each of its decoder layers with beside hidden states [n, T, hidden]: args, kwargs.

    positions: [T], ascending, by default from 0; all are causal, gaps included. options: of the forward pass.
    """
    arguments, layers = [], model.model.layers
    if positions is not None:  # without a mask transformers takes a gap for the next of several texts
        positions = positions.to(hidden.device)[None]
        mask = torch.ones_like(positions).expand(len(hidden), -1)
        options |= {"position_ids": positions, "attention_mask": mask}

    def keep(hidden=None, *args, hidden_states=None, **named):
        arguments.append((args, named))
        if len(arguments) == len(layers):
            raise Reached
        return hidden if hidden_states is None else hidden_states

    with replaced(dict.fromkeys(layers, keep)), contextlib.suppress(Reached):
        # of the hidden states only the shape, dtype and device matter
        model.model(inputs_embeds=hidden[:, :, :1].detach(), use_cache=False, **options)
    return arguments


def run_layer(model, layer, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Output [n, T, hidden] of a decoder layer, of this model or like its own. positions: as above."""
    args, named = layer_arguments(model, hidden, positions)[layer.self_attn.layer_idx]
    return layer(hidden, *args, **named)


def run_attention(model, layer, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """The output of a decoder layer's self_attn in its place. Arguments: as for run_layer."""
    args, named = layer_arguments(model, hidden, positions)[layer.self_attn.layer_idx]
    args, named = attention_arguments(layer, hidden, args, named)
    return layer.self_attn(*args, **named)[0]


def attention_arguments(layer, hidden: torch.Tensor, args: tuple, named: dict) -> tuple[tuple, dict]:
    """What a decoder layer that is called with these calls its self_attn with: args, kwargs."""
    own = type(layer).forward  # attention_alone may stand in for it
    return call_of(layer.self_attn, own, layer, hidden, *args, **named)


@by_config
def passes_on(config) -> bool:
    """Whether the class of a config's model hands options of its forward pass on to its attention."""
    model, hidden = empty_model("", config, torch.float32), torch.zeros(1, 2, config.hidden_size)
    args, named = layer_arguments(model, hidden, lengths=())[0]
    _, named = attention_arguments(model.model.layers[0], hidden.to("meta"), args, named)
    return "lengths" in named


def record_window(mask_function, config, device, **_) -> torch.Tensor:
    """A mask function of transformers that gives, in place of a mask, how many positions each one attends to,
    its own included: [1, 1, 1, 1], or ALL.

    Raises ValueError unless the mask is causal, or causal within a window.
    """
    count = min(getattr(config, "max_position_embeddings", None) or MOST_POSITIONS, MOST_POSITIONS)
    keys = torch.arange(count, device=device)
    window = int(mask_function(0, 0, keys[-1:, None], keys).sum())  # of the last position
    queries = torch.tensor([0, 1, window - 1, window, window + 1, count // 2, count - 1])
    queries = queries.clamp(0, count - 1)[:, None].to(device)
    distances = queries - keys
    expected = (distances >= 0) & (distances < window)
    if not torch.equal(mask_function(0, 0, queries, keys), expected):
        raise ValueError("its mask is neither causal nor a sliding window")
    return torch.full((1, 1, 1, 1), window if window < count else ALL, device=device)


AttentionMaskInterface.register("recorded", record_window)


def window_of(named: dict) -> int | None:
    """The window of a layer that is called with these arguments of "recorded": record_window's, or None."""
    mask = named.get("attention_mask")
    return None if mask is None or mask == ALL else int(mask)


@by_config
def windows(config) -> list[int | None]:
    """window_of each layer of a config's model, by the mask that its own forward pass makes."""
    model, hidden = empty_model("", config, torch.float32), torch.zeros(1, 2, config.hidden_size)
    with attending(model, "recorded"):
        return [window_of(named) for _, named in layer_arguments(model, hidden)]


def attach_windows(model) -> None:
    """Give every attention layer of a model its window, as common/models/attention.py reads it."""
    for layer, window in zip(model.model.layers, windows(model.config), strict=True):
        layer.self_attn.window = window


@by_config
def rope_switch(config, longest: int, name: str) -> int | None:
    """The tokens of a text beyond which a config's model turns its channels by other angles, as a LongRoPE
    does; None if they are the same for all texts of up to `longest`. name: for errors.

    Raises UserError if they change with every token.
    """
    model, hidden = empty_model("", config, torch.float32), torch.zeros(1, 3, config.hidden_size)

    def first_turns(tokens: int) -> torch.Tensor:
        """What layers are told of the positions 0 and 1, RoPE's cosines and sines, in a text of so many."""
        for last in (1, tokens - 1):  # a short one first: some remember the longest
            arguments = layer_arguments(model, hidden, torch.tensor([0, 1, last]))
        leaves = [leaf[:, :2].flatten() for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)]
        return torch.cat([leaf.double() for leaf in leaves])

    def same(*tokens: int) -> bool:
        return torch.equal(*map(first_turns, tokens))

    if same(2, longest):
        return None
    below = bisect.bisect_left(range(longest), True, 2, key=lambda tokens: not same(2, tokens)) - 1
    if not same(below + 1, FARTHEST):
        raise UserError(f"{name}: expected texts of at most {below} tokens, beyond which its RoPE changes "
                        f"with every token, found {longest}")
    return below


def attention_alone(layer):
    """A forward method for a decoder layer that runs its self_attn, for the cache, and nothing else."""

    def forward(hidden, *args, **named):
        args, named = attention_arguments(layer, hidden, args, named)
        layer.self_attn(*args, **named)
        return hidden

    return forward


def attention_factor(model, layer) -> float | None:
    """By what a decoder layer multiplies its attention's output before adding it; None if a norm follows."""
    weight = next(layer.self_attn.parameters())
    hidden = weight.new_zeros(2, 2, model.config.hidden_size)
    output = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    output[0] = 1
    args, named = layer_arguments(model, hidden)[layer.self_attn.layer_idx]
    others = [child for name, child in layer.named_children()
              if name != "self_attn" and any(parameter.ndim > 1 for parameter in child.parameters())]
    hooks = [child.register_forward_hook(lambda module, inputs, output: tree_map(torch.zeros_like, output))
             for child in others]
    with replaced({layer.self_attn: lambda *_, **__: (output, None)}):
        added = layer(hidden, *args, **named)
    for hook in hooks:
        hook.remove()
    factor = added.flatten()[0]
    return float(factor) if torch.allclose(added, factor * output) else None


def attention_function(module):
    """transformers' function for an attention layer: sdpa's, or its class's eager one where no other does."""
    if needs_eager(module.config):
        return sys.modules[type(module).__module__].eager_attention_forward
    return sdpa_attention_forward


def embedded(model, tokens: torch.Tensor) -> torch.Tensor:
    """Token ids [n, T] -> the hidden states before the first decoder layer, [n, T, hidden]."""
    args, named = call_of(model.model.layers[0], model.model, input_ids=tokens, use_cache=False)
    return args[0] if args else named["hidden_states"]


def logits_of(model, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states after the last decoder layer, [n, T, hidden] -> logits [n, T, vocab]."""
    with replaced(dict.fromkeys(model.model.layers, lambda *_, **__: hidden)):
        return model(inputs_embeds=hidden[:, :, :1], use_cache=False).logits
