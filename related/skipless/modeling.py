"""A Llama without skip connections and norms, serial or parallel, with or without its Q, K, V and P matrices.

A serial block is x -> FFN(attention(x)), a parallel one x -> attention(x) + FFN(x); RoPE, grouped queries and
the FFN, if it is gated, are Llama's. A projection named in config.removed is the identity and has no weights.
Importing this module registers the classes, so that AutoModelForCausalLM loads such checkpoints like any
other.
"""

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.nemotron.modeling_nemotron import NemotronMLP


@strict
class SkiplessConfig(LlamaConfig):
    """LlamaConfig plus parallel (attention next to the FFN) and removed (names of absent projections).

    gated: Llama's FFN, down(act(gate(x)) * up(x)); otherwise down(act(up(x))), as in Pythia.
    """

    model_type = "skipless_llama"

    parallel: bool = False
    gated: bool = True
    removed: list[str] | tuple[str, ...] = ()


class SkiplessLayer(LlamaDecoderLayer):
    """One block. Only linear maps lie between its input and Q, K and V (parallel: and the FFN)."""

    def __init__(self, config: SkiplessConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        del self.input_layernorm, self.post_attention_layernorm
        self.parallel = config.parallel
        if not config.gated:
            self.mlp = NemotronMLP(config)
        for name in config.removed:
            setattr(self.self_attn, name, nn.Identity())

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        return attended + self.mlp(hidden_states) if self.parallel else self.mlp(attended)


class SkiplessForCausalLM(LlamaForCausalLM):
    """LlamaForCausalLM with skipless layers and without the final norm."""

    config_class = SkiplessConfig
    _no_split_modules = ["SkiplessLayer"]

    def __init__(self, config: SkiplessConfig):
        super().__init__(config)
        layers = (SkiplessLayer(config, index) for index in range(config.num_hidden_layers))
        self.model.layers, self.model.norm = nn.ModuleList(layers), nn.Identity()
        self.post_init()


AutoConfig.register(SkiplessConfig.model_type, SkiplessConfig)
AutoModelForCausalLM.register(SkiplessConfig, SkiplessForCausalLM)
