"""Checkpoints in and out: what a model is, whether the method applies to it, and loading it with clear refusals."""

import glob
import hashlib
import os
from dataclasses import asdict, dataclass

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from common.cli import UserError, suggest

logging.set_verbosity_error()  # the stages print their own account of what they load
logging.disable_progress_bar()

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # config.model_type: decoders of the same layout, RoPE over pairs (p, p + d/2)
DEMO = "demo"
DEMO_HOME = os.path.join("runs", "demo-model")  # where the embedded model is kept once made
WEIGHT_FILES = ("*.safetensors", "*.bin")
PUBLISHED = ("meta-llama/Llama-2-7b-hf", "princeton-nlp/Sheared-LLaMA-1.3B")  # of the paper's experiments, on the hub


@dataclass(frozen=True)
class Geometry:
    """The numbers that shape an attention layer."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


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
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.model", "*.txt", *WEIGHT_FILES])
    except Exception as error:  # a bad name, no network and no permission are different classes
        here = [os.path.dirname(path) for path in sorted(glob.glob(os.path.join("runs", "*", "*", "config.json")))]
        known = [DEMO, *here, *PUBLISHED]
        raise UserError(f"model {name}: neither a directory nor a hub repository that can be reached ({type(error).__name__})"
                        f"{suggest(name, known)}; known: {', '.join(known)}") from error


def load_config(path: str):
    """The config of a checkpoint. Raises UserError where there is none."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a model config, found none that transformers can read: {error}") from error
    return config


def require_convertible(path: str, config) -> None:
    """Raise UserError, with the reason, unless the method applies to a model of this config."""
    if config.model_type not in SUPPORTED:
        raise UserError(f"{path}: expected model_type in {list(SUPPORTED)}, found {config.model_type!r}")
    if getattr(config, "quantization_config", None):
        raise UserError(f"{path}: expected weights in floating point, found a quantized checkpoint; rotations would not fit its grid")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1) != 1 and rope.get("rope_type") != "proportional":
        raise UserError(f"{path}: expected RoPE over whole heads, found partial_rotary_factor {rope['partial_rotary_factor']}")
    if geometry(config).kv_heads < 2:
        raise UserError(f"{path}: expected at least 2 key/value heads, found {geometry(config).kv_heads}: there is nothing to merge")


def check_kv_heads(shape: Geometry, kv_heads: int) -> None:
    """Raise UserError unless kv_heads divides the source's key/value heads and is smaller."""
    allowed = [n for n in range(1, shape.kv_heads) if shape.kv_heads % n == 0]
    if kv_heads not in allowed:
        raise UserError(f"--kv-heads: expected one of {allowed} for {shape.kv_heads} key/value heads, found {kv_heads}")


def fingerprint(path: str) -> str:
    """A sha256 over config.json and 64 slices of each weight file: any training step changes it, and 13 GB hash at once."""
    digest = hashlib.sha256()
    files = sorted(file for pattern in WEIGHT_FILES for file in glob.glob(os.path.join(path, pattern)))
    if not files:
        raise UserError(f"{path}: expected weights ({' or '.join(WEIGHT_FILES)}), found none")
    for name in [os.path.join(path, "config.json"), *files]:
        size = os.path.getsize(name)
        digest.update(f"{os.path.basename(name)} {size}\n".encode())
        with open(name, "rb") as file:
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
    """The causal language model in eval mode, its weights checked to be all there and finite."""
    load_config(path)
    try:
        model, said = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True)
    except Exception as error:  # each kind of damage to a file raises its own class
        raise UserError(f"{path}: cannot load the weights: {type(error).__name__}: {error}") from error
    if said["missing_keys"]:
        raise UserError(f"{path}: expected a tensor {min(said['missing_keys'])}, found none")
    for name, found, expected in sorted(said["mismatched_keys"]):
        raise UserError(f"{path}: expected {name} of shape {list(expected)}, found {list(found)}")
    check_finite(model.named_parameters(), path)
    return model.to(device).eval()


def open_checkpoint(directory: str) -> dict:
    """Tensor name -> what reads its rows when sliced, for every tensor in a checkpoint directory."""
    tensors = {}
    for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
        file = safe_open(path, framework="pt")
        tensors |= {key: file.get_slice(key) for key in file.keys()}
    if not tensors:  # an older release: pickled tensors only, memory-mapped, and no code in them is run
        for path in sorted(glob.glob(os.path.join(directory, "*.bin"))):
            tensors |= torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return tensors


def check_finite(tensors, where: str) -> None:
    """Raise UserError naming the first tensor that holds a NaN or Inf."""
    for name, tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise UserError(f"{where}: NaN or Inf in {name}")


def load_tokenizer(path: str):
    """The checkpoint's own tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # each tokenizer backend raises its own class
        raise UserError(f"{path}: cannot load a tokenizer: {error}") from error


def pick_device(name: str) -> str:
    """"auto" -> cuda where there is one, else cpu."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
