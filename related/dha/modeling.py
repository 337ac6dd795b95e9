"""Decoupled-head attention: a Llama in which every layer has its own numbers of key heads and of value heads.

Query head h of layer l reads key head d^K(h, l) and value head d^V(h, l), given by two maps (Eq. 3 of the DHA
paper). The cache holds the key heads and value heads of each layer and nothing else; they are repeated for
their query heads right before attention, so every attention implementation of transformers works. StaticCache
does not accept such layers: it allocates as many value heads as key heads.

This file needs nothing but transformers and is saved with each checkpoint, for from_pretrained(PATH,
trust_remote_code=True). Where it has been imported, no code from a checkpoint runs.
"""

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama


@strict
class DhaConfig(LlamaConfig):
    """key_groups[l], value_groups[l]: the query heads that share each key (value) head of layer l.

    num_key_value_heads is their mean, as of a GQA model whose cache has the same size.
    """

    model_type = "dha"
    key_groups: list | None = None
    value_groups: list | None = None


def reader_map(groups: list[list[int]]) -> list[int]:
    """For each query head, the index of its group."""
    index = {head: number for number, group in enumerate(groups) for head in group}
    return [index[head] for head in sorted(index)]


class DhaAttention(modeling_llama.LlamaAttention):
    """Llama attention with separate maps from query heads to key heads and to value heads."""

    def __init__(self, config: DhaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        key_groups, value_groups = config.key_groups[layer_idx], config.value_groups[layer_idx]
        self.num_key_value_groups = 1  # attention functions receive keys and values that are repeated already
        self.key_map, self.value_map = reader_map(key_groups), reader_map(value_groups)
        key_size, value_size = len(key_groups) * self.head_dim, len(value_groups) * self.head_dim
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, value_size, bias=config.attention_bias)

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        def heads(projection):  # [B, T, hidden] -> [B, heads, T, d]
            return projection(hidden_states).view(*input_shape, -1, self.head_dim).transpose(1, 2)

        input_shape = hidden_states.shape[:-1]
        query, key, value = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        implementation, eager = self.config._attn_implementation, modeling_llama.eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        key, value = key[:, self.key_map], value[:, self.value_map]
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(*input_shape, -1)), weights


class DhaForCausalLM(LlamaForCausalLM):
    """LlamaForCausalLM with DhaAttention in every layer."""

    config_class = DhaConfig

    def __init__(self, config: DhaConfig):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = DhaAttention(config, index)
        self.post_init()


AutoConfig.register("dha", DhaConfig, exist_ok=True)
AutoModelForCausalLM.register(DhaConfig, DhaForCausalLM, exist_ok=True)
DhaConfig.register_for_auto_class()  # save_pretrained copies this file and writes auto_map
DhaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
