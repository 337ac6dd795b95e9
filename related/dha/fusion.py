"""Fusion operators (Eq. 5), their loss (Eq. 7), its margin (Eq. 8), and folding operators into heads.

Within a group of g heads, query head h reads sum_j w[h, j] o W^j instead of W^h: one factor per channel and
per pair of heads, with separate operators for keys and values. The operator of a layer with G groups is a
tensor [G, g, g, d]: group, reading head h, mixed head j, channel. `groups` lists the heads of each group, [G,
g].
"""

import torch
import torch.nn.functional as F
from torch import nn

PROJECTIONS = {"key": "k_proj", "value": "v_proj"}


def kronecker(groups: list[list[int]], head_dim: int) -> torch.Tensor:
    """The identity operator, [G, g, g, d] float32: w[h, j] = 1 where h = j, else 0."""
    size = len(groups[0])
    return torch.eye(size)[None, :, :, None].repeat(len(groups), 1, 1, head_dim)


def whole_layers(heads: dict[str, list[int]]) -> dict[str, list]:
    """Groups for search: one per layer, which holds all its heads. heads: their number in every layer."""
    return {kind: [[list(range(count))] for count in heads[kind]] for kind in PROJECTIONS}


def starting_operators(groups: dict[str, list], head_dim: int) -> dict[str, torch.Tensor]:
    """An identity operator for the keys and the values of every layer, "LAYER_key" and "LAYER_value"."""
    operators = {}
    for kind in PROJECTIONS:
        for layer, layer_groups in enumerate(groups[kind]):
            operators[f"{layer}_{kind}"] = kronecker(layer_groups, head_dim)
    return operators


def mix(operator: torch.Tensor, groups: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Eq. 5: heads [H, d, n] -> [H, d, n], where head h of each group becomes sum_j w[h, j] o W^j."""
    mixed = torch.einsum("ghjd,gjdn->ghdn", operator, heads[groups]).flatten(0, 1)  # group after group
    return mixed[groups.flatten().argsort()]


def averaged(operator: torch.Tensor) -> torch.Tensor:
    """The operator with every head of a group reading the mean of the group's factors (many-to-one)."""
    return operator.mean(1, keepdim=True).expand_as(operator)


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
    """k_proj or v_proj with a fusion operator, which mixes weights, not activations, in float32.

    It has the parameters of the nn.Linear and no others, so names in checkpoints stay the same;
    `set_operators` attaches the operator.
    """

    def mixed(self, parameter: torch.Tensor) -> torch.Tensor:
        """A weight [H d, hidden] or bias [H d] with its heads mixed."""
        operator, groups = self.fusion
        heads = parameter.float().view(groups.numel(), operator.shape[-1], -1)
        return mix(operator, groups, heads).to(parameter.dtype).view_as(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.mixed(self.bias)
        return F.linear(x, self.mixed(self.weight), bias)


def patch(model) -> None:
    """Turn every k_proj and v_proj into a FusedLinear, in place and with the same parameters."""
    for layer in model.model.layers:
        for name in PROJECTIONS.values():
            getattr(layer.self_attn, name).__class__ = FusedLinear


def set_operators(model, operators: dict[str, torch.Tensor], groups: dict[str, list]) -> None:
    """Attach operators to a patched model.

    operators: "LAYER_key", "LAYER_value" -> [G, g, g, d]; groups: "key", "value" -> [G, g] heads of each
    layer.
    """
    for index, layer in enumerate(model.model.layers):
        for kind, name in PROJECTIONS.items():
            projection, operator = getattr(layer.self_attn, name), operators[f"{index}_{kind}"]
            members = torch.tensor(groups[kind][index], device=operator.device)
            # in a tuple: a bare nn.Parameter would be registered among the projection's own parameters
            projection.fusion = operator, members


def with_operators(model, operators: dict[str, torch.Tensor], groups: dict[str, list]):
    """Patch a model, attach operators to it, and return it."""
    patch(model)
    set_operators(model, operators, groups)
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
