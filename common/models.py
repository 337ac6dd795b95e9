"""Checkpoints in and out: what a model is, whether the method applies to it, and loading it with clear refusals."""

import glob
import hashlib
import json
import os
import re
import zipfile
from dataclasses import asdict, dataclass

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from common.cli import UserError, suggest
from common.records import COUNT, FILE_NAME, STRING, Optional, mismatch, shown

logging.set_verbosity_error()  # the stages print their own account of what they load
logging.disable_progress_bar()

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # config.model_type: decoders of the same layout, RoPE over pairs (p, p + d/2)
DEMO = "demo"
DEMO_HOME = os.path.join("runs", "demo-model")  # where the embedded model is kept once made
WEIGHT_FILES = (  # where transformers looks for weights, in its order
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)
PUBLISHED = ("meta-llama/Llama-2-7b-hf", "princeton-nlp/Sheared-LLaMA-1.3B")  # of the paper's experiments, on the hub
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
         "intermediate_size", "vocab_size", "max_position_embeddings")
IGNORED_TENSORS = re.compile(r".*rotary_emb\.inv_freq")  # older releases store what is computed from the config


@dataclass(frozen=True)
class Geometry:
    """The numbers that shape an attention layer."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


def geometry(config) -> Geometry:
    """Read the geometry off a transformers config."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Geometry(config.num_hidden_layers, heads, kv_heads, head_dim, config.hidden_size)


def resolve_model(name: str) -> str:
    """A local directory for `name`: a directory, or a hub repository (downloaded). Raises UserError when it is neither."""
    if os.path.isdir(name):
        return name
    if os.path.exists(name):
        raise UserError(f"model {name}: expected a checkpoint directory, found a file")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.model", "*.txt", "*.safetensors", "*.bin"])
    except Exception as error:  # a bad name, no network and no permission are different classes
        here = [os.path.dirname(path) for path in sorted(glob.glob(os.path.join("runs", "*", "*", "config.json")))]
        known = [DEMO, *here, *PUBLISHED]
        raise UserError(f"model {name}: neither a directory nor a hub repository that can be reached ({type(error).__name__})"
                        f"{suggest(name, known)}; known: {', '.join(known)}") from error


def load_config(path: str):
    """The config of a checkpoint, or in a file. Raises UserError where there is none, or a size in it is no positive integer."""
    try:
        with open(os.path.join(path, "config.json") if os.path.isdir(path) else path, encoding="utf-8") as file:
            fault = mismatch(json.load(file), {name: Optional(COUNT) for name in SIZES}, "config.json")
        config = None if fault else AutoConfig.from_pretrained(path)
    except Exception as error:  # a damaged file raises a different class for each kind of damage
        raise UserError(f"{path}: expected a model config, found none that transformers can read: {error}") from error
    if fault:
        raise UserError(f"{path}: {fault}")
    return config


def require_convertible(path: str, config) -> None:
    """Raise UserError, with the reason, unless the method applies to a model of this config."""
    if config.model_type not in SUPPORTED:
        raise UserError(f"{path}: expected model_type in {list(SUPPORTED)}, found {config.model_type!r}")
    if getattr(config, "quantization_config", None):
        raise UserError(f"{path}: expected weights in floating point, found a quantized checkpoint; "
                        "rotated weights would not fit its grid")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1) != 1 and rope.get("rope_type") != "proportional":
        raise UserError(f"{path}: expected RoPE over whole heads, "
                        f"found partial_rotary_factor {rope['partial_rotary_factor']}")
    shape = geometry(config)
    if shape.head_dim % 2:
        raise UserError(f"{path}: expected an even head_dim, which RoPE splits into pairs, found {shape.head_dim}")
    if shape.heads % shape.kv_heads:
        raise UserError(f"{path}: expected key/value heads that divide {shape.heads} heads, found {shape.kv_heads}")
    if shape.kv_heads < 2:
        raise UserError(f"{path}: expected at least 2 key/value heads, found {shape.kv_heads}: nothing to merge")


def check_kv_heads(source_kv_heads: int, kv_heads: int) -> None:
    """Raise UserError unless kv_heads is a proper divisor of the source's key/value heads."""
    allowed = [n for n in range(1, source_kv_heads) if source_kv_heads % n == 0]
    if kv_heads not in allowed:
        raise UserError(f"--kv-heads: expected one of {allowed} for {source_kv_heads} key/value heads, found {kv_heads}")


def weight_files(directory: str) -> list[str]:
    """Names of the files that transformers reads a checkpoint's weights from, an index first where there is one.

    Raises UserError when there are none, or when the index cannot be read or names files elsewhere.
    """
    present = [name for name in WEIGHT_FILES if os.path.isfile(os.path.join(directory, name))]
    if not present:
        raise UserError(f"{directory}: expected weights (one of {', '.join(WEIGHT_FILES)}), found none")
    name = present[0]
    if not name.endswith(".index.json"):
        return [name]
    path = os.path.join(directory, name)
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected an index of weight files, found none that can be read") from error
    fault = mismatch(index, {"weight_map": {STRING: FILE_NAME}}, "index")
    if fault:
        raise UserError(f"{path}: {fault}")
    shards = sorted(set(index["weight_map"].values()))
    for shard in shards:
        if "/" in shard or not os.path.isfile(os.path.join(directory, shard)):
            raise UserError(f"{path}: expected names of files beside it, found {shown(shard)}")
    return [name, *shards]


def fingerprint(path: str) -> str:
    """A sha256 over config.json and 64 slices of each weight file read: any training step changes it, and 13 GB hash at once."""
    digest = hashlib.sha256()
    for name in ["config.json", *weight_files(path)]:
        size = os.path.getsize(os.path.join(path, name))
        digest.update(f"{name} {size}\n".encode())
        with open(os.path.join(path, name), "rb") as file:
            for offset in range(0, size, max(size // 64, 1 << 16)):
                file.seek(offset)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()


def describe(path: str, name: str | None = None) -> dict:
    """What a sidecar says of a model: name as given, path, fingerprint and geometry."""
    if not os.path.isdir(path):  # transformers would take it for a hub name, and try for half a minute without a network
        raise UserError(f"{path}: expected a checkpoint directory, found none")
    config = load_config(path)
    return {"name": name or path, "path": path, "fingerprint": fingerprint(path)} | asdict(geometry(config))


def source_model(record: dict) -> dict:
    """The model of an artifact's record, checked to be still what it was. Raises UserError when it changed or went."""
    model = record["model"]
    if not os.path.isdir(model["path"]):
        raise UserError(f"model {model['path']}: the directory that 01_calibrate.py read is gone")
    if fingerprint(model["path"]) != model["fingerprint"]:
        raise UserError(f"model {model['path']}: changed since 01_calibrate.py read it "
                        f"(expected {model['fingerprint'][:12]}, found {fingerprint(model['path'])[:12]})")
    return model


def sliding_window(attention) -> int | None:
    """How many positions, its own included, a token of this layer attends to; None for all before it."""
    if hasattr(attention, "sliding_window"):  # Qwen: layer by layer
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None)


def window_mask(length: int, window: int | None, device) -> torch.Tensor | None:
    """[1, 1, T, T] bool, true where a token attends; None where plain causal attention does."""
    if window is None or window >= length:
        return None
    positions = torch.arange(length, device=device)
    behind = positions[:, None] - positions
    return ((behind >= 0) & (behind < window))[None, None]


def load_model(path: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """The causal language model in eval mode. Raises UserError unless the weights are its own, all present and finite."""
    load_config(path)
    weight_files(path)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:  # each kind of damage to a file raises its own class
        raise UserError(f"{path}: cannot load the weights: {type(error).__name__}: {first_line(error)}") from error
    check_names(path, report["missing_keys"], report["unexpected_keys"])
    for name, actual, expected in sorted(report["mismatched_keys"]):
        raise UserError(f"{path}: expected {name} of shape {list(expected)}, found {list(actual)}")
    check_finite(model.named_parameters(), path)
    return model.to(device).eval()


def check_names(path: str, missing, unexpected) -> None:
    """Raise UserError naming the first tensor that a checkpoint lacks, or that its model has no place for."""
    if missing:
        raise UserError(f"{path}: expected a tensor {min(missing)}, found none")
    unexpected = [name for name in unexpected if not IGNORED_TENSORS.fullmatch(name)]
    if unexpected:
        raise UserError(f"{path}: expected the tensors of its config alone, found also {shown(min(unexpected))}")


def open_checkpoint(directory: str) -> dict:
    """Tensor name -> an object that reads its rows when sliced, for every tensor that transformers would load.

    Raises UserError for files that are damaged or hold more than tensors.
    """
    tensors = {}
    for name in weight_files(directory):
        path = os.path.join(directory, name)
        try:
            if name.endswith(".safetensors"):
                file = safe_open(path, framework="pt")
                tensors |= {key: file.get_slice(key) for key in file.keys()}
            elif name.endswith(".bin"):  # an older release; weights_only refuses pickles that would run code
                tensors |= torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        except Exception as error:  # each kind of damage to a file raises its own class
            raise UserError(f"{path}: expected a file of tensors, found none that can be read: "
                            f"{first_line(error)}") from error
    return tensors


def first_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_finite(tensors, where: str) -> None:
    """Raise UserError naming the first tensor that holds a NaN or Inf."""
    for name, tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise UserError(f"{where}: NaN or Inf in {name}")


def load_tokenizer(path: str):
    """The checkpoint's own tokenizer. Raises UserError unless it fits the vocabulary and has an end-of-sequence token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # each tokenizer backend raises its own class
        raise UserError(f"{path}: cannot load a tokenizer: {first_line(error)}") from error
    largest, rows = max(tokenizer.get_vocab().values()), load_config(path).vocab_size
    if largest >= rows:
        raise UserError(f"{path}: expected token ids below the model's vocab_size {rows}, found a tokenizer with {largest}")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{path}: expected a tokenizer with an end-of-sequence token, found none")
    return tokenizer


def save_tokenizer(path: str, directory: str) -> None:
    """Write the tokenizer of the checkpoint at `path` into another directory."""
    tokenizer = load_tokenizer(path)
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:  # the Rust backend reports a full disk as a bare Exception
        raise OSError(f"{directory}: cannot write the tokenizer: {first_line(error)}") from error


def pick_device(name: str) -> str:
    """"auto" -> cuda where there is one, else cpu."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
