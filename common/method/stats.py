"""Calibration statistics: every later stage works on sums of outer products of head vectors, never on the caches.

Notation: H key/value heads of size d, N tokens. v_i and k_i are head i's value and key (before RoPE) at one token. A key is read
as d/2 complex numbers z_i[p] = k_i[p] + 1j k_i[p + d/2], because Hugging Face's Llama rotates that pair. RoPE multiplies
z_i[p] by a unit number that depends on the position alone, so sums of conj(z_i[p]) z_j[p] are the same before and after it.

  value Gram  C[i, j]    = sum_n v_i v_j^T             d x d, real;   C[j, i] = C[i, j]^T
  key Gram    c[i, j, p] = sum_n conj(z_i[p]) z_j[p]   complex;       c[j, i] = conj(c[i, j])

each for raw vectors (distance, Eq. 20-22) and for vectors scaled to length 1 (cosine, Eq. 7-9). For closed-form merging also

  query energy  sum_n |q_i[p]|^2   of each head and RoPE pair
  output Gram   W_O,i^T W_O,i      d x d, of each head's columns of o_proj

both summed over the query heads that read a key/value head, where there are several.
"""

import torch

from common.method.rope import to_complex

CRITERIA = {"cos": "unit", "dist": "raw"}  # the paper's criterion -> which Grams it is computed from
STRIP = 4  # heads: a product of fewer rows is slower per block, one of more computes more blocks below the diagonal


def to_unit(vectors: torch.Tensor) -> torch.Tensor:
    """Each vector [..., d] scaled to length 1 (Eq. 7, 8); a zero vector stays zero."""
    length = vectors.norm(dim=-1, keepdim=True)
    return vectors / length.where(length > 0, 1)


def value_half(values: torch.Tensor) -> torch.Tensor:
    """Values [n, H, d] -> the blocks i <= j of C, [H(H+1)/2, d, d], by little more than half of the product."""
    _, heads, size = values.shape
    flat, half = values.flatten(1), []
    for first in range(0, heads, STRIP):
        rows = flat[:, first * size : (first + STRIP) * size].T @ flat[:, first * size :]
        strip = rows.view(-1, size, heads - first, size).transpose(1, 2)
        half += [blocks[row:] for row, blocks in enumerate(strip)]
    return torch.cat(half)


def key_gram(keys: torch.Tensor) -> torch.Tensor:
    """Keys [n, H, d] -> c [H, H, d/2] complex, by one real product: the complex one takes several times as long on a CPU."""
    heads = keys.shape[1]
    parts = torch.view_as_real(to_complex(keys)).permute(2, 0, 3, 1).flatten(2)  # [p, n, 2H]: real parts, then imaginary ones
    products = (parts.mT @ parts).view(-1, 2, heads, 2, heads)
    real = products[:, 0, :, 0] + products[:, 1, :, 1]
    imaginary = products[:, 0, :, 1] - products[:, 1, :, 0]
    return torch.complex(real, imaginary).permute(1, 2, 0)


def unpack_half(half: torch.Tensor, heads: int) -> torch.Tensor:
    """value_half -> C [H, H, d, d], by C[j, i] = C[i, j]^T."""
    rows, columns = torch.triu_indices(heads, heads)
    gram = half.new_empty(heads, heads, *half.shape[1:])
    gram[columns, rows] = half.transpose(1, 2)
    gram[rows, columns] = half
    return gram


class LayerStats:
    """Running sums of one layer: products in the activations' float32, sums over batches in float64."""

    def __init__(self, heads: int, head_dim: int, device: str = "cpu"):
        self.heads, self.head_dim = heads, head_dim
        shape = heads * (heads + 1) // 2, head_dim, head_dim
        self.value = {kind: torch.zeros(shape, dtype=torch.float64, device=device) for kind in ("raw", "unit")}
        shape = heads, heads, head_dim // 2
        self.key = {kind: torch.zeros(shape, dtype=torch.complex128, device=device) for kind in ("raw", "unit")}
        self.query = torch.zeros(heads, head_dim // 2, dtype=torch.float64, device=device)

    def update_values(self, values: torch.Tensor) -> None:
        """values: v_proj's output as [n, H, d]."""
        values = values.float()
        self.value["raw"] += value_half(values)
        self.value["unit"] += value_half(to_unit(values))

    def update_keys(self, keys: torch.Tensor) -> None:
        """keys: k_proj's output, before RoPE, as [n, H, d]."""
        keys = keys.float()
        self.key["raw"] += key_gram(keys)
        self.key["unit"] += key_gram(to_unit(keys))

    def update_queries(self, queries: torch.Tensor) -> None:
        """queries: q_proj's output as [n, query heads, d]; RoPE does not change what is summed."""
        energy = sum(queries.float().square().sum(0).chunk(2, dim=-1))
        self.query += energy.view(self.heads, -1, energy.shape[-1]).sum(1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums by name, on the CPU; complex ones with a last axis of (real, imaginary)."""
        values = {f"value.{kind}": half for kind, half in self.value.items()}
        keys = {f"key.{kind}": torch.view_as_real(gram) for kind, gram in self.key.items()}
        return {name: tensor.cpu() for name, tensor in (values | keys | {"query.energy": self.query}).items()}


def output_gram(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """o_proj.weight [hidden, query heads * d] -> W_O,i^T W_O,i [H, d, d] float64, H = heads."""
    columns = weight.double().view(len(weight), heads, -1, head_dim)
    return torch.einsum("oira,oirb->iab", columns, columns)


class LayerGrams:
    """One layer's Gram matrices, from the tensors that LayerStats, free_pairs and output_gram made of it. H = source_kv_heads."""

    def __init__(self, tensors: dict[str, torch.Tensor], source_kv_heads: int):
        self.tensors, self.source_kv_heads = tensors, source_kv_heads

    def value(self, kind: str) -> torch.Tensor:
        """C [H, H, d, d] float64; kind "raw" or "unit"."""
        return unpack_half(self.tensors[f"value.{kind}"], self.source_kv_heads)

    def key(self, kind: str) -> torch.Tensor:
        """c [H, H, d/2] complex128; kind "raw" or "unit"."""
        return torch.view_as_complex(self.tensors[f"key.{kind}"])

    @property
    def free(self) -> torch.Tensor:
        """[d/2] bool: RoPE pairs that may be rotated by any angle (rope.free_pairs)."""
        return self.tensors["key.free"]

    @property
    def query(self) -> torch.Tensor:
        """sum_n |q_i[p]|^2 [H, d/2] float64."""
        return self.tensors["query.energy"]

    @property
    def output(self) -> torch.Tensor:
        """W_O,i^T W_O,i [H, d, d] float64."""
        return self.tensors["output.gram"]
