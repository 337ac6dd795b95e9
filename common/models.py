"""Models: geometry, whether the method applies, and loading with clear errors."""

import glob
import json
import os
import shutil
from dataclasses import asdict, dataclass

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from common.cli import UserError, suggest
from common.records import COUNT, Optional, mismatch
from common.weights import (
    check_finite,
    check_names,
    fingerprint,
    first_line,
    tokenizer_files,
    weight_files,
)

logging.set_verbosity_error()  # the stages print what they load
logging.disable_progress_bar()

# supported values of config.model_type: decoders of the same layout, with RoPE over pairs (p, p + d/2)
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo", "olmo2", "olmo3", "phi3")
# an RMSNorm before RoPE: of each head's query and key, or of all heads' queries and of all heads' keys
HEAD_NORMS, JOINT_NORMS = ("qwen3",), ("olmo2", "olmo3")
FUSED = ("phi3",)  # q, k and v in one projection
WINDOW_IN_CONFIG = ("mistral", "phi3")  # a sliding window for all layers; a stray one in others means nothing
WEIGHT_SHARE = 0.7  # of a GPU's free memory; the rest is for the cache and the logits of a batch
LONGEST_CONTEXT = 4096  # the default --key-context: a longer one costs quality at short distances
DEMO = "demo"
DEMO_HOME = os.path.join("runs", "demo-model")  # where the demo model is copied on first use
# hub names of the models in the paper's experiments
PUBLISHED_MODELS = ("meta-llama/Llama-2-7b-hf", "princeton-nlp/Sheared-LLaMA-1.3B")
DOWNLOADED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.safetensors", "*.bin", "README.md")
OUTPUTS = {"output_attentions": False, "return_dict": True}  # of models, whatever a config says
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
         "intermediate_size", "vocab_size", "max_position_embeddings")


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


def default_sources(demo: bool) -> tuple[str, str]:
    """Where tasks and text come from by default: the demo model's own, or the hub and C4."""
    return (os.path.join(DEMO_HOME, "tasks"), DEMO) if demo else ("hub", "c4")


def local_model(name: str) -> str:
    """The directory of a model: `name` itself, or the download of the hub repository of that name.

    Raises UserError if it is neither.
    """
    if os.path.isdir(name):
        return name
    if os.path.exists(name):
        raise UserError(f"model {name}: expected a checkpoint directory, found a file")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=DOWNLOADED)
    except Exception as error:  # bad names, network and permissions raise different classes
        configs = sorted(glob.glob(os.path.join("runs", "*", "*", "config.json")))
        known = [DEMO, *map(os.path.dirname, configs), *PUBLISHED_MODELS]
        raise UserError(f"model {name}: neither a directory nor a hub repository that can be reached "
                        f"({type(error).__name__}){suggest(name, known)}; "
                        f"known: {', '.join(known)}") from error


def is_hub_name(name: str) -> bool:
    """Whether a model's name is a hub name OWNER/MODEL rather than a directory."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not os.path.exists(name)


def load_config(path: str):
    """The config in a checkpoint directory or file.

    Raises UserError if it cannot be read or a size in it is not a positive integer.
    """
    try:
        name = os.path.join(path, "config.json") if os.path.isdir(path) else path
        with open(name, encoding="utf-8") as file:
            fault = mismatch(json.load(file), {name: Optional(COUNT) for name in SIZES}, "config.json")
        config = None if fault else AutoConfig.from_pretrained(path, trust_remote_code=False, **OUTPUTS)
    except Exception as error:  # the exception class depends on the damage
        raise UserError(f"{path}: expected a model config, found none that transformers can read: "
                        f"{error}") from error
    if fault:
        raise UserError(f"{path}: {fault}")
    config._attn_implementation = "sdpa"  # whatever it says: without a mask no other is causal
    return config


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


def key_context(requested: int | None, positions: int) -> int:
    """Tokens over which closed-form merging preserves attention scores: as requested, or the model's
    positions, LONGEST_CONTEXT at most.

    Raises UserError if the model does not have that many positions.
    """
    if requested is not None and requested > positions:
        raise UserError(f"--key-context: expected at most the model's {positions} positions, "
                        f"found {requested}")
    return requested or min(positions, LONGEST_CONTEXT)


def check_kv_heads(source_kv_heads: int, kv_heads: int) -> None:
    """Raise UserError unless kv_heads is a proper divisor of source_kv_heads."""
    allowed = [n for n in range(1, source_kv_heads) if source_kv_heads % n == 0]
    if kv_heads not in allowed:
        raise UserError(f"--kv-heads: expected one of {allowed} for {source_kv_heads} key/value heads, "
                        f"found {kv_heads}")


def describe(path: str, name: str | None = None) -> dict:
    """The description of a model in records: its name as given, path, fingerprint and geometry."""
    if not os.path.isdir(path):  # transformers would try it as a hub name
        raise UserError(f"{path}: expected a checkpoint directory, found none")
    config = load_config(path)
    return {"name": name or path, "path": path, "fingerprint": fingerprint(path)} | asdict(geometry(config))


def source_model(record: dict) -> dict:
    """The source model in an artifact's record. Raises UserError if it is missing or has changed."""
    recorded, path = record["model"], record["model"]["path"]
    if not os.path.isdir(path):
        raise UserError(f"model {path}: expected the directory that 01_calibrate.py read, found none")
    model = describe(path, recorded["name"])
    if model["fingerprint"] != recorded["fingerprint"]:
        raise UserError(f"model {path}: changed since 01_calibrate.py read it "
                        f"(expected {recorded['fingerprint'][:12]}, found {model['fingerprint'][:12]})")
    for name, value in model.items():
        if value != recorded[name]:
            raise UserError(f"model {path}: expected {name} {recorded[name]} as recorded, found {value}")
    return model


def sliding_window(attention) -> int | None:
    """Number of positions a token of this layer attends to, including its own; None for all before it."""
    if attention.config.model_type in WINDOW_IN_CONFIG:
        return attention.config.sliding_window
    return getattr(attention, "sliding_window", None)  # set per layer where layers differ


def window_mask(length: int, window: int | None, device) -> torch.Tensor | None:
    """[1, 1, T, T] bool, true where a token attends; None if plain causal attention suffices."""
    if window is None or window >= length:
        return None
    positions = torch.arange(length, device=device)
    behind = positions[:, None] - positions
    return ((behind >= 0) & (behind < window))[None, None]


def empty_model(path: str, config, dtype: torch.dtype):
    """The model of a config without memory for its parameters. path: where the config comes from."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    except Exception as error:  # whatever a value means to transformers that it cannot use
        raise UserError(f"{path}: cannot build the model of its config: {type(error).__name__}: "
                        f"{first_line(error)}") from error


def merged_modules(config, whole_head: bool = False) -> tuple[str, ...]:
    """The modules of an attention layer that merging changes: of keys and values, or of the whole head."""
    if config.model_type in FUSED:
        return ("qkv_proj", "o_proj") if whole_head else ("qkv_proj",)
    norms = ("k_norm", "q_norm")[: 1 + whole_head] if config.model_type in JOINT_NORMS else ()
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
    if attention.config.model_type not in FUSED:
        return parameters
    fused = torch.cat([parameters.pop(f"{letter}_proj.weight") for letter in "qkv"])
    return parameters | {"qkv_proj.weight": fused}


def watch_heads(attention, function) -> list:
    """Hooks that call function(letter, vectors [..., heads * d]) with q, k and v of each forward pass.

    q and k are those that enter RoPE or the norms of single heads. Returns the handles.
    """
    behind = "norm" if attention.config.model_type in JOINT_NORMS else "proj"
    fused = attention.config.model_type in FUSED
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


def attention_input(layer, hidden: torch.Tensor) -> torch.Tensor:
    """What a decoder layer's attention reads: its normalized input, or the input where norms come after."""
    return layer.input_layernorm(hidden) if hasattr(layer, "input_layernorm") else hidden


def restore_buffers(model, device) -> None:
    """Compute what to_empty discards and no checkpoint stores: RoPE frequencies, the scale of embeddings."""
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(model.config).to(device)
    scale = getattr(decoder.embed_tokens, "scalar_embed_scale", None)
    if scale is not None:
        decoder.embed_tokens.embed_scale = torch.tensor(scale, device=device)


def needs_several_gpus(path: str, dtype: torch.dtype, device: str) -> bool:
    """Whether the model is too large for the first of several GPUs. Always false for a device but "cuda"."""
    if device != "cuda" or torch.cuda.device_count() < 2:
        return False
    parameters = empty_model(path, load_config(path), dtype).parameters()
    free, _ = torch.cuda.mem_get_info(0)
    return sum(parameter.nbytes for parameter in parameters) > WEIGHT_SHARE * free


def load_model(path: str, dtype: torch.dtype = torch.float32, device: str = "cpu", spread: bool = False):
    """The causal language model in eval mode.

    spread: over all GPUs, layer by layer, by accelerate; its device is then the first layer's. Raises
    UserError for missing, unexpected, mis-shaped or non-finite weights, or if the GPUs are too small.
    """
    config = load_config(path)
    weight_files(path)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, device_map="auto" if spread else None,
            ignore_mismatched_sizes=True, output_loading_info=True, trust_remote_code=False,
        )
    except Exception as error:  # the exception class depends on the damage
        raise UserError(f"{path}: cannot load the weights: {type(error).__name__}: "
                        f"{first_line(error)}") from error
    check_names(path, report["missing_keys"], report["unexpected_keys"])
    for name, actual, expected in sorted(report["mismatched_keys"]):
        raise UserError(f"{path}: expected {name} of shape {list(expected)}, found {list(actual)}")
    placed = getattr(model, "hf_device_map", {}).values()
    if spread and not {"cpu", "disk"}.isdisjoint(placed):
        raise UserError(f"{path}: expected GPUs that hold the model, found {torch.cuda.device_count()} that "
                        "are too small")
    check_finite(model.named_parameters(), path)
    return model.eval() if spread else model.to(device).eval()


def load_tokenizer(path: str):
    """The tokenizer of a checkpoint.

    Raises UserError unless its ids fit the model's vocabulary and it has an end-of-sequence token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # each tokenizer backend raises its own class
        names, reason = tokenizer_files(path), first_line(error)
        if "tokenizer.model" in names and "tokenizer.json" not in names:
            reason = "expected the packages that read tokenizer.model; pip install sentencepiece protobuf"
        raise UserError(f"{path}: cannot load a tokenizer: {reason}") from error
    largest, rows = max(tokenizer.get_vocab().values()), load_config(path).vocab_size
    if largest >= rows:
        raise UserError(f"{path}: expected token ids below the model's vocab_size {rows}, "
                        f"found {largest} in the tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{path}: expected a tokenizer with an end-of-sequence token, found none")
    return tokenizer


def bos_prefix(tokenizer, bos: bool | None) -> list[int]:
    """What every sequence begins with: the begin-of-sequence token or nothing.

    bos: whether to begin with it; None: as the tokenizer itself does, where it encodes a plain text. Raises
    UserError if it is asked for and the tokenizer has none.
    """
    begin = tokenizer.bos_token_id
    if bos is None:
        bos = tokenizer("a")["input_ids"][:1] == [begin]
    if bos and begin is None:
        raise UserError(f"--bos: expected a tokenizer with a begin-of-sequence token, found none in "
                        f"{tokenizer.name_or_path}")
    return [begin] if bos else []


def save_tokenizer(path: str, directory: str) -> None:
    """Copy the files of a checkpoint's tokenizer to another directory, byte for byte."""
    for name in tokenizer_files(path):
        source, target = os.path.join(path, name), os.path.join(directory, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.realpath(source) != os.path.realpath(target):
            shutil.copyfile(source, target)


def weight_dtype(name: str, config) -> torch.dtype:
    """The dtype of this name; "source": that of the config, float32 if it has none."""
    return (config.dtype or torch.float32) if name == "source" else getattr(torch, name)


def pick_device(name: str) -> str:
    """"auto" -> cuda if available, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def processor_dtype() -> str:
    """"bfloat16" if this machine's processor has instructions for products of it, else "float32"."""
    instructions = torch.cpu.get_capabilities()
    return "bfloat16" if instructions.get("avx512_bf16") or instructions.get("amx_bf16") else "float32"
