"""What each selector costs inside the attention layers: error of the scores and of the attention output.

Each layer is measured on the queries, keys and values of the unpruned model, so errors do not pile up over
layers.
"""

from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from related.keychannels.cache import KeyChannelLayer, by_key_head, pruned_attention
from related.keychannels.channels import exact, interactions, objective, removed_count

EXACT_SIZE = 16  # largest head size at which all sets of channels are enumerated
EQUAL = 1e-9  # relative difference below which two objectives count as the same


@dataclass(frozen=True)
class Setting:
    """How a text is split, and which channels are removed."""

    prompt: int  # tokens
    continuation: int  # tokens after the prompt
    recent: int  # last keys of the prompt that stay whole
    observed: int  # last queries of the prompt that channels are chosen by
    ratios: tuple[float, ...]  # lambda: shares of the channels to remove
    selects: tuple[str, ...]  # selectors; think, which the others are compared with, is the first

    @property
    def choices(self) -> list[tuple[float, str]]:
        """(lambda, selector) pairs to measure."""
        return [(ratio, select) for ratio in self.ratios for select in self.selects]


def head_effects(setting: Setting, queries, keys, values, output, scaling: float) -> dict[tuple, dict]:
    """Effects of each choice in one layer: (lambda, selector) -> figures.

    queries: [n, H, T, d] of whole texts; keys, values: [n, G, T, d]; output: [n, T, H, d] of the unpruned
    attention. Figures: "objective" [n, G], over the squared scores; "error" and "output" [], the squared
    error and the squared norm of the attention output on the continuation. For small heads (lambda, "exact")
    holds the best objective.
    """
    prompt, size = setting.prompt, keys.shape[-1]
    observed = by_key_head(queries[:, :, prompt - setting.observed : prompt], keys)
    weights = interactions(observed, keys[:, :, : prompt - setting.recent])
    whole = weights.sum((-1, -2))
    before = output[:, prompt:].double()
    mask = torch.ones(setting.continuation, keys.shape[2], dtype=torch.bool, device=keys.device).tril(prompt)
    effects = {}
    for ratio, select in setting.choices:
        layer = KeyChannelLayer(ratio, select, setting.recent, setting.observed, setting.prompt)
        layer.update(keys[:, :, :prompt], values[:, :, :prompt])
        layer.prune(queries[:, :, :prompt], None)
        layer.update(keys[:, :, prompt:], values[:, :, prompt:])
        removed = torch.ones_like(weights[..., 0], dtype=torch.bool)
        removed.scatter_(-1, layer.channels.long(), False)
        after = pruned_attention(queries[:, :, prompt:], layer, values, mask, scaling)
        effects[ratio, select] = {
            "objective": objective(weights, removed) / whole,
            "error": (after - before).square().sum(),
            "output": before.square().sum(),
        }
    if size <= EXACT_SIZE:
        for ratio in setting.ratios:
            best = exact(weights, removed_count(ratio, size))
            effects[ratio, "exact"] = {"objective": objective(weights, best) / whole}
    return effects


@torch.no_grad()
def layer_effects(setting: Setting, model, tokens: torch.Tensor) -> list[dict]:
    """head_effects of each layer without a sliding window, while the unpruned model reads tokens [n, T]."""
    sliding, effects = DynamicCache(config=model.config).is_sliding, []

    def attention(module, query, key, value, mask, scaling, **kwargs):
        output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
        if not sliding[module.layer_idx]:
            effects.append(head_effects(setting, query, key, value, output, scaling))
        return output, None

    AttentionInterface.register("measured", attention)
    AttentionMaskInterface.register("measured", sdpa_mask)
    model.set_attn_implementation("measured")
    model(tokens, use_cache=False, logits_to_keep=1)
    return effects


def summarize(setting: Setting, effects: list[dict]) -> dict[tuple[float, str], dict]:
    """(lambda, selector) -> figures over all layers, texts and heads. effects: of each layer and batch."""
    joined = {choice: {} for choice in effects[0]}
    for choice, figures in joined.items():
        for name in effects[0][choice]:
            figures[name] = torch.cat([layer[choice][name].flatten().cpu() for layer in effects])
    summary = {}
    for ratio in setting.ratios:
        costs = {select: joined[ratio, select]["objective"] for select in setting.selects}
        lowest = torch.stack(list(costs.values())).amin(0)
        for select, cost in costs.items():
            errors, outputs = joined[ratio, select]["error"], joined[ratio, select]["output"]
            row = {"heads": len(cost), "objective": float(cost.mean()),
                   "output_error": float((errors.sum() / outputs.sum()).sqrt())}
            row |= compare_costs(cost, costs["think"])
            row["above_another"] = int((cost > lowest * (1 + EQUAL)).sum())
            if (ratio, "exact") in joined:
                best = joined[ratio, "exact"]["objective"]
                row["best_of_all_sets"] = int((cost <= best * (1 + EQUAL)).sum())
            summary[ratio, select] = row
    return summary


def compare_costs(cost: torch.Tensor, think: torch.Tensor) -> dict[str, float]:
    """Heads on which a selector's objective is below, equal to and above think's; change of its mean."""
    lower, higher = cost < think * (1 - EQUAL), cost > think * (1 + EQUAL)
    return {"lower_than_think": int(lower.sum()), "same_as_think": int((~lower & ~higher).sum()),
            "higher_than_think": int(higher.sum()), "change_to_think": float(cost.mean() / think.mean() - 1)}
