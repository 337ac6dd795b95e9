"""Many rows read by a model a token at a time: no step waits for the host, on GPUs as captured graphs."""

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer

from common.errors import UserError
from common.method.losses import product

SPAN = 64  # positions: attention reads the cache up to a multiple of it, and each multiple has its graph
BLOCK = 256  # tokens of the vocabulary whose probabilities are first summed


class StaticLayer(DynamicLayer):
    """A layer's cache in memory allocated once, written at decoder.position and read up to decoder.span."""

    def __init__(self, decoder: "Decoder"):
        super().__init__()
        self.decoder, self.buffer = decoder, None

    def update(self, keys, values, *args, **kwargs):
        """keys, values [n, G, 1, d] of the token at this position -> [n, G, span, d] of all so far."""
        if self.buffer is None:  # zeros: what is not written yet is read, too, with weights of zero
            self.buffer = keys.new_zeros(2, *keys.shape[:2], self.decoder.capacity, keys.shape[3])
        self.buffer.index_copy_(3, self.decoder.position, torch.stack((keys, values)))
        return self.buffer[:, :, :, : self.decoder.span]


def single_query(module, query, key, value, attention_mask, ages=None, scaling=None, sliding_window=None,
                 **kwargs):
    """Attention of one token a row: query [n, H, 1, d], key and value [n, G, S, d] -> [n, 1, H, d].

    ages [S]: by how many positions the token is later; below zero: not written yet. Every key is read once,
    not once a query head.
    """
    (n, groups, _, head_dim), heads = key.shape, query.shape[1]
    unread = ages < 0 if sliding_window is None else (ages < 0) | (ages >= sliding_window)
    scores = (query * scaling).view(n, groups, heads // groups, head_dim) @ key.mT
    weights = scores.masked_fill_(unread, -torch.inf).softmax(-1)
    return (weights @ value).view(n, 1, heads, head_dim), None


AttentionInterface.register("single-query", single_query)


class Decoder:
    """A model that reads `rows` texts of up to `length` tokens side by side, and draws each next token."""

    def __init__(self, model, rows: int, length: int):
        self.model, self.rows, self.length, self.span = model, rows, length, SPAN
        self.capacity = -(-length // SPAN) * SPAN
        self.cache = Cache(layers=[StaticLayer(self) for _ in model.model.layers])
        options = {"device": model.device}
        self.position = torch.zeros(1, dtype=torch.int64, **options)
        self.tokens, self.drawn = (torch.zeros(rows, dtype=torch.int64, **options) for _ in range(2))
        self.numbers = torch.zeros(rows, 1, dtype=torch.float64, **options)
        self.finite = torch.ones((), dtype=torch.bool, **options)
        self.places = torch.arange(self.capacity, **options)
        kinds = str(getattr(model.model.rotary_emb, "rope_type", ""))
        fixed = "dynamic" not in kinds and "longrope" not in kinds  # those read the position on the host
        self.graphs = {} if model.device.type == "cuda" and fixed else None  # span -> graph

    def read(self) -> None:
        """Read self.tokens at self.position, and draw the next ones; it changes nothing to do it twice."""
        ages, config = self.position - self.places[: self.span], self.model.config
        before, config._attn_implementation = config._attn_implementation, "single-query"
        hidden = self.model.model(input_ids=self.tokens[:, None], position_ids=self.position[None], ages=ages,
                                  past_key_values=self.cache, use_cache=True).last_hidden_state
        config._attn_implementation = before
        logits = product(hidden[:, -1], self.model.lm_head.weight.T)  # [n, V] float32
        self.finite.logical_and_(logits.sum().isfinite())
        self.drawn.copy_(draw(logits, self.numbers))

    @torch.no_grad()
    def next(self, position: int, tokens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """[n]: what follows tokens [n] at `position`, drawn by random numbers [n, 1] from 0 to 1."""
        self.position.fill_(position)
        self.tokens.copy_(tokens)
        self.numbers.copy_(numbers)
        self.span = (position // SPAN + 1) * SPAN
        if self.graphs is None:
            self.read()
        else:
            if self.span not in self.graphs:
                self.read()  # loads what a captured run may not
                self.graphs[self.span] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[self.span]):
                    self.read()
            self.graphs[self.span].replay()
        return self.drawn

    def check(self) -> None:
        """Wait for what was queued. Raises UserError if logits were not finite."""
        if not self.finite:
            raise UserError(f"{self.model.name_or_path}: cannot generate: found NaN or Inf in its logits")


def draw(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """A token of each row's softmax, [n, V] -> [n]: where its sums pass a random number [n, 1].

    First the block of tokens, then the token in it: sums in float64, which are exact enough, of V / 256.
    """
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = F.pad(weights, (0, -logits.shape[1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = weights.sum(-1, dtype=torch.float64).cumsum(-1)
    passed = numbers * sums[:, -1:]
    block = passing(sums, passed)
    inside = weights.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    before = F.pad(sums, (1, 0)).gather(1, block)
    return (block * BLOCK + passing(inside, passed - before))[:, 0]


def passing(sums: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """[n, 1]: the first of each row's ascending sums [n, k] that passes its bound [n, 1], at most the last
    that adds anything: by rounding a bound may be the total.
    """
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(sums, bounds, right=True), last)
