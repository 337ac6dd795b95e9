"""Small models and tokenizers: random models of every family, bytes as tokens, templates of chats."""

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from common.models.proof import attach_pairs

END = 256  # end-of-sequence id of the byte tokenizer
GQA, TIED = {"num_key_value_heads": 4}, {"tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHORT = {"original_max_position_embeddings": 32}
LLAMA3 = SHORT | {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0}
FAMILIES = {  # head_dim 8 is not hidden_size / heads = 6 in any but Phi-3's longrope
    "llama, GQA, tied": GQA | TIED | {"rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": 12},
    "qwen2, GQA": GQA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 12,
                         "max_window_layers": 2},
    "qwen3, GQA, tied": GQA | TIED | {"model_type": "qwen3"},
    "qwen3, biases": {"model_type": "qwen3", "bias": True},
    "gemma, tied": TIED | {"model_type": "gemma"},
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "olmo2, GQA, biases": GQA | {"model_type": "olmo2", "bias": True},
    "olmo3": {"model_type": "olmo3", "sliding_window": 12, "rope_parameters": {
        "full_attention": SHORT | {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"model_type": "phi3", "sliding_window": 12},
    "phi3, GQA, longrope": GQA | SHORT | {"model_type": "phi3", "head_dim": 6, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1],
        "long_factor": [2.0, 2.1], "partial_rotary_factor": 0.7,  # scales what turns, four channels of six
    }},
    "cohere, GQA": GQA | {"model_type": "cohere", "logit_scale": 0.25},  # pairs (2p, 2p + 1), parallel
    "phi": {"model_type": "phi", "hidden_size": 64},  # half of the channels; parallel; biases, the head's too
    "stablelm": {"model_type": "stablelm", "hidden_size": 128, "head_dim": 16},  # a quarter of the channels
    "glm4, GQA": GQA | {"model_type": "glm4"},  # both; norms on both sides
    "granite": {"model_type": "granite", "residual_multiplier": 0.22, "attention_multiplier": 0.2,
                "embedding_multiplier": 3.0, "logits_scaling": 4.0},
    "gemma2": {"model_type": "gemma2", "sliding_window": 12, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 5.0},
    "gemma3, GQA": GQA | {"model_type": "gemma3_text", "sliding_window": 12},  # norms that multiply by 1 + w
    "gpt_oss": GQA | EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 4,
                                   "sliding_window": 12},  # sinks
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "olmoe": EXPERTS | {"model_type": "olmoe", "hidden_size": 64, "num_experts": 4},
    "qwen2_moe, GQA": GQA | EXPERTS | {"model_type": "qwen2_moe", "num_experts": 4,
                                       "shared_expert_intermediate_size": 32},
    "glm4_moe": EXPERTS | {"model_type": "glm4_moe", "n_routed_experts": 4, "first_k_dense_replace": 1},
}
TURN = "{{ message['content'] + '<|im_end|>\n' }}"
CHATML = ("{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
          "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
          "{{ '<|im_start|>' + message['role'] + '\n' }}" + TURN + "{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# the same text, with transformers' marks around what the assistant generates
MARKED = CHATML.replace(TURN, "{% if message['role'] == 'assistant' %}{% generation %}" + TURN +
                        "{% endgeneration %}{% else %}" + TURN + "{% endif %}")
LLAMA2 = ("{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
          "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
          "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
          "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
          "{% if loop.index0 == 0 and system is defined %}"
          "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
          "{% else %}{% set content = message['content'] %}{% endif %}"
          "{% if message['role'] == 'user' %}"
          "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
          "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
          "{% endif %}{% endfor %}")
# like DeepSeek-R1's: the generation prompt opens a thought, and finished turns show none
THOUGHT = ("{% for message in messages %}{% if message['role'] == 'user' %}"
           "{{ '<|im_start|>' + message['content'] }}{% else %}"
           "{{ '<|im_end|>' + message['content'].split('</think>')[-1] + '<eos>' }}{% endif %}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_end|><think>\n' }}{% endif %}")
QUICK = "llama, GQA, tied", "qwen3, GQA, tied", "phi3", "phi", "glm4, GQA", "gemma2", "gemma3, GQA", "gpt_oss"
EVERY_FAMILY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]


def byte_tokenizer(merges=(), **options) -> PreTrainedTokenizerFast:
    """Bytes, and pairs of them that are merged, as tokens. options: of PreTrainedTokenizerFast."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", **options)


def class_model(config, seed: int = 0):
    """A random model of this config. Norm weights and biases are random, too: none of them is trivial."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 2:  # experts
                parameter.normal_(std=0.2)
            elif name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tiny_model(seed: int = 0, bias: bool = False, model_type: str = "llama", **changes):
    """A random 3-layer, 8-head model; by default a Llama with MHA."""
    settings = {
        "vocab_size": 260, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "max_position_embeddings": 256,
        "attention_bias": bias, "bos_token_id": None, "eos_token_id": END, "pad_token_id": END,
        "initializer_range": 0.2,
    }
    model = class_model(AutoConfig.for_model(model_type, **(settings | changes)), seed)
    attach_pairs(model)
    return model


def save_tiny(path, dtype: torch.dtype = torch.float32, **options) -> str:
    tiny_model(**options).to(dtype).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def chatml_tokenizer(template: str = CHATML):
    """Bytes; two line ends in a row, or a line end and a double quote, are one token. It begins a text with
    <eos>, which no chat begins with unless its template says so.
    """
    tokenizer = byte_tokenizer([("Ċ", "Ċ"), ("Ċ", '"')], chat_template=template)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", END)])
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


def llama2_tokenizer():
    """A blank before the text and blanks as parts of words, as in Llama 2."""
    characters = sorted(set("▁[]/<>INSTYinstalhelo, wrd!.ObyHmue\n'?A"))
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i for i, c in enumerate(characters, 3)}
    merges = [("▁", "H"), ("▁", "▁")]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                   unk_token="<unk>", chat_template=LLAMA2)
