"""Small random checkpoints as the hub has them: configs and tokenizers in the dialect of transformers 4."""

import os
import subprocess
import sys

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from common.run.artifact import write_directory
from common.run.files import read_json, write_json

logging.disable_progress_bar()
TEXT = os.__file__  # that tokenizers are trained on
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 131072,
         "initializer_range": 0.2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_dropout": 0.0,
         "tie_word_embeddings": False, "use_cache": True}
LLAMA = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None}
LLAMA3_SCALING = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                  "original_max_position_embeddings": 8192, "rope_type": "llama3"}
QWEN = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2}
LAYER_NORM = {"rope_theta": 1e4, "layer_norm_eps": 1e-5}
GPT2 = "GPT2Tokenizer", "<|endoftext|>", "<|endoftext|>"
KINDS = {  # family, class of the tokenizer, begin and end of sequence, the rest of config.json
    "llama": ("llama", "GPT2Tokenizer", "<|endoftext|>", "<|endoftext|>", LLAMA | {"rope_theta": 1e5}),
    "llama3": ("llama", "PreTrainedTokenizerFast", "<|begin_of_text|>", "<|end_of_text|>",
               LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING}),
    "qwen2": ("qwen2", "Qwen2Tokenizer", None, "<|endoftext|>", QWEN | {"rope_theta": 1e6}),
    "sentencepiece": ("llama", "LlamaTokenizer", "<s>", "</s>", LLAMA | {"rope_theta": 1e4}),
    "mixtral": ("mixtral", *GPT2, {"rope_theta": 1e4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("stablelm", *GPT2, LAYER_NORM | {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "cohere": ("cohere", *GPT2, LAYER_NORM | {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "granite": ("granite", *GPT2, LLAMA | {"rope_theta": 1e4, "residual_multiplier": 0.22,
                                           "embedding_multiplier": 12.0, "attention_multiplier": 0.2,
                                           "logits_scaling": 4.0}),
}
PRE = {"llama3": "qwen2", "qwen2": "qwen2", "sentencepiece": ""}  # see gguf.sh; the others: gpt-2
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # Qwen2's
TEMPLATE = ("{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
SENTENCEPIECE = """
import sys, sentencepiece
from transformers import LlamaTokenizerFast
text, directory, size = sys.argv[1:]
sentencepiece.SentencePieceTrainer.train(
    input=text, model_prefix=directory + "/tokenizer", vocab_size=size, model_type="bpe", byte_fallback=True,
    normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, minloglevel=2)
LlamaTokenizerFast(directory + "/tokenizer.model", add_prefix_space=True).save_pretrained(directory)
"""


def write_byte_level(directory: str, kind: str, special: list[str]) -> None:
    """tokenizer.json of a byte-level BPE, and vocab.json and merges.txt, which hub models have next to it."""
    tokenizer = Tokenizer(models.BPE())
    words = [] if kind not in PRE else [pre_tokenizers.Split(Regex(WORDS), "isolated")]
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, of_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(of_bytes.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([TEXT], trainer)
    tokenizer.add_special_tokens(special)
    if kind == "llama3":
        begin = special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))])
    tokenizer.save(os.path.join(directory, "tokenizer.json"))
    tokenizer.model.save(directory)


def write_model(directory: str, family: str, config: dict) -> None:
    """Random weights that never prefer the end of sequence, and config.json with exactly these keys."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), trust_remote_code=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.lm_head.weight[config["eos_token_id"]] = 0
    model.save_pretrained(directory)
    names = {"architectures": [type(model).__name__], "model_type": family, "torch_dtype": "float32"}
    write_json(os.path.join(directory, "config.json"), names | config)
    ids = {key: value for key, value in config.items() if key.endswith(("token_id", "version"))}
    write_json(os.path.join(directory, "generation_config.json"), ids)


def write_source(directory: str, kind: str, packages: str) -> None:
    """The checkpoint of a kind. packages: PYTHONPATH of transformers 4 and sentencepiece."""
    family, tokenizer_class, begin, end, settings = KINDS[kind]
    special = {"bos_token": begin, "eos_token": end, "pad_token": end}
    tokenizer = {"add_prefix_space": False}
    with write_directory(directory) as aside:
        if kind == "sentencepiece":
            subprocess.run([sys.executable, "-c", SENTENCEPIECE, TEXT, aside, str(SHAPE["vocab_size"])],
                           env=os.environ | {"PYTHONPATH": packages}, check=True, capture_output=True)
            tokenizer = {"add_bos_token": True, "add_eos_token": False, "legacy": False, "unk_token": "<unk>"}
        else:
            write_byte_level(aside, kind, list(dict.fromkeys(filter(None, (begin, end)))))
        added = read_json(os.path.join(aside, "tokenizer.json"))["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
        write_model(aside, family, SHAPE | settings | {
            "bos_token_id": ids.get(begin), "eos_token_id": ids[end], "transformers_version": "4.40.1"})
        tokenizer |= special | {"added_tokens_decoder": {token.pop("id"): token for token in added}}
        write_json(os.path.join(aside, "tokenizer_config.json"), tokenizer | {
            "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False, "model_max_length": 131072,
            "tokenizer_class": tokenizer_class})
