"""Families: how models differ in what stands around keys and values, read from their modules.

A model is convertible if common/models/proof.py proves it on a layer of its own class, whatever its name is.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from common.run.errors import UserError

LONGEST_CONTEXT = 4096  # the default --key-context: a longer one costs quality at short distances
OUTPUTS = "o_proj", "dense"  # names of W_O, in a Llama and in others


@dataclass(frozen=True)
class Geometry:
    """The dimensions of a model's attention layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


def geometry(config) -> Geometry:
    """The geometry of a transformers config."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Geometry(config.num_hidden_layers, heads, kv_heads, head_dim, config.hidden_size)


def allowed_kv_heads(source_kv_heads: int) -> list[int]:
    """The proper divisors of source_kv_heads, ascending."""
    return [n for n in range(1, source_kv_heads) if source_kv_heads % n == 0]


def check_kv_heads(source_kv_heads: int, kv_heads: int) -> None:
    """Raise UserError unless kv_heads is a proper divisor of source_kv_heads."""
    allowed = allowed_kv_heads(source_kv_heads)
    if kv_heads not in allowed:
        raise UserError(f"kv heads: expected one of {allowed} for {source_kv_heads} key/value heads, "
                        f"found {kv_heads}")


def key_context(requested: int | None, positions: int) -> int:
    """Tokens over which closed-form merging preserves attention scores: as requested, or the model's
    positions, LONGEST_CONTEXT at most.

    Raises UserError if the model does not have that many positions.
    """
    if requested is not None and requested > positions:
        raise UserError(f"key context: expected at most the model's {positions} positions, "
                        f"found {requested}")
    return requested or min(positions, LONGEST_CONTEXT)


def needs_eager(config) -> bool:
    """Whether only its class's eager function computes a model's attention: scores with a soft cap, or sinks,
    which take a share of each query head's attention.
    """
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return capped or not getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)


def outside(model) -> list[str]:
    """The names of a model's parts outside of decoder layers: the embedding, the final norm, the head."""
    decoder = [f"model.{name}" for name, part in model.model.named_children()
               if name not in ("layers", "embed_tokens") and any(True for _ in part.parameters())]
    return ["model.embed_tokens", *decoder, "lm_head"]


@dataclass(frozen=True)
class RopePairs:
    """Where the RoPE pairs of a layer's heads are; models/proof.py attaches it to the layer, as rope_pairs.

    order: [d], a head's channels before RoPE in the order of common/method: pair p is order[p] and
    order[p + d/2], those that turn first; behind: the same behind RoPE; None: as they are. angles: [d/2]
    float64, radians from one position to the next; 0 for channels that do not turn, two of which are a pair.
    scale: [d/2] float64, what RoPE multiplies pairs by, over the largest (an attention factor on a part of a
    head); None: all by one number.
    """

    order: torch.Tensor | None
    behind: torch.Tensor | None
    angles: torch.Tensor
    scale: torch.Tensor | None = None


def in_order(channels: torch.Tensor, order: torch.Tensor | None, dim: int = -1) -> torch.Tensor:
    """Channels of heads, along `dim`, in the order of common/method."""
    return channels if order is None else channels.index_select(dim, order.to(channels.device))


def as_they_were(channels: torch.Tensor, order: torch.Tensor | None, dim: int = -1) -> torch.Tensor:
    """The inverse of in_order."""
    return in_order(channels, None if order is None else order.argsort(), dim)


def output_name(attention) -> str:
    """The name of W_O in an attention layer."""
    return next(name for name in OUTPUTS if hasattr(attention, name))


def output_projection(attention) -> nn.Module:
    """W_O of an attention layer."""
    return getattr(attention, output_name(attention))


def is_fused(attention) -> bool:
    """Whether q, k and v are one projection."""
    return hasattr(attention, "qkv_proj")


def norm_kind(attention) -> str:
    """"head": an RMSNorm of each head's query and key, before RoPE; "joint": one of all heads' queries and
    one of all heads' keys; "": none.
    """
    weight = getattr(getattr(attention, "q_norm", None), "weight", None)
    if weight is None:
        return ""
    return "head" if len(weight) == attention.head_dim else "joint"


def norm_offset(attention, name: str) -> float:
    """What the norm of a parameter adds to it before it multiplies by it: 1 in Gemma 3, else 0."""
    if "_norm." not in name:
        return 0
    alone = copy.deepcopy(attention.get_submodule(name.partition(".")[0])).to_empty(device="cpu")
    nn.init.zeros_(alone.weight)
    return float(alone(torch.ones_like(alone.weight)).detach().mean().round())


def query_heads_per_kv_head(attention) -> int:
    """How many query heads read each key/value head of an attention layer."""
    shape = geometry(attention.config)
    return shape.heads // shape.kv_heads


def merged_modules(attention, whole_head: bool = False) -> tuple[str, ...]:
    """The modules of an attention layer that merging changes: of keys and values, or of the whole head.

    Means leave the norms of single heads, which all heads share, as they are.
    """
    output = output_name(attention)
    if is_fused(attention):
        return ("qkv_proj", output) if whole_head else ("qkv_proj",)
    norm = norm_kind(attention)
    if whole_head:
        return "q_proj", "k_proj", "v_proj", output, *(("k_norm", "q_norm") if norm else ())
    return ("k_proj", "v_proj", "k_norm") if norm == "joint" else ("k_proj", "v_proj")


def merged_parameters(attention) -> dict[str, torch.nn.Parameter]:
    """The parameters by name that merging may change: merged_modules', but for W_O's bias."""
    modules = merged_modules(attention, whole_head=True)
    return {name: parameter for name, parameter in attention.named_parameters()
            if name != f"{output_name(attention)}.bias" and name.partition(".")[0] in modules}


def per_query_head(attention) -> list[torch.nn.Parameter]:
    """Other parameters with a row for each query head: the sinks of GPT-OSS, gates of whole heads."""
    merged = {id(parameter) for parameter in merged_parameters(attention).values()}
    return [parameter for name, parameter in attention.named_parameters()
            if id(parameter) not in merged and name != f"{output_name(attention)}.bias"
            and len(parameter) == geometry(attention.config).heads]


def fused_parts(fused: torch.Tensor, queries: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k and v of what has them side by side along dim; queries: size of q there."""
    shared = (fused.shape[dim] - queries) // 2
    return fused.split((queries, shared, shared), dim)


def head_parameters(attention) -> dict[str, torch.Tensor]:
    """merged_parameters as those of a Llama: q_proj, k_proj and v_proj apart, W_O as o_proj; rows of q and k
    in the order of common/method; of norms what they multiply by.
    """
    parameters = {name.replace("dense.", "o_proj."): parameter
                  for name, parameter in merged_parameters(attention).items()}
    for name in [name for name in parameters if name.startswith("qkv_proj.")]:
        parts = fused_parts(parameters.pop(name), output_projection(attention).in_features)
        parameters |= {name.replace("qkv", letter): part for letter, part in zip("qkv", parts, strict=True)}
    order = attention.rope_pairs.order
    for name, parameter in parameters.items():
        if name[0] in "qk":
            parameters[name] = by_channel(attention, in_order, parameter, order)
            offset = norm_offset(attention, name)
            parameters[name] = parameters[name] + offset if offset else parameters[name]
    return parameters


def as_stored(attention, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of head_parameters, for some of them."""
    stored, order = {}, attention.rope_pairs.order
    for name, parameter in parameters.items():
        if name[0] in "qk":
            offset = norm_offset(attention, name)
            parameter = parameter - offset if offset else parameter
            parameter = by_channel(attention, as_they_were, parameter, order)
        stored[name.replace("o_proj.", f"{output_name(attention)}.")] = parameter
    for kind in ("weight", "bias") if is_fused(attention) else ():
        if f"q_proj.{kind}" in stored:
            parts = [stored.pop(f"{letter}_proj.{kind}") for letter in "qkv"]
            stored[f"qkv_proj.{kind}"] = torch.cat(parts)
    return stored


def by_head(attention, rows: torch.Tensor) -> torch.Tensor:
    """[heads * d, ...] -> [heads, d, ...]."""
    return rows.view(-1, attention.head_dim, *rows.shape[1:])


def by_channel(attention, change, rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Rows [heads * d, ...] with the channels of each head changed by in_order or as_they_were."""
    return rows if order is None else change(by_head(attention, rows), order, 1).flatten(0, 1)


def normed(attention, letter: str, heads: torch.Tensor) -> torch.Tensor:
    """What a layer's norm of single heads makes of queries ("q") or keys ("k") [..., d], in the order of
    common/method.
    """
    order = attention.rope_pairs.order
    return in_order(getattr(attention, f"{letter}_norm")(as_they_were(heads, order)), order)


def watch_heads(attention, function) -> list:
    """Hooks that call function(letter, vectors [..., heads, d]) with q, k and v of each forward pass, the
    channels of q and k in the order of common/method.

    q and k are those that enter RoPE or the norms of single heads. Returns the handles.
    """
    behind, fused = "norm" if norm_kind(attention) == "joint" else "proj", is_fused(attention)
    names = {"qkv_proj": "qkv"} if fused else {f"q_{behind}": "q", f"k_{behind}": "k", "v_proj": "v"}
    letters = {attention.get_submodule(name): letter for name, letter in names.items()}
    order, queries = attention.rope_pairs.order, output_projection(attention).in_features

    def hook(module, inputs, output) -> None:
        parts = fused_parts(output, queries, -1) if fused else (output,)
        for letter, part in zip(letters[module], parts, strict=True):
            heads = part.unflatten(-1, (-1, attention.head_dim))
            function(letter, heads if letter == "v" else in_order(heads, order))

    return [module.register_forward_hook(hook) for module in letters]


def rope_frequencies(model, attention) -> torch.Tensor:
    """The angle by which RoPE rotates each pair, in radians per position: [d/2] float64 on the CPU, from the
    model's rotary embedding, of several the one that agrees with this layer's pairs; else those themselves.
    """
    angles = attention.rope_pairs.angles
    for name, buffer in model.model.named_buffers():
        if name.endswith("inv_freq") and 0 < len(buffer) <= len(angles):
            frequencies = torch.zeros_like(angles)
            frequencies[: len(buffer)] = buffer.double().cpu()
            if torch.allclose(frequencies, angles, atol=1e-9):
                return frequencies
    return angles


def free_pairs(attention) -> torch.Tensor:
    """[d/2] bool: RoPE pairs whose query and key may be rotated by any angle; the others only by a sign flip.

    All pairs are free unless each head's query and key are normalized (Qwen3). There the weights (a, b) of
    q_norm and (c, e) of k_norm come between the rotation and RoPE, and diag(a, b) R(angle) diag(c, e)
    commutes with rotations for every angle only if ac = be and ae = bc. A sign flip always commutes, and the
    norm is invariant to rotation. A norm over all heads (OLMo 2) has weights for each head: quarter turns,
    which exchange those of a pair, are exact, too.
    """
    norm = norm_kind(attention)
    if norm != "head":
        return torch.full((attention.head_dim // 2,), norm != "joint")
    parameters = head_parameters(attention)
    a, b = parameters["q_norm.weight"].detach().double().cpu().chunk(2)
    c, e = parameters["k_norm.weight"].detach().double().cpu().chunk(2)
    return (a * c == b * e) & (a * e == b * c)
