"""Projections that masks blend from each head's own weights into its group's (Eq. 27, 28).

`patch` replaces projections of a transformers model by BlendedProjections; attention itself is unchanged. One
mask z per layer and key/value head blends the two weights.
"""

import copy
import re

import torch
import torch.nn.functional as F
from torch import nn

from common.models.families import OUTPUTS, fused_parts, output_projection

# modules to blend in a Llama; those of any model are families.merged_modules
KEY_VALUE, WHOLE_HEAD = ("k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")


class BlendedProjection(nn.Module):
    """A projection with weight z W + (1 - z) W~ (Eq. 27, 28), W from the source, W~ from the merged model.

    k_proj and v_proj: W~ has G heads, each shared by a group. q_proj and o_proj, if merging changed them: W~
    has as many heads as W; a head of o_proj is a block of columns. Of qkv_proj (Phi-3) all rows are blended,
    `queries` of them W_Q. Norms over all heads, k_norm and q_norm, are blended like k_proj and q_proj; norms
    of single heads, which share their weights, for each head by its mask.
    Blending weights instead of activations takes one matrix product per call. `z`, [key/value heads of the
    source], is set before each forward pass; a query head uses the mask of its key/value head.
    """

    def __init__(self, original: nn.Module, merged: nn.Module, head_dim: int, columns=False, queries=0):
        super().__init__()
        self.original, self.merged, self.head_dim = original, merged, head_dim
        self.columns, self.queries = columns, queries
        self.z: torch.Tensor | None = None  # pragma: no mutate: it is set before it is read

    def blend(self, original: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
        """original [H * d, ...], merged [H or G * d, ...] -> original's shape and dtype.

        Rounded once. In bfloat16 z is rounded, too, which changes the result by at most 2^-8 of W - W~: no
        more than W and W~ have been rounded themselves.
        """
        if self.columns:
            z = self.z.repeat_interleave(original.shape[1] // len(self.z))
            return torch.lerp(merged, original, z.to(original.dtype))  # W~ + z (W - W~)
        if self.queries:
            parts = (fused_parts(matrix, self.queries) for matrix in (original, merged))
            return torch.cat([self.blend_rows(*pair) for pair in zip(*parts, strict=True)])
        return self.blend_rows(original, merged)

    def blend_rows(self, original: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
        """blend for blocks of rows, one per head."""
        heads = original.view(-1, self.head_dim, *original.shape[1:])
        shared = merged.view(-1, 1, self.head_dim, *original.shape[1:])  # [G, 1, d, ...]
        z = self.z.repeat_interleave(len(heads) // len(self.z)).to(original.dtype)
        z = z.view(len(shared), -1, *[1] * (heads.ndim - 1))  # [G, D, 1, ...]
        return torch.lerp(shared, heads.unflatten(0, z.shape[:2]), z).view_as(original)  # z W + (1 - z) W~

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out] with the blended weight and bias."""
        original, merged = self.original, self.merged
        if not isinstance(original, nn.Linear):
            single = len(original.weight) == self.head_dim
            weights = [norm.weight.repeat(x.shape[-2] if single else 1) for norm in (original, merged)]
            weight = self.blend(*weights).view(x.shape[-2:] if single else x.shape[-1:])
            kept = original.weight
            vars(original)["weight"] = weight  # found before the parameter or its copy in another dtype
            result = original(x)
            vars(original)["weight"] = kept
            return result
        if original.bias is None:
            bias = merged.bias
        else:
            bias = self.blend(original.bias, merged.bias)
        return F.linear(x, self.blend(original.weight, merged.weight), bias)


def patch(model, kv_heads: int, names: tuple[str, ...] = KEY_VALUE) -> None:
    """Replace the named projections of a model by BlendedProjections with uninitialized merged weights."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in names:
            original = getattr(attention, name)
            queries = output_projection(attention).in_features if name == "qkv_proj" else 0
            rows = len(original.weight)
            if name[0] in "kv":  # unless it is the norm of single heads
                rows = min(rows, kv_heads * attention.head_dim)
            if queries:
                rows = queries + 2 * kv_heads * attention.head_dim
            merged = copy.deepcopy(original)
            for part, parameter in original.named_parameters():
                setattr(merged, part, nn.Parameter(parameter.new_empty(rows, *parameter.shape[1:])))
            if name in OUTPUTS:
                original.bias = None  # it belongs to no head: the merged one is the layer's
            options = {"columns": name in OUTPUTS, "queries": queries}
            setattr(attention, name, BlendedProjection(original, merged, attention.head_dim, **options))


def blended_projections(model):
    """Yield (layer index, attention module, its BlendedProjections) for each layer of a patched model."""
    for index, layer in enumerate(model.model.layers):
        blended = [module for module in layer.self_attn.children() if isinstance(module, BlendedProjection)]
        yield index, layer.self_attn, blended


def set_masks(model, z: torch.Tensor) -> None:
    """Set the masks of every layer. z: [layers, key/value heads of the source]."""
    for index, _, projections in blended_projections(model):
        for projection in projections:
            projection.z = z[index]


def blended_name(name: str, names: tuple[str, ...] = KEY_VALUE) -> str:
    """Map a GQA model's parameter name to its name in the patched model."""
    return re.sub(rf"\.({'|'.join(names)})\.", r".\1.merged.", name)
