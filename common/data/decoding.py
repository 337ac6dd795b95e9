"""Many rows read by a model a token at a time: no step waits for the host, on GPUs as captured graphs."""

import contextlib

import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

import common.models.attention  # noqa: F401 - registers "single-query"
from common.models.forward import attach_windows, attending, rope_switch
from common.models.head import head_of
from common.run.errors import UserError

SPAN = 64  # positions: attention reads the cache up to a multiple of it, and each multiple has its graph
BLOCK = 256  # tokens of the vocabulary whose probabilities are first summed


class StaticLayer(DynamicLayer):
    """A layer's cache, whose memory is allocated once: written at `position` and read up to `span`."""

    def __init__(self, position: torch.Tensor, capacity: int):
        super().__init__()
        self.position, self.capacity, self.span, self.buffer = position, capacity, SPAN, None

    def update(self, keys, values, *args, **kwargs):
        """keys, values [n, G, 1, d] of the token at this position -> [n, G, span, d] of all so far."""
        if self.buffer is None:  # zeros: what is not written yet is read, too, with weights of zero
            self.buffer = keys.new_zeros(2, *keys.shape[:2], self.capacity, keys.shape[3])
        self.buffer.index_copy_(3, self.position, torch.stack((keys, values)))
        return self.buffer[:, :, :, : self.span]


@contextlib.contextmanager
def any_kernel():
    """Within, torch refuses no kernel: with --deterministic it would refuse sums along rows on GPUs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Decoder:
    """A model that reads `rows` texts of up to `length` tokens side by side, and draws each next token.

    Raises UserError for texts so long that RoPE changes with every token.
    """

    def __init__(self, model, rows: int, length: int):
        self.model, self.rows, options = model, rows, {"device": model.device}
        attach_windows(model)
        self.switch = rope_switch(model.config, length, model.name_or_path)
        self.position, capacity = torch.zeros(1, dtype=torch.int64, **options), -(-length // SPAN) * SPAN
        self.places = torch.arange(capacity, **options)
        self.cache = Cache(layers=[StaticLayer(self.position, capacity) for _ in model.model.layers])
        self.tokens, self.drawn = (torch.zeros(rows, dtype=torch.int64, **options) for _ in range(2))
        self.history = torch.zeros(rows, length, dtype=torch.int64, **options)  # all tokens read so far
        self.numbers = torch.zeros(rows, 1, dtype=torch.float64, **options)
        self.finite = torch.ones((), dtype=torch.bool, **options)
        rope = str(getattr(model.model.rotary_emb, "rope_type", ""))
        on_host = "dynamic" in rope or "longrope" in rope  # where the position is read
        captured = model.device.type == "cuda" and not on_host
        self.graphs = {} if captured else None  # span -> graph
        self.memory = torch.cuda.graph_pool_handle() if captured else None  # of all graphs, run in turn

    def read(self, span: int) -> None:
        """Read self.tokens at this position, and draw the next ones; it changes nothing to do it twice."""
        ages = self.position - self.places[:span]
        for layer, cached in zip(self.model.model.layers, self.cache.layers, strict=True):
            layer.self_attn.ages = ages  # not all classes pass options on to their attention
            cached.span = span
        with attending(self.model, "single-query"):
            hidden = self.model.model(
                input_ids=self.tokens[:, None], position_ids=self.position[None],
                past_key_values=self.cache, use_cache=True).last_hidden_state
        logits = head_of(self.model)(hidden[:, -1])  # [n, V] float32
        self.finite.logical_and_(logits.sum().isfinite())
        self.drawn.copy_(draw(logits, self.numbers))

    def read_again(self) -> None:
        """Compute all keys and values so far again, by RoPE's angles from here on; a text at a time."""
        length = int(self.position) + 1
        for row, tokens in enumerate(self.history[:, :length]):
            again = DynamicCache()
            self.model.model(input_ids=tokens[None], past_key_values=again, use_cache=True)
            for kept, read in zip(self.cache.layers, again.layers, strict=True):
                kept.buffer[:, row, :, :length] = torch.cat((read.keys, read.values))

    @any_kernel()
    @torch.no_grad()
    def next(self, position: int, tokens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """[n]: what follows tokens [n] at `position`, drawn by random numbers [n, 1] from 0 to 1."""
        self.position.fill_(position)
        self.tokens.copy_(tokens)
        self.numbers.copy_(numbers)
        self.history[:, position] = tokens
        if position == self.switch:
            self.read_again()
        span = (position // SPAN + 1) * SPAN
        if self.graphs is None or span not in self.graphs:
            self.read(span)  # also loads what a captured run may not
        if self.graphs is not None:
            if span not in self.graphs:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.memory):
                    self.read(span)
                self.graphs[span] = graph
            self.graphs[span].replay()
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
