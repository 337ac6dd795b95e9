"""Families: all that is known of a model's architecture.

To add one: its config.model_type in FAMILIES, with what makes it differ from a Llama; then a row of
tests/common/test_families.py. Its decoder must be laid out as a Llama's, with RoPE over pairs (p, p + d/2).
"""

from dataclasses import dataclass

import torch

from common.errors import UserError


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama.

    norm: an RMSNorm before RoPE, of each "head"'s query and key, or "joint", of all heads' queries and of all
    heads' keys. fused: q, k and v are one projection. window: the config's sliding_window is that of every
    layer; elsewhere a layer has its own or none, and a stray one in the config means nothing.
    """

    norm: str = ""
    fused: bool = False
    window: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(window=True),
    "qwen2": Family(),
    "qwen3": Family(norm="head"),
    "gemma": Family(),
    "olmo": Family(),
    "olmo2": Family(norm="joint"),
    "olmo3": Family(norm="joint"),
    "phi3": Family(fused=True, window=True),
}
SUPPORTED = tuple(FAMILIES)
LONGEST_CONTEXT = 4096  # the default --key-context: a longer one costs quality at short distances


def family(config) -> Family:
    """The family of a config; a model of related/ is like a Llama."""
    return FAMILIES.get(config.model_type, Family())


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


def require_convertible(path: str, config) -> None:
    """Raise UserError, with the reason, unless the method applies to a model of this config."""
    if config.model_type not in SUPPORTED:
        raise UserError(f"{path}: expected model_type in {list(SUPPORTED)}, found {config.model_type!r}")
    if getattr(config, "quantization_config", None):
        raise UserError(f"{path}: expected floating-point weights, found a quantized checkpoint; "
                        "rotated weights do not lie on its grid")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1) != 1 and rope.get("rope_type") != "proportional":
        raise UserError(f"{path}: expected RoPE over whole heads, "
                        f"found partial_rotary_factor {rope['partial_rotary_factor']}")
    if getattr(config, "clip_qkv", None) is not None:
        raise UserError(f"{path}: expected clip_qkv null, found {config.clip_qkv}: queries, keys and values "
                        "are clipped one coordinate at a time, which no rotation commutes with")
    if getattr(config, "use_bidirectional_attention", None):
        raise UserError(f"{path}: expected causal attention, found use_bidirectional_attention")
    sliding = family(config).window or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if sliding and config.sliding_window is not None and config.sliding_window < 2:
        raise UserError(f"{path}: expected a sliding_window of at least 2 tokens, found "
                        f"{config.sliding_window}: transformers cannot cache fewer")
    shape = geometry(config)
    if shape.head_dim % 2:
        raise UserError(f"{path}: expected an even head_dim, which RoPE splits into pairs, "
                        f"found {shape.head_dim}")
    if shape.heads % shape.kv_heads:
        raise UserError(f"{path}: expected key/value heads that divide {shape.heads} heads, "
                        f"found {shape.kv_heads}")
    if shape.kv_heads < 2:
        raise UserError(f"{path}: expected at least 2 key/value heads, found {shape.kv_heads}: "
                        "nothing to merge")


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


def sliding_window(attention) -> int | None:
    """Number of positions a token of this layer attends to, including its own; None for all before it."""
    if family(attention.config).window:
        return attention.config.sliding_window
    return getattr(attention, "sliding_window", None)  # set per layer where layers differ


def window_mask(length: int, window: int | None, device) -> torch.Tensor | None:
    """[1, 1, T, T] bool, true where a token attends; None if plain causal attention suffices."""
    if window is None or window >= length:
        return None
    positions = torch.arange(length, device=device)
    behind = positions[:, None] - positions
    return ((behind >= 0) & (behind < window))[None, None]


def merged_modules(config, whole_head: bool = False) -> tuple[str, ...]:
    """The modules of an attention layer that merging changes: of keys and values, or of the whole head.

    Means leave the norms of single heads, which all heads share, as they are.
    """
    if family(config).fused:
        return ("qkv_proj", "o_proj") if whole_head else ("qkv_proj",)
    known = {"joint": ("k_norm", "q_norm")[: 1 + whole_head], "head": ("k_norm", "q_norm") * whole_head}
    norms = known.get(family(config).norm, ())
    return (*(("q_proj", "k_proj", "v_proj", "o_proj") if whole_head else ("k_proj", "v_proj")), *norms)


def fused_parts(fused: torch.Tensor, queries: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k and v of what has them side by side along dim; queries: size of q there."""
    shared = (fused.shape[dim] - queries) // 2
    return fused.split((queries, shared, shared), dim)


def merged_parameters(attention) -> dict[str, torch.nn.Parameter]:
    """The parameters by name that merging may change: merged_modules', but for o_proj's bias."""
    modules = merged_modules(attention.config, whole_head=True)
    return {name: parameter for name, parameter in attention.named_parameters()
            if name != "o_proj.bias" and name.partition(".")[0] in modules}


def head_parameters(attention) -> dict[str, torch.Tensor]:
    """merged_parameters with q_proj, k_proj and v_proj, views of their rows, where they are one matrix."""
    parameters = merged_parameters(attention)
    if "qkv_proj.weight" in parameters:
        parts = fused_parts(parameters.pop("qkv_proj.weight"), attention.o_proj.in_features)
        parameters |= {f"{letter}_proj.weight": part for letter, part in zip("qkv", parts, strict=True)}
    return parameters


def as_stored(attention, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters named as by head_parameters -> named as in the module."""
    if not family(attention.config).fused:
        return parameters
    fused = torch.cat([parameters.pop(f"{letter}_proj.weight") for letter in "qkv"])
    return parameters | {"qkv_proj.weight": fused}


def watch_heads(attention, function) -> list:
    """Hooks that call function(letter, vectors [..., heads * d]) with q, k and v of each forward pass.

    q and k are those that enter RoPE or the norms of single heads. Returns the handles.
    """
    known = family(attention.config)
    behind, fused = "norm" if known.norm == "joint" else "proj", known.fused
    names = {"qkv_proj": "qkv"} if fused else {f"q_{behind}": "q", f"k_{behind}": "k", "v_proj": "v"}
    letters = {attention.get_submodule(name): letter for name, letter in names.items()}

    def hook(module, inputs, output) -> None:
        parts = fused_parts(output, attention.o_proj.in_features, -1) if fused else (output,)
        for letter, part in zip(letters[module], parts, strict=True):
            function(letter, part)

    return [module.register_forward_hook(hook) for module in letters]


def rope_options(rotary, attention) -> dict:
    """What a model's rotary embedding needs to know of the layer: OLMo 3 has one RoPE per type of layer."""
    return {"layer_type": attention.attention_type} if hasattr(rotary, "layer_types") else {}


def rope_frequencies(rotary, attention) -> torch.Tensor:
    """The angle by which RoPE rotates each pair, in radians per position: [d/2] float64 on the CPU."""
    prefix = "".join(f"{kind}_" for kind in rope_options(rotary, attention).values())
    return getattr(rotary, f"{prefix}inv_freq").double().cpu()


def adds_attention(layer) -> bool:
    """Whether a decoder layer adds its attention's output as it is: its norm comes before, not after it."""
    return hasattr(layer, "input_layernorm")


def attention_input(layer, hidden: torch.Tensor) -> torch.Tensor:
    """What a decoder layer's attention reads: its normalized input, or the input where norms come after."""
    return layer.input_layernorm(hidden) if adds_attention(layer) else hidden


def restore_buffers(model, device) -> None:
    """Compute what to_empty discards and no checkpoint stores: RoPE frequencies, the scale of embeddings."""
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(model.config).to(device)
    scale = getattr(decoder.embed_tokens, "scalar_embed_scale", None)
    if scale is not None:
        decoder.embed_tokens.embed_scale = torch.tensor(scale, device=device)
