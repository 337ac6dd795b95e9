"""Fusion operators (Eq. 5), their loss (Eq. 7), its margin (Eq. 8), and models of fused heads (Appendix B.2).

Within a group of g heads, query head h reads sum_j w[h, j] o W^j instead of W^h: one factor per channel and
per pair of heads, with separate operators for keys and values. The operator of a layer with G groups is a
tensor [G, g, g, d]: group, reading head h, mixed head j, channel; "LAYER_key" and "LAYER_value" are their
names. `groups` has, for "key" and "value", the heads of each group of each layer, [G, g].
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from common.models.families import geometry
from related.dha.modeling import DhaConfig

PROJECTIONS = {"key": "k_proj", "value": "v_proj"}


def kronecker(groups: list[list[int]], head_dim: int) -> torch.Tensor:
    """The identity operator, [G, g, g, d] float32: w[h, j] = 1 where h = j, else 0."""
    size = len(groups[0])
    return torch.eye(size)[None, :, :, None].repeat(len(groups), 1, 1, head_dim)


def whole_layers(heads: dict[str, list[int]]) -> dict[str, list]:
    """Groups for search: one per layer, which holds all its heads. heads: their number in every layer."""
    return {kind: [[list(range(count))] for count in heads[kind]] for kind in PROJECTIONS}


def starting_operators(groups: dict[str, list], head_dim: int) -> dict[str, torch.Tensor]:
    """An identity operator for the keys and the values of every layer."""
    return {f"{layer}_{kind}": kronecker(layer_groups, head_dim)
            for kind in PROJECTIONS for layer, layer_groups in enumerate(groups[kind])}


def mix(operator: torch.Tensor, groups: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Eq. 5: heads [H, d, n] -> [H, d, n], where head h of each group becomes sum_j w[h, j] o W^j."""
    mixed = torch.einsum("ghjd,gjdn->ghdn", operator, heads[groups]).flatten(0, 1)  # group after group
    return mixed[groups.flatten().argsort()]


def averaged(operators: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The operators with every head of a group reading the mean of the group's factors (many-to-one)."""
    return {name: operator.mean(1, keepdim=True).expand_as(operator) for name, operator in operators.items()}


def fold(operator: torch.Tensor, groups: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Heads [H, d, n] -> one head per group, [G, d, n], mixed by the group's averaged factors."""
    return torch.einsum("gjd,gjdn->gdn", operator.mean(1), heads[groups])


def combine_heads(weights: dict, operators: dict, groups: dict[str, list], combine) -> dict:
    """A model's tensors by name, with key and value heads replaced by combine(operator, groups, heads).

    combine: `mix` (as many heads as before) or `fold` (one per group). Computed in float64, returned in each
    tensor's dtype.
    """
    state = dict(weights)
    for name, operator in operators.items():
        layer, kind = name.split("_")
        members = torch.tensor(groups[kind][int(layer)])
        for part in ("weight", "bias"):
            key = f"model.layers.{layer}.self_attn.{PROJECTIONS[kind]}.{part}"
            if key not in weights:
                continue
            tensor = weights[key]  # [H d, hidden] or [H d]
            heads = tensor.double().view(-1, operator.shape[-1], tensor[0].numel())
            combined = combine(operator.double(), members, heads)
            state[key] = combined.reshape(-1, *tensor.shape[1:]).to(tensor.dtype)
    return state


class FusedLinear(nn.Linear):
    """k_proj or v_proj with a fusion operator, which mixes weights, not activations, in float32."""

    def mixed(self, parameter: torch.Tensor) -> torch.Tensor:
        """A weight [H d, hidden] or bias [H d] with its heads mixed."""
        operator, groups = self.fusion
        heads = parameter.float().view(groups.numel(), operator.shape[-1], -1)
        return mix(operator, groups, heads).to(parameter.dtype).view_as(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.mixed(self.bias)
        return F.linear(x, self.mixed(self.weight), bias)


def with_operators(model, operators: dict[str, torch.Tensor], groups: dict[str, list]):
    """Attach operators to the projections of a model, in place, and return it."""
    for index, layer in enumerate(model.model.layers):
        for kind, name in PROJECTIONS.items():
            projection, operator = getattr(layer.self_attn, name), operators[f"{index}_{kind}"]
            members = torch.tensor(groups[kind][index], device=operator.device)
            projection.__class__ = FusedLinear
            # in a tuple: a bare nn.Parameter would be registered among the projection's own parameters
            projection.fusion = operator, members
    return model


def pair_losses(operator: torch.Tensor) -> torch.Tensor:
    """L_head of each pair in a group, [G, g, g]: mean over j and channels of (w[h, j] - w[h', j])^2."""
    size = operator.shape[1]
    rows = [(operator - operator[:, head, None]).square().mean((2, 3)) for head in range(size)]
    return torch.stack(rows, 1)


def layer_loss(operator: torch.Tensor) -> torch.Tensor:
    """Mean of L_head over the pairs h < h' of each group and over groups; 0 where every group is one head."""
    size = operator.shape[1]
    first, second = torch.triu_indices(size, size, 1, device=operator.device)
    if not len(first):
        return operator.new_zeros(())
    return (operator[:, first] - operator[:, second]).square().mean()


def fusion_loss(operators: dict[str, torch.Tensor]) -> torch.Tensor:
    """Eq. 7, scaled as in Algorithm 3: the mean of layer_loss over layers and over keys and values. A scalar.

    2 / g for identity operators on groups of g > 1 heads; 0 when the heads of each group share their factors.
    """
    return torch.stack([layer_loss(operator) for operator in operators.values()]).mean()


def margin(step: int, warmup: int, base: float = 0.999) -> float:
    """t of Eq. 8: the fusion loss still allowed at a step, falling from 1 to 0 at step `warmup`."""
    return max(0.0, base**step * (1 - step / warmup))


def query_heads(config) -> dict[str, list]:
    """The query heads that read each key (value) head of every layer, of a Llama or a DHA model."""
    if config.model_type == DhaConfig.model_type:
        return {"key": config.key_groups, "value": config.value_groups}
    shape = geometry(config)
    groups = torch.arange(shape.heads).view(shape.kv_heads, -1).tolist()
    return {kind: [groups] * shape.layers for kind in PROJECTIONS}


def head_counts(config) -> dict[str, list[int]]:
    """The number of key (value) heads of every layer."""
    return {kind: [len(heads) for heads in layers] for kind, layers in query_heads(config).items()}


def compose(groups: dict, readers: dict) -> dict:
    """The query heads of each fused head. groups: the heads fused; readers: the query heads of those."""
    composed = {kind: [] for kind in groups}
    for kind, layers in groups.items():
        for layer_groups, heads in zip(layers, readers[kind], strict=True):
            members = [sum((heads[head] for head in group), []) for group in layer_groups]
            composed[kind].append([sorted(group) for group in members])
    return composed


def model_of(config, weights: dict):
    """A float32 model in eval mode with these tensors."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict(weights)
    return model.eval()


def fused_model(config, weights: dict, groups: dict, operators: dict | None = None):
    """The model of fused heads: a stock Llama if GQA can express it, otherwise a DhaForCausalLM.

    GQA can where keys and values share groups and every layer has as many. config: of the model that was
    searched; weights: its tensors, to be folded by the operators, or without these fused tensors; groups:
    which of its heads are fused.
    """
    if operators:
        weights = combine_heads(weights, operators, groups, fold)
    groups = compose(groups, query_heads(config))
    counts = [len(layer_groups) for kind in groups for layer_groups in groups[kind]]
    settings = config.to_dict() | {"num_key_value_heads": sum(counts) // len(counts)}
    for name in ("model_type", "auto_map", "key_groups", "value_groups"):  # those of the new model differ
        settings.pop(name, None)
    if groups["key"] == groups["value"] and len(set(counts)) == 1:
        weights = reorder_query_heads(weights, groups["key"], config.head_dim)
        return model_of(LlamaConfig(**settings), weights)
    return model_of(DhaConfig(**settings, key_groups=groups["key"], value_groups=groups["value"]), weights)


def reorder_query_heads(weights: dict, groups: list, head_dim: int) -> dict:
    """The tensors with each group's query heads side by side, as GQA expects them. groups: per layer."""
    state = dict(weights)
    for layer, layer_groups in enumerate(groups):
        order = torch.tensor(layer_groups).flatten()
        rows = (order[:, None] * head_dim + torch.arange(head_dim)).flatten()
        prefix = f"model.layers.{layer}.self_attn."
        for name in (f"{prefix}q_proj.weight", f"{prefix}q_proj.bias"):
            if name in state:
                state[name] = state[name][rows]
        state[f"{prefix}o_proj.weight"] = state[f"{prefix}o_proj.weight"][:, rows]
    return state
