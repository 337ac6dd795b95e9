"""Fusion operators (Eq. 5), their loss (Eq. 7) and margin (Eq. 8), and what is made of them in the end.

Within a group of g heads, query head h reads sum_j w[h, j] o W^j instead of W^h: one factor per channel and per pair of heads, for
keys and for values. An operator is the tensor [G, g, g, d] of a layer's G groups: group, reading head h, mixed head j,
channel. `groups` lists the heads of each group, [G, g].
"""

import torch
import torch.nn.functional as F
from torch import nn

PROJECTIONS = {"key": "k_proj", "value": "v_proj"}


def kronecker(groups: list[list[int]], head_dim: int) -> torch.Tensor:
    """The operator that changes nothing, [G, g, g, d]: w[h, j] = 1 where h = j, else 0."""
    size = len(groups[0])
    return torch.eye(size)[None, :, :, None].repeat(len(groups), 1, 1, head_dim)


def mix(operator: torch.Tensor, groups: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Eq. 5: heads [H, d, n] -> [H, d, n], head h of each group being sum_j w[h, j] o W^j."""
    mixed = torch.einsum("ghjd,gjdn->ghdn", operator, heads[groups]).flatten(0, 1)  # group after group
    return mixed[groups.flatten().argsort()]


def averaged(operator: torch.Tensor) -> torch.Tensor:
    """Every head of a group given the mean of its heads' factors: what is many-to-many becomes many-to-one."""
    return operator.mean(1, keepdim=True).expand_as(operator)


def fold(operator: torch.Tensor, groups: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """One head per group, [G, d, n]: heads [H, d, n] mixed by the group's averaged factors."""
    return torch.einsum("gjd,gjdn->gdn", operator.mean(1), heads[groups])


def combined(weights: dict, operators: dict, groups: dict[str, list], how) -> dict:
    """A model's tensors by name, key and value heads replaced by how(operator, groups, heads), `mix` or `fold`, in float64."""
    state = dict(weights)
    for name, operator in operators.items():
        layer, kind = name.split("_")
        for part in ("weight", "bias"):
            key = f"model.layers.{layer}.self_attn.{PROJECTIONS[kind]}.{part}"
            if key in weights:
                own = weights[key]
                heads = own.double().view(-1, operator.shape[-1], own[0].numel())
                state[key] = how(operator.double(), torch.tensor(groups[kind][int(layer)]), heads).reshape(-1, *own.shape[1:]).to(own.dtype)
    return state


class FusedLinear(nn.Linear):
    """k_proj or v_proj of a model in fusion: weights are mixed, not activations, in float32. Holds no new parameter, so a
    checkpoint's names stay; `operator` and `groups` are given to it by `set_operators`."""

    def mixed(self, parameter: torch.Tensor) -> torch.Tensor:
        heads = parameter.float().view(self.groups.numel(), self.operator.shape[-1], -1)
        return mix(self.operator, self.groups, heads).to(parameter.dtype).view_as(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.mixed(self.weight), None if self.bias is None else self.mixed(self.bias))


def patch(model) -> None:
    """Make every k_proj and v_proj a FusedLinear with the parameters it has."""
    for layer in model.model.layers:
        for name in PROJECTIONS.values():
            getattr(layer.self_attn, name).__class__ = FusedLinear


def set_operators(model, operators: dict[str, torch.Tensor], groups: dict[str, list]) -> None:
    """operators: "LAYER_key", "LAYER_value" -> [G, g, g, d]. groups: "key", "value" -> per layer the heads of each group."""
    for index, layer in enumerate(model.model.layers):
        for kind, name in PROJECTIONS.items():
            projection, operator = getattr(layer.self_attn, name), operators[f"{index}_{kind}"]
            projection.operator, projection.groups = operator, torch.tensor(groups[kind][index], device=operator.device)


def patched(model, operators: dict[str, torch.Tensor], groups: dict[str, list]):
    """The model, reading through these operators from now on."""
    patch(model)
    set_operators(model, operators, groups)
    return model


def starting_operators(groups: dict[str, list], head_dim: int) -> dict[str, torch.Tensor]:
    """An operator that changes nothing, for the keys and the values of every layer."""
    return {f"{layer}_{kind}": kronecker(of_layer, head_dim) for kind in PROJECTIONS for layer, of_layer in enumerate(groups[kind])}


def pair_losses(operator: torch.Tensor) -> torch.Tensor:
    """L_head of every two heads of each group, [G, g, g]: mean over j and channels of (w[h, j] - w[h', j])^2."""
    return torch.stack([(operator - operator[:, h, None]).square().mean((2, 3)) for h in range(operator.shape[1])], 1)


def layer_loss(operator: torch.Tensor) -> torch.Tensor:
    """Mean of L_head over the pairs h < h' of each group, and over groups; 0 where every head is its own group."""
    first, second = torch.triu_indices(operator.shape[1], operator.shape[1], 1, device=operator.device)
    if not len(first):
        return operator.new_zeros(())
    return (operator[:, first] - operator[:, second]).square().mean()


def fusion_loss(operators: dict[str, torch.Tensor]) -> torch.Tensor:
    """Eq. 7 as Algorithm 3 scales it: the mean over layers, keys and values alike. At most 1; 0 when groups read as one."""
    return torch.stack([layer_loss(operator) for operator in operators.values()]).mean()


def margin(step: int, warmup: int, base: float = 0.999) -> float:
    """t of Eq. 8: the fusion loss still allowed at a step, from 1 down to 0 at step `warmup`."""
    return max(0.0, base**step * (1 - step / warmup))
