"""A cache whose prompt keys are stored with some of their channels only, and the attention that reads it.

    cache = KeyChannelCache(model, ratio=0.5)
    model.generate(**inputs, past_key_values=cache)

The first forward pass is the prompt. It is computed with whole keys; after it each layer chooses channels per sample and key head
(channels.py) and drops the others from all keys but the last `recent`. Those, and every key that comes later, a second prompt's
too, stay whole. Values are not touched. Prompts of a batch are padded on the left; padding is not looked at.

Layers with a sliding window keep their own small cache, unpruned and exact; a model of such layers alone is refused.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.cli import UserError
from related.keychannels.channels import SELECTORS, kept_channels, removed_count

ATTENTION = "key_channels"  # name in transformers' registry


def by_key_head(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[B, H, T, d] -> [B, G, H / G * T, d]: the queries of all heads that read one of the G heads of keys."""
    return queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)


class KeyChannelLayer(DynamicLayer):
    """One layer's keys and values.

    pruned [B, G, L - recent, d'] are the prompt's keys in the channels [B, G, d'] (int16) that stay, keys [B, G, n, d] the whole ones
    after them, values [B, G, all, d]. Until the prompt is pruned, and where there is nothing to prune, channels is None and keys holds all.
    """

    is_croppable = False

    def __init__(self, ratio: float, select: str, recent: int, observed: int):
        super().__init__()
        self.ratio, self.select, self.recent, self.observed = ratio, select, recent, observed
        self.pruned = self.channels = None

    def update(self, key_states, value_states, *args, **kwargs):
        """What attention is given as keys is this layer."""
        super().update(key_states, value_states)
        return self, self.values

    def prune(self, queries: torch.Tensor, real: torch.Tensor | None) -> None:
        """Drop channels of the prompt's keys. queries: [B, H, L, d] of the prompt; real: [B, L] bool, false at padding."""
        old = self.keys.shape[-2] - self.recent
        count = removed_count(self.ratio, self.keys.shape[-1])
        if old <= 0 or count == 0:
            return
        keys = self.keys
        if real is not None:
            if not real[:, -1].all():
                raise UserError("key channels: expected prompts padded on the left, found padding on the right")
            queries, keys = (tensor.masked_fill(~real[:, None, :, None], 0) for tensor in (queries, keys))
        channels = kept_channels(self.select, by_key_head(queries[:, :, -self.observed :], keys), keys, self.recent, count)
        self.pruned = self.keys[:, :, :old].gather(-1, channels[:, :, None].expand(-1, -1, old, -1))
        self.keys = self.keys[:, :, old:].clone()  # a view would keep all of it in memory
        self.channels = channels.to(torch.int16)

    def get_seq_length(self) -> int:
        return self.values.shape[-2] if self.is_initialized else 0

    def reset(self) -> None:
        super().reset()
        self.pruned = self.channels = None

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("what was pruned cannot be taken back")

    def _over_samples(self, change) -> None:
        for name in ("keys", "values", "pruned", "channels"):
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._over_samples(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._over_samples(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._over_samples(lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class KeyChannelCache(DynamicCache):
    """For one batch of one model, which from then on uses the attention below; with any other cache that is plain sdpa.

    ratio: lambda, the share of channels that go, in [0, 1). select: one of SELECTORS. observed: how many last queries of the prompt
    stand for those to come. Raises UserError when all layers have a sliding window.
    """

    def __init__(self, model, ratio: float, select: str = "greedy+swap", recent: int = 32, observed: int = 32):
        if not 0 <= ratio < 1 or select not in SELECTORS:
            raise UserError(f"key channels: expected 0 <= ratio < 1 and select in {list(SELECTORS)}, found {ratio}, {select!r}")
        super().__init__(config=model.config)
        self.layers = [layer if layer.is_sliding else KeyChannelLayer(ratio, select, recent, observed) for layer in self.layers]
        if all(self.is_sliding):
            raise UserError(f"key channels: every layer of this {model.config.model_type} has a sliding window of {model.config.sliding_window}, "
                            "which bounds its cache already")
        model.set_attn_implementation(ATTENTION)


def held_bytes(cache) -> int:
    """Bytes of memory behind all tensors of a cache, those behind a view in full."""
    tensors = [tensor for layer in cache.layers for tensor in vars(layer).values() if isinstance(tensor, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def attention(module, query, key, value, attention_mask, scaling: float, **kwargs):
    """transformers' attention function. query: [B, H, T, d]; key: a KeyChannelLayer, or a tensor from any other cache."""
    if not isinstance(key, KeyChannelLayer):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if key.channels is None:
        output = sdpa_attention_forward(module, query, key.keys, value, attention_mask, scaling=scaling, **kwargs)
        if query.shape[2] == value.shape[2]:
            key.prune(query, None if attention_mask is None else attention_mask[:, 0, -1])
        return output
    return pruned_attention(query, key, value, attention_mask, scaling), None


def pruned_attention(query, layer: KeyChannelLayer, value, mask, scaling: float) -> torch.Tensor:
    """softmax(concat(q[kept] K_pruned^T, q K_whole^T) scaling) V as [B, T, H, d]. mask: bool, or None where all is seen."""
    heads, length = query.shape[1:3]
    grouped = by_key_head(query, value)
    kept = grouped.gather(-1, layer.channels.long()[:, :, None].expand(-1, -1, grouped.shape[2], -1))
    scores = torch.cat((kept @ layer.pruned.mT, grouped @ layer.keys.mT), -1).mul_(scaling)
    if mask is not None:
        scores.view(-1, heads, length, value.shape[2]).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).view(-1, heads, length, value.shape[-1]).transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
