"""Decoupled-head attention: a Llama whose layers have their own numbers of key heads and of value heads.

Query head h of layer l reads key head d^K(h, l) and value head d^V(h, l), by maps of their own (Eq. 3 of the DHA paper). The
cache holds the H_l^K key heads and H_l^V value heads of each layer and nothing else; they are repeated for their query
heads right before attention, so that every attention implementation of transformers works. Caches that grow (the default)
take layers of this kind; StaticCache does not: it gives values as many heads as keys.

This file needs transformers alone and lies beside each checkpoint, for AutoModelForCausalLM.from_pretrained(PATH,
trust_remote_code=True). Where it is imported, the classes are registered and no code of a checkpoint is run.
"""

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


@strict
class DhaConfig(LlamaConfig):
    """key_groups[l], value_groups[l]: the query heads that share each key (value) head of layer l, one list per head.

    num_key_value_heads is their mean over layers, keys and values: what a GQA model with a cache of the same size would have.
    """

    model_type = "dha"
    key_groups: list | None = None
    value_groups: list | None = None


def reader_map(groups: list[list[int]]) -> list[int]:
    """Groups of query heads -> the number of the group that each query head is in."""
    group_of = {head: number for number, group in enumerate(groups) for head in group}
    return [group_of[head] for head in sorted(group_of)]


class DhaAttention(LlamaAttention):
    def __init__(self, config: DhaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.num_key_value_groups = 1  # what attention functions see is repeated already
        key_groups, value_groups = config.key_groups[layer_idx], config.value_groups[layer_idx]
        self.key_of, self.value_of = reader_map(key_groups), reader_map(value_groups)
        self.k_proj = nn.Linear(config.hidden_size, len(key_groups) * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, len(value_groups) * self.head_dim, bias=config.attention_bias)

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        input_shape = hidden_states.shape[:-1]
        query, key, value = (projection(hidden_states).view(*input_shape, -1, self.head_dim).transpose(1, 2)
                             for projection in (self.q_proj, self.k_proj, self.v_proj))  # [B, heads, T, d]
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key[:, self.key_of], value[:, self.value_of], attention_mask, scaling=self.scaling,
                                 dropout=self.attention_dropout if self.training else 0.0, **kwargs)
        return self.o_proj(output.reshape(*input_shape, -1)), weights


class DhaForCausalLM(LlamaForCausalLM):
    config_class = DhaConfig

    def __init__(self, config: DhaConfig):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = DhaAttention(config, index)
        self.post_init()


AutoConfig.register("dha", DhaConfig, exist_ok=True)
AutoModelForCausalLM.register(DhaConfig, DhaForCausalLM, exist_ok=True)
DhaConfig.register_for_auto_class()  # save_pretrained puts this file beside the weights, and its name into auto_map
DhaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
