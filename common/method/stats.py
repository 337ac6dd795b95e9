"""Calibration statistics: later stages use sums of outer products of head vectors, never the KV cache.

Notation: H key/value heads of the source, head size d, N tokens. v_i and k_i are head i's value and key
(before RoPE) at one token; z_i[p] = k_i[p] + 1j k_i[p + d/2] are its RoPE pairs (common/method/rope.py). RoPE
multiplies z_i[p] by a unit number that depends only on the position, so sums of conj(z_i[p]) z_j[p] are the
same before and after it.

  value Gram  C[i, j]    = sum_n v_i v_j^T             [d, d] real;   C[j, i] = C[i, j]^T
  key Gram    c[i, j, p] = sum_n conj(z_i[p]) z_j[p]   complex;       c[j, i] = conj(c[i, j])

both for raw vectors (distance, Eq. 20-22) and for unit-norm vectors (cosine, Eq. 7-9). Closed-form merging
also needs

  full key Gram  sum_n k_i k_j^T    [d, d], which contains the raw c; and the mean keys
  query Gram     sum_n q_i q_i^T    [d, d], before RoPE
  output Gram    W_O,i^T W_O,i      [d, d], for each head's columns of o_proj

the last two summed over the query heads that share a key/value head. Behind norms of single heads (Qwen3),
queries are those that enter RoPE, and there is a Gram of what enters RoPE as keys and of the keys before it:

  normed Gram  sum_n x_i x_j^T   [d, d], over 2H vectors: norm(k_i), then k_i over the layer's rms of all keys
"""

import torch

from common.method.rope import pair_products, to_complex

CRITERIA = {"cos": "unit", "dist": "raw"}  # the paper's criterion -> kind of Grams it uses
STRIP = 4  # heads per product: fewer are slower per block, more waste blocks below the diagonal


def to_unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors [..., d] scaled to unit norm (Eq. 7, 8); a zero vector stays zero."""
    norm = vectors.norm(dim=-1, keepdim=True)
    return vectors / norm.where(norm > 0, 1)


def has_exact_products(vectors: torch.Tensor) -> bool:
    """Whether tensor cores can multiply these vectors as they are: exact products, summed in float32.

    That is several times faster than the float32 products of the same numbers.
    """
    return vectors.is_cuda and vectors.dtype in (torch.bfloat16, torch.float16)


def gram_half(vectors: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
    """Vectors [n, H, d] -> blocks i <= j of their Gram, [H(H+1)/2, d, d], at little over half its cost.

    others: the second factors, [n, H, d], where they are not the vectors themselves.
    """
    _, heads, size = vectors.shape
    options = {"out_dtype": torch.float32} if has_exact_products(vectors) else {}
    left, half = vectors.flatten(1), []
    right = left if others is None else others.flatten(1)
    for first in range(0, heads, STRIP):
        rows = torch.mm(left[:, first * size : (first + STRIP) * size].T, right[:, first * size :], **options)
        strip = rows.view(-1, size, heads - first, size).transpose(1, 2)
        half += [blocks[row:] for row, blocks in enumerate(strip)]
    return torch.cat(half)


def raw_gram(vectors: torch.Tensor) -> torch.Tensor:
    """gram_half of vectors [n, H, d] of any dtype, with products in float32."""
    return gram_half(vectors if has_exact_products(vectors) else vectors.float())


def unit_gram(vectors: torch.Tensor) -> torch.Tensor:
    """gram_half of vectors [n, H, d] scaled to unit norm, with products in float32.

    16-bit vectors on a GPU take three exact products: a unit vector is split into two bfloat16 parts, which
    hold 16 bits of it.
    """
    unit = to_unit(vectors.float())
    if not has_exact_products(vectors):
        return gram_half(unit)
    high = unit.bfloat16()
    low = (unit - high).bfloat16()
    return gram_half(torch.cat((high, low, high)), torch.cat((high, high, low)))


def key_gram(keys: torch.Tensor) -> torch.Tensor:
    """Keys [n, H, d] -> c [H, H, d/2] complex, by a real product, several times faster than a complex one."""
    heads = keys.shape[1]
    parts = torch.view_as_real(to_complex(keys)).permute(2, 0, 3, 1).flatten(2)  # [p, n, 2H]
    products = (parts.mT @ parts).view(-1, 2, heads, 2, heads)  # 2: real parts, imaginary parts
    real = products[:, 0, :, 0] + products[:, 1, :, 1]
    imaginary = products[:, 0, :, 1] - products[:, 1, :, 0]
    return torch.complex(real, imaginary).permute(1, 2, 0)


def unpack_half(half: torch.Tensor, heads: int) -> torch.Tensor:
    """The blocks i <= j [H(H+1)/2, d, d] -> all [H, H, d, d], by C[j, i] = C[i, j]^T."""
    rows, columns = torch.triu_indices(heads, heads)
    gram = half.new_empty(heads, heads, *half.shape[1:])
    gram[columns, rows] = half.transpose(1, 2)
    gram[rows, columns] = half
    return gram


def output_gram(weight: torch.Tensor, source_kv_heads: int, head_dim: int) -> torch.Tensor:
    """o_proj.weight [hidden, heads * d] -> W_O,i^T W_O,i [H, d, d] float64, summed over query heads."""
    columns = weight.double().view(len(weight), source_kv_heads, -1, head_dim)
    return torch.einsum("oira,oirb->iab", columns, columns)


def group_blocks(gram: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Blocks of a Gram within groups: [H, H, ...] -> [G, D, D, ...]. groups: [G, D] head indices."""
    return gram[groups[:, :, None], groups[:, None, :]]


def stack_heads(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks C [G, D, D, d, d] -> the Gram of the groups' stacked heads, [G, D d, D d]."""
    return blocks.transpose(2, 3).flatten(3).flatten(1, 2)


class LayerStats:
    """Running sums for one layer: products within a batch in float32, sums over batches in float64."""

    def __init__(self, source_kv_heads: int, head_dim: int, device: str = "cpu", head_norms: bool = False):
        self.source_kv_heads = source_kv_heads

        def zeros(*shape, dtype=torch.float64):
            return torch.zeros(*shape, dtype=dtype, device=device)

        half = source_kv_heads * (source_kv_heads + 1) // 2, head_dim, head_dim
        self.tokens = 0
        self.sums = {
            "value.raw": zeros(*half),
            "value.unit": zeros(*half),
            "key.raw": zeros(*half),
            "key.unit": zeros(source_kv_heads, source_kv_heads, head_dim // 2, dtype=torch.complex128),
            "key.sum": zeros(source_kv_heads, head_dim),
            "query.gram": zeros(source_kv_heads, head_dim, head_dim),
        }
        if head_norms:
            self.sums["key.normed"] = zeros(source_kv_heads * (2 * source_kv_heads + 1), head_dim, head_dim)

    def update_values(self, values: torch.Tensor) -> None:
        """Add the output of v_proj, [n, H, d]."""
        self.sums["value.raw"] += raw_gram(values)
        self.sums["value.unit"] += unit_gram(values)

    def update_keys(self, keys: torch.Tensor) -> None:
        """Add the output of k_proj (before RoPE), [n, H, d]."""
        self.tokens += len(keys)
        self.sums["key.raw"] += raw_gram(keys)
        self.sums["key.unit"] += key_gram(to_unit(keys.float()))
        self.sums["key.sum"] += keys.sum(0, dtype=torch.float64)

    def update_normed_keys(self, keys: torch.Tensor, normed: torch.Tensor) -> None:
        """Add the output of k_proj and what norms of single heads make of it, [n, H, d]."""
        level = to_unit(keys.float().flatten(1)).view_as(keys) * keys[0].numel() ** 0.5
        self.sums["key.normed"] += raw_gram(torch.cat((normed.float(), level), dim=1))

    def update_queries(self, queries: torch.Tensor) -> None:
        """Add the output of q_proj (before RoPE), [n, query heads, d]."""
        heads = queries.float().transpose(0, 1)
        gram = heads.mT @ heads  # [query heads, d, d]
        self.sums["query.gram"] += gram.view(self.source_kv_heads, -1, *gram.shape[1:]).sum(1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums by name, on the CPU; complex ones as a last axis of (real, imaginary)."""
        sums = self.sums | {"key.unit": torch.view_as_real(self.sums["key.unit"])}
        return {name: tensor.cpu() for name, tensor in sums.items()} | {"tokens": torch.tensor(self.tokens)}


class LayerGrams:
    """One layer's Gram matrices, float64, from tensors by name, on their device; H = source_kv_heads."""

    def __init__(self, tensors: dict[str, torch.Tensor], source_kv_heads: int):
        self.tensors, self.source_kv_heads = tensors, source_kv_heads
        self.tokens = int(tensors["tokens"])  # N, which the sums are over
        self.query = tensors["query.gram"]  # sum_n q_i q_i^T, [H, d, d]
        # what stage 1 adds to the sums of LayerStats
        self.output = tensors.get("output.gram")  # W_O,i^T W_O,i, [H, d, d]
        self.free = tensors.get("key.free")  # rope.free_pairs, [d/2] bool
        self.joint_norm = bool(tensors.get("key.joint_norm", False))  # families.norm_kind
        self.head_norms = "key.normed" in tensors
        self.frequencies = tensors.get("rope.frequencies")  # [d/2]: radians per position of each RoPE pair
        self.scale = tensors.get("rope.scale")  # families.RopePairs.scale

    def value(self, kind: str) -> torch.Tensor:
        """C [H, H, d, d]; kind "raw" or "unit"."""
        return unpack_half(self.tensors[f"value.{kind}"], self.source_kv_heads)

    def key(self, kind: str) -> torch.Tensor:
        """c [H, H, d/2] complex128; kind "raw" or "unit"."""
        if kind == "raw":
            return pair_products(self.full_key)
        return torch.view_as_complex(self.tensors[f"key.{kind}"])

    @property
    def full_key(self) -> torch.Tensor:
        """sum_n k_i k_j^T, [H, H, d, d]."""
        return unpack_half(self.tensors["key.raw"], self.source_kv_heads)

    def normed(self) -> torch.Tensor:
        """The normed Gram, [2H, 2H, d, d]."""
        return unpack_half(self.tensors["key.normed"], 2 * self.source_kv_heads)

    @property
    def rope_key(self) -> torch.Tensor:
        """full_key of the keys that enter RoPE, also behind norms of single heads, [H, H, d, d]."""
        heads = self.source_kv_heads
        return self.normed()[:heads, :heads] if self.head_norms else self.full_key

    @property
    def key_mean(self) -> torch.Tensor:
        """The mean key of each head, [H, d]."""
        return self.tensors["key.sum"] / self.tokens
