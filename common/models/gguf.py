"""GGUF files as source models: llama.cpp's format, dequantized once into an ordinary float32 checkpoint.

It is float32 because dequantized values (scale x integer + offset) do not lie on a 16-bit grid. transformers
reads the file, with the packages gguf and accelerate; what it would drop is refused here. Memory holds the
float32 model and copies of its largest tensor (1.1 GiB at most for SmolLM2-135M: weights 0.5, embedding 0.1).
"""

import json
import os

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from common.models import proof, sidecars
from common.models.families import geometry
from common.models.layers import CheckpointWriter
from common.models.load import check_loaded, empty_model
from common.models.weights import check_names, first_line
from common.run.artifact import find_part, sweep, write_directory, write_record
from common.run.errors import UserError
from common.run.files import stamp

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # general.architecture; Mistral models are stored as llama
# metadata under the architecture's name that the config takes over or the shapes of the tensors show
KNOWN = ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
         "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
         "attention.layer_norm_rms_epsilon", "rope.freq_base", "tensor_data_layout")
# and metadata that change nothing at these values
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "attention.sliding_window": 0,
           "rope.scaling.type": "none"}
LICENSE = ("license", "license_name", "license_link")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
PRE = "tokenizer.ggml.pre"  # how byte-level BPE splits text
# its values for which transformers splits as llama.cpp does
SPLITS = ("default", "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "qwen2",
          "deepseek-r1-qwen")


def dequantize(file: str, directory: str, force: bool) -> str:
    """Write the checkpoint `directory` from a GGUF file, unless it was made from the same file; returns it.

    Raises UserError if the packages that read it are missing, if the file is damaged, not convertible, or
    holds more than its config describes, and if the directory holds something else and force is off.
    """
    if not os.path.isfile(file):
        raise UserError(f"model {file}: expected a GGUF file, found none")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"model {file}: expected the packages gguf and accelerate, which read it, "
                        f"found no {error.name}; pip install gguf accelerate") from error
    made_by = {"stage": "01_calibrate.py", "sha256": stamp(file)["sha256"]}
    sweep(*os.path.split(os.path.abspath(directory)))
    if find_part(directory, made_by):
        return directory
    if os.path.lexists(directory) and not force:
        raise UserError(f"{directory}: expected nothing or what was made from {file}, found something else; "
                        "pass --force to replace it")
    fields, config = describe(file)
    with write_directory(directory) as aside:
        write(file, fields, config, aside)
        write_record(aside, made_by)
    print(f"wrote   {directory}: {file}, dequantized to float32")
    return directory


def describe(file: str) -> tuple[dict, AutoConfig]:
    """The metadata of a GGUF file and the config of its model.

    Raises UserError unless the config says all that the file does: its metadata and the names of its tensors.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()
                  if not key.startswith("tokenizer.") or key == PRE}
        architecture = fields["general.architecture"]
    except Exception as error:  # the exception class depends on the damage
        raise UserError(f"{file}: expected a GGUF file, found none that can be read: "
                        f"{first_line(error)}") from error
    if architecture not in ARCHITECTURES:
        raise UserError(f"{file}: expected general.architecture in {list(ARCHITECTURES)}, "
                        f"found {architecture!r}")
    config = load(AutoConfig, file)
    require_known(file, fields, geometry(config).head_dim)
    stored = {tensor.name for tensor in reader.tensors}
    known = get_gguf_hf_weights_map(empty_model(file, config, torch.float32), TensorProcessor())
    check_names(file, (), stored - known.keys())
    proof.require_convertible(file, config)
    return fields, config


def require_known(file: str, fields: dict, head_dim: int) -> None:
    """Raise UserError for metadata that transformers ignores."""
    if fields.get(PRE, "default") not in SPLITS:
        raise UserError(f"{file}: expected {PRE} in {list(SPLITS)}, found {fields[PRE]!r}")
    neutral = NEUTRAL | {"rope.dimension_count": head_dim}
    for key, value in fields.items():
        architecture, _, name = key.partition(".")
        known = name in KNOWN or name in neutral and neutral[name] == value
        if architecture == fields["general.architecture"] and not known:
            raise UserError(f"{file}: expected only metadata that a checkpoint takes over, "
                            f"found {key} {value}")


def load(auto, file: str, **options):
    """What one of transformers' Auto classes makes of a GGUF file. Raises UserError if it fails."""
    home, name = os.path.split(os.path.abspath(file))
    try:
        return auto.from_pretrained(home, gguf_file=name, trust_remote_code=False, **options)
    except Exception as error:  # whatever is in the file
        raise UserError(f"{file}: transformers' {auto.__name__} cannot read it: "
                        f"{first_line(error)}") from error


def write(file: str, fields: dict, config, directory: str) -> None:
    """Write model, tokenizer, and a card with the license to an existing directory."""
    load(AutoTokenizer, file).save_pretrained(directory)
    sidecars.loadable_by_older_releases(directory)
    drop_tokens(os.path.join(directory, "tokenizer.json"), config.vocab_size)
    model, report = load(AutoModelForCausalLM, file, dtype=torch.float32, ignore_mismatched_sizes=True,
                         output_loading_info=True)
    check_loaded(file, report)
    if config.model_type == "llama" and "llama.attention.head_count_kv" not in fields:
        for layer in model.model.layers:  # transformers has left the rows of RoPE pairs side by side
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                pairs = projection.weight.data.unflatten(0, (config.num_attention_heads, -1, 2))
                projection.weight.data = pairs.transpose(1, 2).flatten(0, 2)
    vars(config).pop("_model_name_or_path", None)  # the name in the metadata
    config.save_pretrained(directory)
    GenerationConfig(**{name: getattr(config, name) for name in TOKEN_IDS}).save_pretrained(directory)
    with CheckpointWriter(directory, config, torch.float32, directory) as writer:
        writer.write("", model)
    if "general.license" in fields:
        license = {name: fields.get(f"general.{name.replace('_', '.')}") for name in LICENSE}
        card = ModelCard(f"---\n{ModelCardData(**license)}\n---\n")
        card.save(os.path.join(directory, "README.md"))


def drop_tokens(path: str, vocabulary: int) -> None:
    """Remove tokens that the file does not have: transformers invents an <|endoftext|>."""
    with open(path, encoding="utf-8") as stream:
        content = json.load(stream)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocabulary]
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(content, stream, ensure_ascii=False)
