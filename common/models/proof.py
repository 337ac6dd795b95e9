"""The proof that a model can be converted, by a layer of its own class and config, before any work.

First RoPE: unit vectors in place of queries and keys show which channels it turns in pairs, and how far. Then
each kind of layer gets random weights. Packed rows, and tokens one at a time, must be read as its class reads
them. Heads are reordered and rotated by the code that stage 4 runs: the attention's output must stay. Groups
of equal heads are merged by it: the attention of the same class with fewer key/value heads must equal it.
What passes is convertible, whatever its name is.
"""

import contextlib

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from common.method.merge import Merge
from common.method.rope import quarter_phase
from common.models.attention import single_query
from common.models.edits import fuse_layer, merge_layer, merged_config
from common.models.families import (
    OUTPUTS,
    RopePairs,
    allowed_kv_heads,
    as_stored,
    by_head,
    free_pairs,
    geometry,
    head_parameters,
    is_fused,
    norm_kind,
    output_projection,
    outside,
    watch_heads,
)
from common.models.forward import (
    Reached,
    attending,
    attention_arguments,
    layer_arguments,
    replaced,
    window_of,
)
from common.models.head import head_of
from common.models.load import by_config, empty_model, materialize
from common.models.weights import first_line
from common.run.errors import UserError

TOLERANCE = 1e-4  # of the size of outputs: norms and RoPE are float32, and norms add a small number
TURNS = 1e-5  # of a rotation by RoPE, which is float32
LARGE = 2.0**14  # of a channel: clipping shows
TOKENS = 24  # of a text to prove with: some lie outside of a short window
# of an attention layer; what else one has is named where it is refused
PARTS = "q_proj", "k_proj", "v_proj", "qkv_proj", *OUTPUTS, "q_norm", "k_norm"
KNOWN = {  # options of attention functions: those that packed rows and generation know, and what sets none
    "dropout", "scaling", "sliding_window", "softcap", "s_aux",
    "position_ids", "use_cache", "past_key_values", "cache_position", "position_embeddings"}
CALLED = {"attention_mask", "position_ids", "cache_position"}  # tensors that decoder layers are called with


class Refused(Exception):
    """Why a model cannot be converted."""


def record_heads(module, query, key, value, attention_mask, **options):
    """An attention function that ends the forward pass."""
    raise Reached(query, key, value, options)


def by_token(module, query, key, value, attention_mask, **options):
    """An attention function that reads a text a token at a time, as generation does."""
    positions, outputs = torch.arange(query.shape[2]), []
    for position in positions:
        module.ages = position - positions
        outputs.append(single_query(module, query[:, :, position, None], key, value, None, **options)[0])
    return torch.cat(outputs, 1), None


AttentionInterface.register("recorded", record_heads)
AttentionInterface.register("by-token", by_token)


@by_config
def layer_pairs(config) -> list[RopePairs]:
    """The RopePairs of each layer of a config's model. Raises UserError if they cannot be found."""
    skeleton = empty_model("", config, torch.float32)
    with refusals(f"{type(skeleton).__name__} cannot be taken apart"):
        return [pairs for pairs, *_ in find_pairs(skeleton)]


def attach_pairs(model) -> None:
    """Give every attention layer of a model its RopePairs. Raises UserError if they cannot be found."""
    for layer, pairs in zip(model.model.layers, layer_pairs(model.config), strict=True):
        layer.self_attn.rope_pairs = pairs


def has_plain_pairs(config) -> bool:
    """Whether the pairs of a config's model are (p, p + d/2) in every layer, behind RoPE, too."""
    return all(pairs.behind is None for pairs in layer_pairs(config))


def find_pairs(model):
    """Yield the RopePairs of each layer of a model on the meta device, its window (models/forward.py) and its
    attention function's options.

    Raises Refused unless RoPE turns pairs of channels, those of all heads alike.
    """
    size = geometry(model.config).head_dim
    units = LARGE * torch.eye(size)[:, None].expand(-1, 2, -1)  # sequence c: channel c alone, twice
    with refused("its decoder is not called as expected"), attending(model, "recorded"):
        arguments = layer_arguments(model, units)
    for layer, (args, named) in zip(model.model.layers, arguments, strict=True):
        strange = [name for name, value in named.items() if torch.is_tensor(value) and name not in CALLED]
        if strange:
            raise Refused(f"its layers read what is not known here ({strange[0]})")
        query, key, options = record_attention(model, layer, units, args, named)
        pairs = pairs_of(*(heads[:, 0].permute(1, 2, 0).double() for heads in (query, key)))
        yield pairs, window_of(named), options


def record_attention(model, layer, units: torch.Tensor, args: tuple, named: dict) -> tuple:
    """What attention reads, query and key [d, heads, 2, d] and options, where every head that the projections
    put out is `units` [d, 2, d]. args, named: of the layer. Raises Refused unless heads are treated alike.
    """
    attention, shape, normalized = layer.self_attn, geometry(model.config), []
    extra = [name for name, _ in attention.named_children() if name not in PARTS]
    claim = f"its attention is not of queries, keys and values alone: it has {', '.join(extra)}"
    given = {letter: units.repeat(1, 1, heads)
             for letter, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))}
    if is_fused(attention):
        functions = {attention.qkv_proj: lambda *_: torch.cat([*given.values()], -1)}
    else:
        functions = {attention.get_submodule(f"{letter}_proj"): lambda *_, rows=rows: rows
                     for letter, rows in given.items()}
    functions |= {module: lambda heads: normalized.append(heads) or heads
                  for name, module in attention.named_children() if name in ("q_norm", "k_norm")}
    hidden = torch.zeros(*units.shape[:2], shape.hidden, device="meta")
    with refused(claim if extra else "its attention is not called as expected", show=not extra):
        with attending(model, "recorded"), replaced(functions):
            with refused("its layers do more than normalize before their attention", show=False):
                args, named = attention_arguments(layer, hidden, args, named)
            try:
                attention(*args, **named)
            except Reached as reached:
                query, key, value, options = reached.args
            else:
                raise Refused("its attention does not go through transformers' attention functions")
        check_norms(attention, normalized, units)
        check_heads((query, key, value), (shape.heads, shape.kv_heads, shape.kv_heads), units)
    return query, key, options


def check_norms(attention, normalized: list[torch.Tensor], units: torch.Tensor) -> None:
    """Raise Refused unless norms of queries and keys have read the units, and heads share their weights."""
    for name in ("q_norm", "k_norm"):
        weight = getattr(getattr(attention, name, None), "weight", None)
        if weight is not None and weight.ndim > 1:
            raise Refused("its norms of queries and keys are of no kind that is known here: each head has "
                          f"its own weights ({name}: {list(weight.shape)})")
    for heads in normalized:
        before = heads.reshape(len(units), -1, len(units))
        if not torch.equal(before, units[:, :1].expand_as(before)):
            raise Refused("its keys are normalized behind RoPE")


def check_heads(states: tuple, numbers: tuple, units: torch.Tensor) -> None:
    """Raise Refused unless queries, keys and values are so many heads, rotated alike, values not at all."""
    for heads, number in zip(states, numbers, strict=True):
        expected = [len(units), number, *units.shape[1:]]
        if list(heads.shape) != expected:
            raise Refused(f"its attention reads heads of shape {list(heads.shape[1:])}, not {expected[1:]}")
        if not torch.equal(heads, heads[:, :1].expand_as(heads)):
            raise Refused("its heads are not all rotated alike")
    if not torch.equal(states[2][:, 0], units):
        raise Refused("its values are not those of v_proj")


def pairs_of(query: torch.Tensor, key: torch.Tensor) -> RopePairs:
    """The RopePairs from what RoPE multiplies queries and keys by at the positions 0 and 1: each [2, d, d].

    Raises Refused unless it turns pairs of channels.
    """
    size, refused = key.shape[-1], Refused("its keys are not rotated in pairs")
    scale = key[0].amax(0)  # of each channel
    start = key[0] / scale
    if not torch.equal(start @ start.T, torch.eye(size).double()):
        raise refused
    for position in range(2):  # a query may be scaled, by its position, too
        ratio = (query[position] * key[position]).sum() / key[position].square().sum()
        difference = (query[position] - ratio * key[position]).abs().max() / scale.max()
        if not ratio > 0 or difference > TURNS * ratio:
            raise Refused("its queries are not rotated as its keys are")
    turn = start.T @ key[1] / scale
    first, second = (turn.triu(1) + turn.tril(-1)).clamp(max=0).nonzero(as_tuple=True)  # -sin, sin across
    angles = torch.atan2(turn[second, first], turn[first, first])
    rest = [channel for channel in range(size) if channel not in {*first.tolist(), *second.tolist()}]
    if len(rest) % 2 or 2 * len(first) + len(rest) != size:
        raise refused
    half = len(rest) // 2
    rest = torch.tensor(rest, dtype=torch.int64)
    order = torch.cat((first, rest[:half], second, rest[half:]))
    angles = torch.cat((angles, angles.new_zeros(half)))
    expected = torch.eye(size).double()
    firsts, seconds = order.chunk(2)
    expected[firsts, firsts] = expected[seconds, seconds] = angles.cos()
    expected[firsts, seconds], expected[seconds, firsts] = -angles.sin(), angles.sin()
    if (turn - expected).abs().max() > TURNS or not torch.equal(scale[firsts], scale[seconds]):
        raise refused
    behind = start.argmax(0)[order]  # the channel that each becomes
    plain = torch.arange(size)
    order, behind = (None if torch.equal(found, plain) else found for found in (order, behind))
    scale = None if scale.min() == scale.max() else scale[firsts] / scale.max()
    return RopePairs(order, behind, angles, scale)


def require_convertible(path: str, config) -> str:
    """Raise UserError, with the reason, unless the model of this config can be converted. Returns its class.

    path: where the config comes from.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = str(quantization.get("quant_method") if isinstance(quantization, dict) else quantization)
        raise UserError(f"{path}: expected floating-point weights, found a checkpoint quantized by {method}; "
                        "dequantize it first: model.dequantize(), or dequantize=True in from_pretrained's "
                        "quantization_config, then save_pretrained(..., save_original_format=False)")
    if getattr(config, "use_bidirectional_attention", None):
        raise UserError(f"{path}: expected causal attention, found use_bidirectional_attention")
    model = empty_model(path, config, torch.float64)
    with refusals(f"{path}: {type(model).__name__} cannot be converted"):
        kinds, shape = watch_layers(model), geometry(config)
        if shape.heads % shape.kv_heads:
            raise Refused(f"its {shape.heads} heads cannot share {shape.kv_heads} key/value heads evenly")
        if shape.kv_heads < 2:
            raise Refused(f"it has {shape.kv_heads} key/value head: nothing to merge")
        prove_head(model)
        for layer in kinds:
            prove(model, layer)
    return type(model).__name__


def require_readable(path: str, config, purpose: str) -> None:
    """Raise UserError, with the reason, unless the layers of this config's model can be run one by one and
    their keys and values watched. purpose: what for.
    """
    model = empty_model(path, config, torch.float32)
    with refusals(f"{path}: {purpose}: {type(model).__name__} cannot be taken apart"):
        watch_layers(model)


@contextlib.contextmanager
def refusals(claim: str):
    """Context manager: Refused becomes UserError, the claim and the reason."""
    try:
        yield
    except Refused as reason:
        raise UserError(f"{claim}: {reason}") from None


@contextlib.contextmanager
def refused(claim: str, show: bool = True):
    """Context manager: whatever a class does with what it does not expect becomes Refused. show: say what."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # of any class
        raise Refused(f"{claim} ({first_line(error)})" if show else claim) from error


def require_parts(model) -> None:
    """Raise Refused unless the model consists of what the stages look for."""
    decoder = getattr(model, "model", None)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(model, "lm_head"):
        raise Refused("it is not a decoder (model.layers, lm_head)")
    if hasattr(model.config, "text_config"):
        raise Refused("its config is of several models (text_config)")
    for layer in decoder.layers:
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            raise Refused("some of its layers have no self_attn")
        for name in () if is_fused(attention) else ("q_proj", "k_proj", "v_proj"):
            if not isinstance(getattr(attention, name, None), nn.Linear):
                raise Refused(f"its attention has no {name}")
        if not any(hasattr(attention, name) for name in OUTPUTS):
            raise Refused(f"its attention has no {OUTPUTS[0]}")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise Refused(f"it has a weight without dimensions ({name}), which no ranks can share")
    for name in outside(model):
        if len([*model.get_submodule(name).children()]) or name.count(".") > 1:
            raise Refused(f"it is more than decoder layers, an embedding, a norm and a head ({name})")


def watch_layers(model) -> list:
    """One layer of each kind, of a model on the meta device, with the pairs that its RoPE turns.

    Raises Refused for a model whose layers cannot be watched.
    """
    require_parts(model)
    with refused("its layers are not all of one shape", show=False):
        geometry(model.config)
        caches = DynamicCache(config=model.config).layers
    kinds, heads, layers = {}, geometry(model.config).heads, model.model.layers
    for layer, cache, (pairs, window, options) in zip(layers, caches, find_pairs(model), strict=True):
        attention, kept = layer.self_attn, getattr(cache, "sliding_window", None)
        attention.rope_pairs, attention.window = pairs, window
        rows = output_projection(attention).in_features
        if rows != heads * attention.head_dim:
            raise Refused(f"one of its layers has {rows // attention.head_dim} query heads, others {heads}")
        unknown = [name for name, value in options.items()
                   if name not in KNOWN and value is not None and value is not False]
        if unknown:
            raise Refused(f"its attention has an option that is not known here ({unknown[0]})")
        if window is not None and window < 2:
            raise Refused(f"its sliding_window is {window}; transformers cannot cache fewer than 2 tokens")
        if kept is not None and kept < (window or model.config.max_position_embeddings):
            raise Refused(f"transformers' cache keeps {kept} tokens by its config (sliding_window, "
                          "layer_types), but its attention reads more")
        shapes = tuple((name, *parameter.shape) for name, parameter in attention.named_parameters())
        kinds.setdefault((tuple(pairs.angles.tolist()), window, shapes), layer)
    return [*kinds.values()]


def prove_head(model) -> None:
    """Raise Refused unless what becomes of lm_head's products is known, however large they are."""
    products = torch.linspace(-300, 300, 64, dtype=torch.float64)[None, None]
    hidden = MoeModelOutputWithPast(last_hidden_state=products)
    with refused("its logits are not computed as expected"):
        with replaced({model.model: lambda *_, **__: hidden, model.lm_head: lambda _: products}):
            logits = model(inputs_embeds=products).logits
        if not differs_little(head_of(model).finish(products, None), logits):
            raise Refused("its logits are not its head's, scaled and capped")


def prove(model, layer) -> None:
    """Raise Refused unless a layer passes. model: float64, on the meta device."""
    generator = torch.Generator().manual_seed(layer.self_attn.layer_idx)
    randomize(layer.self_attn, generator)
    with refused("its attention is not computed as expected"), torch.no_grad():
        prove_reading(model, layer, generator)
        prove_rotation(model, layer, generator)
        prove_merge(model, layer)
    materialize(layer.self_attn, "meta")


@torch.no_grad()
def randomize(attention, generator) -> None:
    """Give an attention layer random weights, on the CPU, of which none is trivial."""
    materialize(attention, "cpu")
    for parameter in attention.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)


def attention_call(model, layer, generator):
    """function(attention) -> what it makes of random hidden states in its place, [1, TOKENS, hidden]."""
    hidden = torch.randn(1, TOKENS, model.config.hidden_size, dtype=torch.float64, generator=generator)
    args, named = layer_arguments(model, hidden)[layer.self_attn.layer_idx]
    args, named = attention_arguments(layer, hidden.to("meta"), args, named)
    if args:
        args = (hidden, *args[1:])
    else:
        named["hidden_states"] = hidden
    return lambda attention: attention(*args, **named)[0]


def prove_reading(model, layer, generator) -> None:
    """Raise Refused unless packed rows, and tokens after a cache, are read as by the layer's own function."""
    attention = layer.self_attn
    output = attention_call(model, layer, generator)
    before = output(attention)
    for name, reader in (("packed", "packed rows"), ("by-token", "generation")):
        with attending(model, name):
            if not differs_little(before, output(attention)):
                raise Refused(f"its attention is another one in {reader}")


def prove_rotation(model, layer, generator) -> None:
    """Raise Refused unless attention is the same after random rotations and another order of heads."""
    attention, shape = layer.self_attn, geometry(model.config)
    output = attention_call(model, layer, generator)
    before = output(attention)
    options = {"dtype": torch.float64, "generator": generator}
    draws = torch.randn(shape.kv_heads, shape.head_dim, shape.head_dim, **options)
    angles = 2 * torch.pi * torch.rand(shape.kv_heads, shape.head_dim // 2, **options)
    turns = torch.polar(torch.ones_like(angles), angles)
    allowed = quarter_phase(turns) if norm_kind(attention) == "joint" else turns.real.sign()
    order = torch.randperm(shape.kv_heads, generator=generator).tolist()
    fuse_layer(attention, order, torch.linalg.qr(draws).Q, turns.where(free_pairs(attention), allowed))
    if not differs_little(before, output(attention)):
        raise Refused("its attention is another one when heads are rotated")


def prove_merge(model, layer) -> None:
    """Raise Refused unless attention with fewer key/value heads is the same where a group's are equal."""
    attention, shape = layer.self_attn, geometry(model.config)
    kv_heads = allowed_kv_heads(shape.kv_heads)[-1]
    members = shape.kv_heads // kv_heads
    alike = {name: by_head(attention, rows)[::members].repeat_interleave(members, 0).flatten(0, 1)
             for name, rows in head_parameters(attention).items()
             if name[0] in "kv" and len(rows) > shape.head_dim}
    rest = {name: rows for name, rows in head_parameters(attention).items() if is_fused(attention)}
    for name, tensor in as_stored(attention, rest | alike).items():
        attention.get_parameter(name).copy_(tensor)
    output, keys = attention_call(model, layer, torch.Generator().manual_seed(0)), []
    hooks = watch_heads(attention, lambda letter, heads: keys.append(heads) if letter == "k" else None)
    before = output(attention)
    for hook in hooks:
        hook.remove()
    eye = torch.eye(shape.head_dim, dtype=torch.float64).expand(kv_heads, members, -1, -1)
    merge = Merge(eye / members, eye, eye / members, eye)
    if norm_kind(attention) == "joint":
        merge.key_energy = keys[0][0].square().mean(0)[::members]
    merged = merge_layer(layer, attention.layer_idx, merged_config(model.config, kv_heads), merge)
    if not differs_little(before, output(merged.self_attn)):
        raise Refused("its attention with fewer key/value heads is not that of equal heads")


def differs_little(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether two outputs are equal up to rounding."""
    return before.shape == after.shape and bool((before - after).abs().max() <= TOLERANCE * before.std())
