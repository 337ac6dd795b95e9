"""A Llama without skip connections and norms, serial or parallel, with or without its Q, K, V and P matrices.

A serial block is x -> FFN(attention(x)), a parallel one x -> attention(x) + FFN(x); RoPE, grouped queries and
the FFN, if it is gated, are Llama's. A projection named in config.removed is the identity and has no weights.
Importing this module registers the classes, so that AutoModelForCausalLM loads such checkpoints like any
other.
"""

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama
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


class SkiplessLayer(llama.LlamaDecoderLayer):
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


class SkiplessModel(llama.LlamaModel):
    """Llama's decoder with skipless layers and without the final norm."""

    config: SkiplessConfig
    _no_split_modules = ["SkiplessLayer"]
    _can_record_outputs = {"hidden_states": SkiplessLayer, "attentions": llama.LlamaAttention}

    def __init__(self, config: SkiplessConfig):
        llama.LlamaPreTrainedModel.__init__(self, config)  # LlamaModel's would build unused layers
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(SkiplessLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.Identity()
        self.rotary_emb = llama.LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class SkiplessForCausalLM(LlamaForCausalLM):
    """The language model: trained, saved, loaded and sampled from like any transformers model."""

    config: SkiplessConfig

    def __init__(self, config: SkiplessConfig):
        llama.LlamaPreTrainedModel.__init__(self, config)
        self.model = SkiplessModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(SkiplessConfig.model_type, SkiplessConfig)
AutoModelForCausalLM.register(SkiplessConfig, SkiplessForCausalLM)
