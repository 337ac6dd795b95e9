"""A key/value cache that stores only some channels of the prompt's keys, and the attention that reads it.

    cache = KeyChannelCache(model, ratio=0.5)
    model.generate(**inputs, past_key_values=cache)

The first forward pass is the prompt and is computed with complete keys. After it each layer chooses channels
per sample and key head (channels.py) and drops the others from all keys but the last `recent`. Those, and
every later key (a second prompt's included), stay complete. Values are not touched. Prompts in a batch are
padded on the left, and padding does not influence the choice.

A prompt in chunks (prefill_chunk_size) needs `prompt`, its number of tokens, and ends with the pass that
reaches it. A second prompt right after the first, which looks like a next chunk, needs it too. Decoding that
takes tokens back (prompt lookup, assistant models) is refused.

Layers with a sliding window keep their own small cache, unpruned; a model with only such layers is refused.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.run.errors import UserError
from related.keychannels.channels import SELECTORS, by_key_head, kept_channels, removed_count

ATTENTION = "key_channels"  # name in transformers' attention registry


class KeyChannelLayer(DynamicLayer):
    """One layer's keys and values.

    pruned [B, G, L - recent, d'] are the prompt's keys in the kept channels [B, G, d'] (int16), keys [B, G,
    n, d] the complete keys after them, values [B, G, L - recent + n, d]. Before the prompt is pruned, and
    where there is nothing to prune, channels is None and keys holds every key. Between chunks of the prompt
    queries [B, H, n, d] holds its last ones so far, at most `observed`.
    """

    is_croppable = False

    def __init__(self, ratio: float, select: str, recent: int, observed: int, prompt: int | None = None):
        super().__init__()
        self.ratio, self.select, self.recent, self.observed = ratio, select, recent, observed
        self.prompt, self.first = prompt, None  # tokens: of the prompt, of the first pass
        self.pruned = self.channels = self.queries = None

    def update(self, key_states, value_states, *args, **kwargs):
        """Append keys and values. Returns this layer in place of the keys: `attention` below reads it.

        Raises UserError where they may be the prompt's second chunk, but its length is not known.
        """
        length, new = self.get_seq_length(), key_states.shape[-2]
        if self.prompt is None and length == self.first and new > 1:
            raise UserError(f"key channels: expected the prompt in one forward pass, or its number of tokens "
                            f"in KeyChannelCache(prompt=...), found passes of {length} and {new} tokens")
        if length == 0:
            self.first = new
        super().update(key_states, value_states)
        return self, self.values

    def read_prompt(self, queries: torch.Tensor, real: torch.Tensor | None) -> None:
        """Keep the last queries [B, H, T, d] of a pass over the prompt; where the prompt ends, prune."""
        if self.queries is not None:
            queries = torch.cat((self.queries, queries), -2)
        if self.get_seq_length() < (self.prompt or 1):
            self.queries = queries[:, :, -self.observed :].clone()  # a view would keep the entire chunk
            return
        self.queries = None
        self.prune(queries, real)

    def prune(self, queries: torch.Tensor, real: torch.Tensor | None) -> None:
        """Drop channels of the prompt's keys.

        queries: [B, H, n, d], the last of the prompt; real: [B, L] bool, False at padding, or None without
        any. Raises UserError where a sample ends in padding.
        """
        length, size = self.keys.shape[-2:]
        old, count = length - self.recent, removed_count(self.ratio, size)
        if old <= 0 or count == 0:
            return
        keys = self.keys
        if real is not None:
            if not real[:, -1].all():
                raise UserError("key channels: expected prompts padded on the left, in one forward pass or "
                                "with KeyChannelCache(prompt=...), found padding at the end of a sample")
            padding = ~real[:, None, :, None]
            keys = keys.masked_fill(padding, 0)
            queries = queries.masked_fill(padding[:, :, -queries.shape[-2] :], 0)
        observed = by_key_head(queries[:, :, -self.observed :], keys)
        channels = kept_channels(self.select, observed, keys, self.recent, count)
        self.pruned = self.keys[:, :, :old].gather(-1, channels[:, :, None].expand(-1, -1, old, -1))
        self.keys = self.keys[:, :, old:].clone()  # a view would keep the entire prompt in memory
        self.channels = channels.to(torch.int16)

    def attend(self, query, value, mask, scaling: float) -> torch.Tensor:
        """softmax(concat(q[kept] K_pruned^T, q K_whole^T) scaling) V as [B, T, H, d].

        query: [B, H, T, d]; value: [B, G, L, d]; mask: bool [B or 1, 1, T, L], or None where every key is
        seen.
        """
        heads, length = query.shape[1:3]
        grouped = by_key_head(query, value)
        kept = grouped.gather(-1, self.channels.long()[:, :, None].expand(-1, -1, grouped.shape[2], -1))
        scores = torch.cat((kept @ self.pruned.mT, grouped @ self.keys.mT), -1).mul_(scaling)
        if mask is not None:
            lowest = torch.finfo(scores.dtype).min
            scores.view(-1, heads, length, value.shape[2]).masked_fill_(~mask, lowest)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return (weights @ value).view(-1, heads, length, value.shape[-1]).transpose(1, 2).contiguous()

    def get_seq_length(self) -> int:
        return self.values.shape[-2] if self.is_initialized else 0

    def reset(self) -> None:
        super().reset()
        self.pruned = self.channels = self.queries = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        for name in ("keys", "values", "pruned", "channels", "queries"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, tensor.index_select(0, beam_idx.to(tensor.device)))


class KeyChannelCache(DynamicCache):
    """A cache for one batch. It switches the model to the attention below: plain sdpa with any other cache.

    Raises UserError for a ratio or selector that there is not, and where every layer has a sliding window.
    """

    def __init__(
        self,
        model,  # any transformers model with attention through the registry
        ratio: float,  # lambda, the share of channels to remove, in [0, 1)
        select: str = "greedy+swap",  # one of SELECTORS
        recent: int = 32,  # last keys of the prompt that stay complete
        observed: int = 32,  # last queries of the prompt that represent those to come
        prompt: int | None = None,  # tokens of the prompt, padding included; None: those of the first pass
    ):
        if not 0 <= ratio < 1 or select not in SELECTORS:
            raise UserError(f"key channels: expected 0 <= ratio < 1 and select in {list(SELECTORS)}, "
                            f"found {ratio}, {select!r}")
        super().__init__(config=model.config)
        self.require_prunable(model.config)
        for index, layer in enumerate(self.layers):
            if not layer.is_sliding:
                self.layers[index] = KeyChannelLayer(ratio, select, recent, observed, prompt)
        model.set_attn_implementation(ATTENTION)

    @staticmethod
    def require_prunable(config) -> None:
        """Raise UserError when every layer of a model with this config has a sliding window."""
        if all(DynamicCache(config=config).is_sliding):
            raise UserError(f"key channels: expected layers without a sliding window, found a window of "
                            f"{config.sliding_window} positions in every layer of this {config.model_type}")

    def crop(self, *args) -> None:
        """Raise UserError: what was pruned cannot be restored."""
        raise UserError("key channels: expected decoding that takes no token back, found prompt lookup, an "
                        "assistant model or another crop of the cache: pruned keys cannot be cropped")

    activate_past_recording = crop  # transformers calls it before it decodes with drafts


def cached_bytes(cache) -> int:
    """Bytes of memory behind all tensors of a cache; a view counts with everything it keeps alive."""
    tensors = [tensor for layer in cache.layers for tensor in vars(layer).values()
               if isinstance(tensor, torch.Tensor)]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def attention(module, query, key, value, attention_mask, scaling: float, **kwargs):
    """transformers' attention function: key is a KeyChannelLayer, or a tensor from any other cache."""
    ours = isinstance(key, KeyChannelLayer)
    if ours and key.channels is not None:
        return key.attend(query, value, attention_mask, scaling), None
    keys = key.keys if ours else key
    output = sdpa_attention_forward(module, query, keys, value, attention_mask, scaling=scaling, **kwargs)
    if ours and value.shape[2] - query.shape[2] < (key.prompt or 1):  # tokens before this pass: the prompt's
        key.read_prompt(query, None if attention_mask is None else attention_mask[:, 0, -1])
    return output


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
