"""GGUF files as source models: equal to the checkpoint they were made of."""

import os
import re

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import GenerationConfig

from common.models import gguf as gguf_files
from common.models.families import geometry
from common.models.load import load_model, load_tokenizer
from common.run.errors import UserError
from models import END, byte_tokenizer, tiny_model
from runs import run

gguf = pytest.importorskip("gguf")
PRE = "tokenizer.ggml.pre"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MERGES = [("t", "h"), ("th", "e")]  # transformers reads no file that has none


def side_by_side(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of a Llama's query and key rows: p and p + d/2 next to each other."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(path, model, metadata: dict | None = None, tensors: dict | None = None) -> str:
    """A GGUF file as llama.cpp's converter writes it.

    metadata, tensors: what is different, by name; None leaves it out.
    """
    config, architecture = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    described = {
        "context_length": config.max_position_embeddings, "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": geometry(config).head_dim, "vocab_size": config.vocab_size,
    }
    described = {f"{architecture}.{key}": value for key, value in described.items()}
    described |= {"general.name": "tiny", PRE: "gpt-2"} | (metadata or {})
    adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in described.items():
        if value is not None:
            adders[type(value)](key, value)
    add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    stored = {}
    for name, parameter in model.named_parameters():
        name = names.get_name(name, (".weight", ".bias"))
        part = name.split(".")[-2]
        turned = architecture == "llama" and part in heads
        stored[name] = side_by_side(parameter, heads[part]) if turned else parameter
    for name, values in (stored | (tensors or {})).items():
        if values is not None:
            writer.add_tensor(name, values.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def converted(tmp_path, model, **options) -> str:
    """The checkpoint made from the model's GGUF file, written with these options."""
    file = write_gguf(tmp_path / "a.gguf", model, **options)
    return gguf_files.dequantize(file, str(tmp_path / "source"), force=False)


def add_tokenizer(writer) -> None:
    tokens = [*byte_tokenizer(MERGES).convert_ids_to_tokens(range(END + 3)), "<unused>"]
    kinds = [gguf.TokenType.CONTROL if token.startswith("<") and len(token) > 1 else gguf.TokenType.NORMAL
             for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def assert_same(path: str, model) -> None:
    """The checkpoint has the model's tensors, and its function."""
    made, tokens = load_model(path), torch.arange(100)[None]
    expected, actual = model.state_dict(), made.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert torch.equal(made(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(("model_type", "tied"), [
    ("llama", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen2", False), ("qwen3", True)))])
def test_an_f32_file_is_the_checkpoint_it_was_made_of(model_type, tied, tmp_path):
    head_dim = 128 if model_type == "qwen3" else 8  # which its metadata does not state
    model = tiny_model(model_type=model_type, num_key_value_heads=4, tie_word_embeddings=tied, hidden_size=64,
                       head_dim=head_dim)
    assert_same(converted(tmp_path, model), model)


@pytest.mark.slow
def test_tokenizer_chat_template_and_special_tokens_come_over(tmp_path):
    metadata = {"general.license": "mit", "llama.rope.scaling.type": "none", PRE: "smollm"}
    made = converted(tmp_path, tiny_model(), metadata=metadata)
    tokenizer, expected = load_tokenizer(made), byte_tokenizer(MERGES)
    text = "def the café():\n\treturn  '北京' <eos>"
    assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<eos>")
    assert tokenizer.chat_template == TEMPLATE
    generation = GenerationConfig.from_pretrained(made)
    assert (generation.eos_token_id, generation.pad_token_id) == (END, END)
    assert "<|endoftext|>" not in tokenizer.get_vocab()  # not in the file; transformers invents it
    assert ModelCard.load(tmp_path / "source" / "README.md").data.license == "mit"


@pytest.mark.slow
def test_head_count_kv_may_be_missing(tmp_path):
    """Llama 1 files lack it. transformers then leaves the rows of W_Q and W_K in llama.cpp's order."""
    model = tiny_model()
    assert_same(converted(tmp_path, model, metadata={"llama.attention.head_count_kv": None}), model)


@pytest.mark.slow
def test_a_file_is_dequantized_once(inputs, tmp_path):
    home, file = tmp_path / "run", write_gguf(tmp_path / "a.gguf", tiny_model())
    arguments = ["--run", home, "--model", file, "--text", inputs["text"], "--sequences", 2, "--length", 64]
    assert "dequantized to float32" in run("01_calibrate.py", *arguments).stdout
    source, weights = str(home / "source"), home / "source/model.safetensors"
    made = weights.stat().st_mtime_ns
    assert gguf_files.dequantize(file, source, force=False) == source
    write_gguf(tmp_path / "a.gguf", tiny_model(seed=1))  # another model under the same name
    with pytest.raises(UserError, match="found something else; pass --force to replace it"):
        gguf_files.dequantize(file, source, force=False)
    assert weights.stat().st_mtime_ns == made
    assert_same(gguf_files.dequantize(file, source, force=True), tiny_model(seed=1))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "message"), [
    ({"cut": 1}, "expected a GGUF file, found none that can be read: "),
    ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "found llama.rope.scaling.type yarn"),
    ({"tensors": {"rope_freqs.weight": torch.ones(4)}},  # Llama 3.1
     "expected only the tensors of its config, found also 'rope_freqs.weight'"),
    ({"tensors": {"blk.2.ffn_up.weight": None}},
     "expected a tensor model.layers.2.mlp.up_proj.weight, found none"),
    ({"metadata": {PRE: "deepseek-llm"}}, "expected tokenizer.ggml.pre in ['default', "),
    ({"model": {"model_type": "gemma"}},
     "expected general.architecture in ['llama', 'qwen2', 'qwen3'], found 'gemma'"),
])
def test_what_is_damaged_or_would_be_lost_is_refused(options, message, tmp_path):
    cut, model = options.pop("cut", 0), tiny_model(**options.pop("model", {}))
    file, source = write_gguf(tmp_path / "a.gguf", model, **options), tmp_path / "source"
    os.truncate(file, os.path.getsize(file) - cut)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        gguf_files.dequantize(file, str(source), force=False)
    assert file in str(error.value) and "\n" not in str(error.value) and not source.exists()
