"""The proof: where RoPE's pairs are, by its own rotation of random heads; classes that it must refuse, each
for its reason; what becomes of the head's products."""

from functools import partialmethod

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from bench.families import small_config
from common.method.rope import to_complex
from common.models import proof
from common.models.families import in_order, rope_frequencies
from common.models.forward import Reached, attending, attention_factor, windows
from common.models.head import head_of
from common.models.load import empty_model
from common.run.errors import UserError
from models import EVERY_FAMILY, FAMILIES, tiny_model

PLAIN = {"mistral", "qwen2, GQA", "phi3", "olmo2", "gemma, tied", "granite", "olmoe"}


def heads_of(model, hidden: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [G, T, d] of a layer before RoPE, behind its norm, and behind RoPE."""
    attention, seen = model.model.layers[index].self_attn, []
    last = next(name for name in ("k_norm", "k_proj", "qkv_proj") if hasattr(attention, name))
    attention.get_submodule(last).register_forward_hook(lambda module, given, output: seen.append(output))
    with attending(model, "recorded"), pytest.raises(Reached) as reached:
        for layer in model.model.layers[:index]:
            layer.forward = lambda hidden, *_, **__: hidden
        model.model(inputs_embeds=hidden, use_cache=False)
    after, before = reached.value.args[1][0], seen[0][0]
    if last == "qkv_proj":
        size = after[:, 0].numel()
        before = before[:, -2 * size : -size]
    if before.shape == after.shape:  # Gemma 3's norm is behind the transposition
        return before, after
    return before.reshape(hidden.shape[1], -1, after.shape[-1]).transpose(0, 1), after


@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("index", [0, 1])
@torch.no_grad()
def test_keys_are_turned_in_the_pairs_and_by_the_angles_that_were_found(name, index):
    """As complex numbers, by angles in proportion to the position, times a number of the pair's."""
    model = tiny_model(**FAMILIES[name])
    pairs = model.model.layers[index].self_attn.rope_pairs
    before, after = heads_of(model, torch.randn(1, 7, model.config.hidden_size), index)
    before, after = to_complex(in_order(before, pairs.order)), to_complex(in_order(after, pairs.behind))
    turns = torch.polar(torch.ones(()).double(), torch.arange(7)[:, None] * pairs.angles)
    assert (pairs.scale is None) == (name != "phi3, GQA, longrope")
    if pairs.scale is not None:  # the factor is sqrt(1 + ln(256 / 32) / ln(32))
        assert pairs.scale.tolist() == pytest.approx([1, 1, 1.6**-0.5])
        turns = pairs.scale * turns
    size = after.abs().sum() / (before * turns).abs().sum()  # of YaRN's and longrope's cosines
    torch.testing.assert_close(after.to(turns), size * before * turns, rtol=1e-4, atol=1e-4)
    assert (pairs.order is None) == (pairs.behind is None) or name == "glm4, GQA"
    assert name not in PLAIN or pairs.order is None
    frequencies = rope_frequencies(model, model.model.layers[index].self_attn)
    torch.testing.assert_close(frequencies, pairs.angles, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["qwen2, GQA", "gemma2", "gpt_oss"])
def test_layers_that_differ_by_their_window_alone_are_proven_each(name):
    """And windows are those of the model's own mask: of the last layers, of every second one."""
    model = empty_model("", tiny_model(**FAMILIES[name]).config, torch.float64)
    kinds = [layer.self_attn.window for layer in proof.watch_layers(model)]
    expected = [None, None, 12] if name == "qwen2, GQA" else [12, None, 12]
    proof.require_convertible("DIR", small_config("exaone_moe", sliding_window=4096))  # beyond its positions
    assert sorted(kinds, key=str) == [12, None] and windows(model.config) == expected


@pytest.mark.parametrize(("name", "where"), [("packed", "packed rows"), ("by-token", "generation")])
def test_attention_that_packed_rows_or_generation_would_read_otherwise_is_refused(monkeypatch, name, where):
    def hotter(*heads, scaling, **options):
        return function(*heads, scaling=1.1 * scaling, **options)

    function = ALL_ATTENTION_FUNCTIONS[name]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, hotter)
    assert refusal().endswith(f"its attention is another one in {where}")


def refusal(**changes) -> str:
    """Why a config is refused."""
    config = AutoConfig.for_model(changes.pop("model_type", "llama"), **SMALL | changes)
    with pytest.raises(UserError) as refused:
        proof.require_convertible("DIR", config)
    return str(refused.value)


SMALL = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2,
         "intermediate_size": 64, "vocab_size": 260, "pad_token_id": None}


@pytest.mark.parametrize(("changes", "reason"), [
    ({"model_type": "gpt2"}, "GPT2LMHeadModel cannot be converted: it is not a decoder (model.layers, "),
    ({"model_type": "deepseek_v3"}, "DeepseekV3ForCausalLM cannot be converted: its attention has no q_proj"),
    ({"model_type": "qwen3_next"}, "some of its layers have no self_attn"),
    ({"model_type": "bitnet"}, "its attention is another one when heads are rotated"),  # a norm before W_O
    ({"model_type": "hunyuan_v1_dense", "head_dim": 8}, "it has query_layernorm, key_layernorm"),
    ({"model_type": "nanochat"}, "its keys are normalized behind RoPE"),
    ({"model_type": "llama4_text", "head_dim": 8}, "its mask is neither causal nor a sliding window"),
    ({"model_type": "laguna", "head_dim": 8, "num_attention_heads_per_layer": [8, 16]},
     "one of its layers has 16 query heads, others 8"),
    ({"sliding_window": 12, "layer_types": ["sliding_attention"] * 2},
     "transformers' cache keeps 12 tokens by its config (sliding_window, layer_types), but its attention"),
    ({"model_type": "falcon_h1", "head_dim": 8}, "its layers do more than normalize before their attention"),
    ({"model_type": "cohere", "use_qk_norm": True},
     "its norms of queries and keys are of no kind that is known here: each head has its own weights (q_"),
    ({"model_type": "olmo", "clip_qkv": 8.0}, "its values are not those of v_proj"),
    ({"model_type": "gemma", "use_bidirectional_attention": True}, "expected causal attention"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8; dequantize it first: "),
    ({"num_key_value_heads": 1}, "it has 1 key/value head: nothing to merge"),
    ({"num_key_value_heads": 3}, "its 8 heads cannot share 3 key/value heads evenly"),
    ({"model_type": "mistral", "sliding_window": 1}, "its sliding_window is 1; transformers cannot cache"),
])
def test_a_class_is_refused_for_what_is_in_the_way(changes, reason):
    message = refusal(**changes)
    assert reason in message and message.startswith("DIR: ") and "\n" not in message


def changed_rotation(monkeypatch, change) -> str:
    """Why a Llama is refused whose rotated queries and keys are changed: change(queries, keys)."""
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *given, **options: change(
        *rotate(*given, **options)))
    return refusal()


def test_a_rotation_that_is_none_of_pairs_is_refused(monkeypatch):
    mixed = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))).Q
    stretch = torch.linspace(1, 2, 8)
    for change in (lambda q, k: (q @ mixed, k @ mixed), lambda q, k: (q * stretch, k * stretch)):
        assert "its keys are not rotated in pairs" in changed_rotation(monkeypatch, change)
        monkeypatch.undo()


def test_queries_that_turn_otherwise_and_heads_that_differ_are_refused(monkeypatch):
    stretch = torch.tensor([1.0, 2.0, 2.0, 2.0]).repeat(2)
    for change in (lambda q, k: (q.flip(-1), k), lambda q, k: (q, k * stretch)):
        assert "its queries are not rotated as its keys are" in changed_rotation(monkeypatch, change)
        monkeypatch.undo()
    sign = torch.tensor([1.0, -1.0]).repeat(4).view(1, 8, 1, 1)
    assert "its heads are not all rotated alike" in changed_rotation(monkeypatch, lambda q, k: (q, k * sign))


@pytest.mark.parametrize(("module", "value", "reason"), [
    ("LlamaAttention", 2.0, "its attention has an option that is not known here (sharpness)"),
    ("LlamaModel", torch.ones(1), "its layers read what is not known here (sharpness)"),
])
def test_what_is_not_known_is_refused(monkeypatch, module, value, reason):
    module = getattr(modeling_llama, module)
    monkeypatch.setattr(module, "forward", partialmethod(module.forward, sharpness=value))
    assert reason in refusal()


def test_query_heads_that_read_other_keys_than_stock_ones_are_refused(monkeypatch):
    """Query head h the key/value head h mod G, not h / D: only groups of different heads can tell."""
    monkeypatch.setattr(modeling_llama, "repeat_kv", lambda heads, repeats: heads.repeat(1, repeats, 1, 1))
    config = AutoConfig.for_model("llama", attn_implementation="eager", **SMALL)
    with pytest.raises(UserError, match="with fewer key/value heads is not that of equal heads"):
        proof.require_convertible("DIR", config)


def test_logits_that_are_more_than_scaled_and_capped_are_refused(monkeypatch):
    forward = modeling_llama.LlamaForCausalLM.forward

    def shifted(self, *given, **options):
        output = forward(self, *given, **options)
        output.logits = output.logits.clamp(min=-50)
        return output

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", shifted)
    assert "its logits are not its head's, scaled and capped" in refusal()


@pytest.mark.parametrize("name", ["phi", "granite", "gemma2"])
@torch.no_grad()
def test_a_heads_logits_are_the_models(name):
    model, tokens = tiny_model(**FAMILIES[name]), torch.arange(12)[None]
    hidden = model.model(tokens, use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(head_of(model)(hidden), model(tokens).logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "factor"), [
    ("mistral", 1.0), ("cohere, GQA", 1.0), ("granite", 0.22), ("olmo2", None), ("gemma2", None),
])
@torch.no_grad()
def test_what_a_layer_multiplies_its_attention_by(name, factor):
    """Nothing known where a norm follows."""
    model = tiny_model(**FAMILIES[name])
    found = attention_factor(model, model.model.layers[1])
    assert found == (None if factor is None else pytest.approx(factor, rel=1e-6))
    assert not any(module._forward_hooks for module in model.modules())
