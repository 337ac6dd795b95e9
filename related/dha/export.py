"""Models with fused heads: a stock Llama if GQA can express it, otherwise DhaForCausalLM (Appendix B.2)."""

import itertools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.cli import UserError
from common.families import geometry
from related.dha.modeling import DhaConfig, DhaForCausalLM


def is_stock(groups: dict) -> bool:
    """Whether GQA can express these heads: keys and values share groups, and every layer has as many."""
    counts = {len(layer_groups) for layer_groups in groups["key"]}
    return groups["key"] == groups["value"] and len(counts) == 1


def query_heads(config) -> dict[str, list]:
    """The query heads that read each key (value) head of every layer, of a Llama or a DHA model."""
    if config.model_type == DhaConfig.model_type:
        return {"key": config.key_groups, "value": config.value_groups}
    shape = geometry(config)
    groups = torch.arange(shape.heads).view(shape.kv_heads, -1).tolist()
    return {kind: [groups] * shape.layers for kind in ("key", "value")}


def head_counts(config) -> dict[str, list[int]]:
    """The number of key (value) heads of every layer."""
    return {kind: [len(heads) for heads in layers] for kind, layers in query_heads(config).items()}


def compose(groups: dict, readers: dict) -> dict:
    """The query heads of each fused head. groups: the heads fused; readers: the query heads of those."""
    composed = {}
    for kind, layers in groups.items():
        composed[kind] = []
        for layer_groups, heads in zip(layers, readers[kind], strict=True):
            members = [itertools.chain.from_iterable(heads[head] for head in group) for group in layer_groups]
            composed[kind].append([sorted(group) for group in members])
    return composed


def fused_model(config, state: dict, groups: dict):
    """The model of fused heads, a stock Llama if GQA can express it.

    config: of the model that was searched; state: fused tensors; groups: which of its heads were fused.
    """
    groups = compose(groups, query_heads(config))
    kept = sum(len(layer_groups) for kind in groups for layer_groups in groups[kind])
    settings = config.to_dict() | {"num_key_value_heads": kept // (2 * config.num_hidden_layers)}
    for name in ("model_type", "auto_map", "key_groups", "value_groups"):  # those of the new model differ
        settings.pop(name, None)
    if is_stock(groups):
        model = LlamaForCausalLM(LlamaConfig(**settings))
        state = reorder_query_heads(state, groups["key"], config.head_dim)
    else:
        settings |= {"key_groups": groups["key"], "value_groups": groups["value"]}
        model = DhaForCausalLM(DhaConfig(**settings))
    model.load_state_dict(state)
    return model.eval()


def reorder_query_heads(state: dict, groups: list, head_dim: int) -> dict:
    """The tensors with each group's query heads side by side, as GQA expects them. groups: per layer."""
    state = dict(state)
    for layer, layer_groups in enumerate(groups):
        order = torch.tensor(layer_groups).flatten()
        rows = (order[:, None] * head_dim + torch.arange(head_dim)).flatten()
        prefix = f"model.layers.{layer}.self_attn."
        for name in (f"{prefix}q_proj.weight", f"{prefix}q_proj.bias"):
            if name in state:
                state[name] = state[name][rows]
        state[f"{prefix}o_proj.weight"] = state[f"{prefix}o_proj.weight"][:, rows]
    return state


@torch.no_grad()
def cache_heads(model) -> dict[str, list[int]]:
    """Key and value heads in the cache of each layer, counted after a forward pass."""
    tokens = torch.zeros(1, 8, dtype=torch.long)
    layers = model(input_ids=tokens, use_cache=True).past_key_values.layers
    return {
        "key": [layer.keys.shape[1] for layer in layers],
        "value": [layer.values.shape[1] for layer in layers],
    }


def check_cache(model, chosen: dict[str, list[int]]) -> None:
    """Raise UserError unless the cache holds the chosen numbers of heads in every layer."""
    cached = cache_heads(model)
    if cached != chosen:
        raise UserError(f"fused model: expected a cache of {chosen} heads, found {cached}")
