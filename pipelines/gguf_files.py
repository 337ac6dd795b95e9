"""GGUF files as source models: llama.cpp's format, dequantized once into an ordinary float32 checkpoint.

float32, because dequantized values (scale x integer + offset) do not lie on a 16-bit grid. transformers
rebuilds config and tokenizer from the metadata, and the package gguf dequantizes the tensors, one decoder
layer at a time. Whatever a checkpoint of that config cannot hold is refused, not dropped.
"""

import json
import os

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.cli import UserError
from common.companions import GENERATION, loadable_by_older_releases
from common.families import geometry, require_convertible
from common.files import read_json, refuse_overwrite, sha256, write_directory, write_json
from common.layers import CheckpointWriter
from common.models import SIZES
from common.progress import Progress
from common.records import COUNT, Optional, mismatch
from common.weights import check_names, fingerprint, first_line

ORIGIN = "gguf.json"  # in the checkpoint: the file it was made from
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # general.architecture; Mistral models are stored as llama
# metadata under the architecture's name that the config takes over, and what changes nothing at this value
KNOWN = ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
         "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
         "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "tensor_data_layout")
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "attention.sliding_window": 0}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
PRE = "tokenizer.ggml.pre"  # how byte-level BPE splits text
# its values for which transformers splits as llama.cpp does
SPLITS = ("default", "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "qwen2",
          "deepseek-r1-qwen")
MODULES = {  # module of the model -> tensor of the file, without .weight or .bias
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def dequantize(file: str, directory: str, force: bool) -> str:
    """Write the checkpoint `directory` from a GGUF file, unless it was made from the same file; returns it.

    Raises UserError if the package gguf is missing, if the file is damaged, not convertible, or holds more
    than its config describes, and if the directory holds something else and force is off.
    """
    if not os.path.isfile(file):
        raise UserError(f"model {file}: expected a GGUF file, found none")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"model {file}: expected the package gguf, which reads it, found none; "
                        "pip install gguf") from error
    digest = sha256(file)
    if made_from(directory, digest):
        return directory
    refuse_overwrite(directory, force)
    source = GgufFile(file)
    with write_directory(directory) as aside:
        source.write(aside)
        write_json(os.path.join(aside, ORIGIN),
                   {"file": file, "sha256": digest, "fingerprint": fingerprint(aside)})
    print(f"wrote   {directory}: {file}, dequantized to float32")
    return directory


def made_from(directory: str, digest: str) -> bool:
    """Whether the checkpoint `directory` is unchanged since it was made from the file with this sha256."""
    try:
        origin = read_json(os.path.join(directory, ORIGIN))
        return origin["sha256"] == digest and origin["fingerprint"] == fingerprint(directory)
    except (OSError, KeyError, TypeError, UserError):  # missing or damaged
        return False


class GgufFile:
    """An open GGUF file and its config. Raises UserError unless it is a model that can be converted."""

    def __init__(self, file: str):
        from gguf import GGUFReader

        self.file = file
        self.home, self.name = os.path.split(os.path.abspath(file))
        try:
            self.reader = GGUFReader(file)
            self.architecture = self.reader.fields["general.architecture"].contents()
        except Exception as error:  # the exception class depends on the damage
            raise UserError(f"{file}: expected a GGUF file, found none that can be read: "
                            f"{first_line(error)}") from error
        if self.architecture not in ARCHITECTURES:
            raise UserError(f"{file}: expected general.architecture in {list(ARCHITECTURES)}, "
                            f"found {self.architecture!r}")
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.require_known_metadata()
        try:
            self.config = AutoConfig.from_pretrained(self.home, gguf_file=self.name, trust_remote_code=False)
        except Exception as error:
            raise UserError(f"{file}: expected a model config, found none that transformers can read: "
                            f"{first_line(error)}") from error
        fault = mismatch(self.config.to_dict(), {name: Optional(COUNT) for name in SIZES}, "config")
        if fault:
            raise UserError(f"{file}: {fault}")
        require_convertible(file, self.config)
        self.require_plain_rope()
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        self.check_tensors()

    def require_known_metadata(self) -> None:
        """Raise UserError for metadata that transformers ignores, or that is too large to be true."""
        fields = {key: field.contents() for key, field in self.reader.fields.items()
                  if not key.startswith("tokenizer.ggml.") or key in ("tokenizer.ggml.model", PRE)}
        if fields.get("split.count", 1) > 1:
            raise UserError(f"{self.file}: expected a whole model, "
                            f"found one of {fields['split.count']} files")
        layers = fields.get(f"{self.architecture}.block_count", 0)
        if layers > len(self.tensors):
            raise UserError(f"{self.file}: expected tensors of {layers} layers, "
                            f"found {len(self.tensors)} in all")
        for key, value in fields.items():
            architecture, _, name = key.partition(".")
            if architecture != self.architecture or name in KNOWN or name.startswith("rope.scal"):
                continue
            if name not in NEUTRAL or value != NEUTRAL[name]:
                raise UserError(f"{self.file}: expected only metadata that a checkpoint takes over, "
                                f"found {key} {value}")
        split = fields.get(PRE, "default")
        if fields.get("tokenizer.ggml.model") == "gpt2" and split not in SPLITS:
            raise UserError(f"{self.file}: expected {PRE} in {list(SPLITS)}, found {split!r}")

    def require_plain_rope(self) -> None:
        """Raise UserError if RoPE is scaled or partial: transformers ignores such metadata."""
        prefix = f"{self.architecture}.rope."
        rope = {key.removeprefix(prefix): field.contents() for key, field in self.reader.fields.items()
                if key.startswith(prefix)}
        scaling = [name for name in rope if name.startswith("scal")]  # scaling.*; in old files scale_linear
        if scaling and rope.get("scaling.type") != "none":
            name = min(scaling)
            raise UserError(f"{self.file}: expected RoPE without scaling, found {prefix}{name} {rope[name]}")
        head_dim = geometry(self.config).head_dim
        if rope.get("dimension_count", head_dim) != head_dim:
            raise UserError(f"{self.file}: expected RoPE over whole heads of {head_dim}, "
                            f"found {prefix}dimension_count {rope['dimension_count']}")

    def check_tensors(self) -> None:
        """Raise UserError unless the file holds the tensors of its config, of their shapes, and no others."""
        expected = {}
        for name, parameter in self.model.named_parameters():  # tied ones appear once
            expected[tensor_name(name)] = list(parameter.shape)
        stored = self.tensors.keys()
        check_names(self.file, missing=expected.keys() - stored, unexpected=stored - expected.keys())
        for name, shape in expected.items():
            actual = self.tensors[name].shape.tolist()[::-1]  # fastest-moving dimension first
            if actual != shape:
                raise UserError(f"{self.file}: expected {name} of shape {shape}, found {actual}")

    def write_tokenizer(self, directory: str) -> None:
        """Write the tokenizer with its chat template, without the <|endoftext|> that transformers invents."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.home, gguf_file=self.name, trust_remote_code=False)
            tokenizer.save_pretrained(directory)
        except Exception as error:  # each tokenizer backend raises its own class
            raise UserError(f"{self.file}: cannot load a tokenizer: {first_line(error)}") from error
        loadable_by_older_releases(directory)
        path = os.path.join(directory, "tokenizer.json")
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        vocabulary = self.config.vocab_size
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocabulary]
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(content, stream, ensure_ascii=False)

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter of the model by its name there, dequantized: float32, rows in transformers' order."""
        from gguf import dequantize as unpack

        stored = self.tensors[tensor_name(name)]
        try:
            values = torch.tensor(unpack(stored.data, stored.tensor_type))
        except NotImplementedError as error:
            raise UserError(f"{self.file}: expected a type that the package gguf can dequantize, "
                            f"found {stored.tensor_type.name} in {stored.name}") from error
        shape = geometry(self.config)
        heads = {"attn_q.weight": shape.heads, "attn_k.weight": shape.kv_heads}
        kind = stored.name.partition(".")[2].partition(".")[2]  # blk.0.attn_q.weight -> attn_q.weight
        if self.architecture == "llama" and kind in heads:
            return pairs_apart(values, heads[kind])
        return values

    def write_description(self, directory: str) -> None:
        """Write config.json with the fields of its class, generation config, and a card with the license."""
        known, settings = type(self.config)().to_dict(), self.config.to_diff_dict()
        settings = {name: value for name, value in settings.items() if name in known and name[0] != "_"}
        write_json(os.path.join(directory, "config.json"), settings)
        ids = {name: settings[name] for name in TOKEN_IDS if settings.get(name) is not None}
        write_json(os.path.join(directory, GENERATION), ids)
        license = self.reader.fields.get("general.license")
        if license:
            ModelCard(f"---\n{ModelCardData(license=license.contents())}\n---\n").save(
                os.path.join(directory, "README.md"))

    def write(self, directory: str) -> None:
        """Write tokenizer, config and weights to an existing directory."""
        self.write_tokenizer(directory)
        self.write_description(directory)
        layers = [f"model.layers.{index}" for index in range(self.config.num_hidden_layers)]
        head = [] if self.config.tie_word_embeddings else ["lm_head"]
        with CheckpointWriter(directory, self.config, torch.float32, directory) as writer:
            parts = ["model.embed_tokens", *layers, "model.norm", *head]
            for part in Progress(parts, "dequantizing", unit="module"):
                module = self.model.get_submodule(part).to_empty(device="cpu")
                for name, parameter in module.named_parameters(prefix=part):
                    parameter.data.copy_(self.tensor(name))
                writer.write(part, module)
                module.to("meta")


def tensor_name(name: str) -> str:
    """A parameter's name in GGUF files: model.layers.0.mlp.up_proj.weight -> blk.0.ffn_up.weight."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{MODULES[module]}.{kind}"
    index, _, module = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{MODULES[module]}.{kind}"


def pairs_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of W_Q or W_K [heads x d, hidden] as transformers orders them.

    llama.cpp stores RoPE pairs side by side (2p, 2p + 1), transformers half a head apart (p, p + d/2).
    """
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
