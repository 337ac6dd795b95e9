"""A quantized KV cache, simulated: attention computes with keys and values as a client reads them back.

The formats are ggml's: blocks of 32 neighboring channels of a head share a scale in float16. Which channels
are neighbors depends on the client. RoPE's pair p is (p, p + d/2) in transformers, mlx-lm and vLLM, and (2p,
2p + 1) in llama.cpp's Llamas. llama.cpp also multiplies heads by an orthogonal Hadamard matrix before it
quantizes them, which spreads outliers over all channels, unless LLAMA_ATTN_ROT_DISABLE=1. fp8 is
transformers' (QuantizedCache from release 5.24 on): all keys of a layer share a scale, and so do its values.
"""

import contextlib
import functools
from typing import NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from common.models.families import as_they_were, geometry, in_order, needs_eager
from common.models.forward import attending, attention_function
from common.run.errors import UserError

BLOCK = 32  # channels with one scale
ROTATED = 64  # llama.cpp rotates heads of a multiple of this size, values in parts of it
BITS = {"f16": 16.0, "fp8": 8.0, "q8_0": 8.5, "q4_0": 4.5}  # per channel, with its part of the scale
WHOLE = ("f16", "fp8")  # formats without blocks
LAYOUTS = {
    "halves": "channels as in transformers, mlx-lm and vLLM",
    "pairs": "RoPE's pairs side by side",
    "rotated": "these, rotated where head_dim is a multiple of 64, as in llama.cpp",
}


class Cache(NamedTuple):
    """The formats of keys and of values."""

    keys: str
    values: str

    def __str__(self):
        return self.keys if self.keys == self.values else "/".join(self)

    @property
    def in_blocks(self) -> bool:
        """Whether the layout matters, and heads must consist of blocks."""
        return not {*self} <= {*WHOLE}

    def bytes_per_token(self, config) -> float:
        """Of keys and values in all layers, with their scales."""
        shape = geometry(config)
        return shape.layers * shape.kv_heads * shape.head_dim * (BITS[self.keys] + BITS[self.values]) / 8


PLAIN = Cache("f16", "f16")


def parse_cache(text: str) -> Cache:
    """The Cache of "FORMAT" or "KEYS/VALUES". Raises UserError."""
    keys, _, values = text.partition("/")
    cache = Cache(keys, values or keys)
    if not BITS.keys() >= {*cache}:
        raise UserError(f"--cache: expected {', '.join(BITS)} or two of them as KEYS/VALUES, found {text}")
    return cache


def has_blocks(config) -> bool:
    """Whether the heads of a model consist of blocks."""
    return geometry(config).head_dim % BLOCK == 0


def fp8(heads: torch.Tensor) -> torch.Tensor:
    """Heads of any shape, in float32, as they are read back: E4M3 numbers times a scale of all of them."""
    smallest, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float8_e4m3fn).max
    scale = (heads.abs().amax() / largest).clamp(min=smallest)
    return (heads / scale).to(torch.float8_e4m3fn).float() * scale


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 32] as they are read back: integers up to 127 times a scale."""
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (blocks / scale.where(scale != 0, 1)).round() * scale.half().float()


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 32] as they are read back: -8 to 7 times a scale that makes the largest channel -8."""
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    levels = (blocks / scale.where(scale != 0, 1) + 8.5).floor().clamp(0, 15) - 8
    return levels * scale.half().float()


@functools.cache
def hadamard(size: int) -> torch.Tensor:
    """The Hadamard matrix [size, size], orthogonal and symmetric; size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def rotate_heads(heads: torch.Tensor, keys: bool) -> torch.Tensor:
    """Heads [..., d] times llama.cpp's matrix, its own inverse; as they are if d is no multiple of 64."""
    size = heads.shape[-1]
    if size % ROTATED:
        return heads
    part = size & -size if keys else ROTATED  # for keys the largest power of two that divides d
    return (heads.unflatten(-1, (-1, part)) @ hadamard(part).to(heads.device)).flatten(-2)


def as_cached(heads: torch.Tensor, layout: str, keys: bool) -> torch.Tensor:
    """Keys or values [..., d] as transformers has them, in the layout of a cache."""
    if keys and layout != "halves":
        heads = torch.stack(heads.chunk(2, -1), -1).flatten(-2)
    return rotate_heads(heads, keys) if layout == "rotated" else heads


def from_cached(heads: torch.Tensor, layout: str, keys: bool) -> torch.Tensor:
    """The inverse of as_cached."""
    heads = rotate_heads(heads, keys) if layout == "rotated" else heads
    return heads.unflatten(-1, (-1, 2)).mT.flatten(-2) if keys and layout != "halves" else heads


def read_back(heads: torch.Tensor, form: str, layout: str, keys: bool) -> torch.Tensor:
    """Keys or values [..., d] as they are read from a cache of this format, in their dtype."""
    if form == "f16":
        return heads.half().to(heads.dtype)
    if form == "fp8":
        return fp8(heads.float()).to(heads.dtype)
    blocks = as_cached(heads.float(), layout, keys).unflatten(-1, (-1, BLOCK))
    quantize = {"q8_0": q8_0, "q4_0": q4_0}[form]
    return from_cached(quantize(blocks).flatten(-2), layout, keys).to(heads.dtype)


@contextlib.contextmanager
def attention_with(model, change):
    """Context manager: attention computes with change(module, query, key, value), a key and a value.

    query [n, H, T, d], key and value [n, G, T, d] are behind norms and RoPE: what a cache holds.
    """

    def attend(module, query, key, value, attention_mask, **options):
        key, value = change(module, query, key, value)
        return attention_function(module)(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("changed", attend)
    AttentionMaskInterface.register("changed", eager_mask if needs_eager(model.config) else sdpa_mask)
    with attending(model, "changed"):
        yield


def quantized(model, cache: Cache, layout: str):
    """Context manager: the model reads all keys and values, also a token's own, from a quantized cache.

    model: with its RopePairs (common/models/proof.py), where they are not those of a Llama.
    """
    def change(module, query, key, value):
        pairs = getattr(module, "rope_pairs", None)
        as_they_are = layout == "halves" or pairs is None  # halves: as transformers has them
        order = None if as_they_are else pairs.behind
        key = as_they_were(read_back(in_order(key, order), cache.keys, layout, keys=True), order)
        return key, read_back(value, cache.values, layout, keys=False)

    return attention_with(model, change)
