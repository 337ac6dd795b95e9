"""RoPE pairs as complex numbers.

Hugging Face's Llama rotates the pair (p, p + d/2) of a head of size d by an angle that depends only on the
position. On the complex number z[p] = k[p] + 1j k[p + d/2], RoPE is multiplication by a unit complex number,
which commutes with multiplication by any other complex number.
"""

import torch


def to_complex(keys: torch.Tensor) -> torch.Tensor:
    """Keys [..., d] -> RoPE pairs [..., d/2] complex, pair p being (p, p + d/2)."""
    real, imaginary = keys.chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def to_real(pairs: torch.Tensor) -> torch.Tensor:
    """The inverse of to_complex: RoPE pairs [..., d/2] complex -> [..., d]."""
    return torch.cat((pairs.real, pairs.imag), -1)


def to_matrix(factor: torch.Tensor) -> torch.Tensor:
    """Complex factors of RoPE pairs [..., d/2] -> the real matrix [..., d, d] that multiplies them by it."""
    real, imaginary = torch.diag_embed(factor.real), torch.diag_embed(factor.imag)
    return torch.cat((torch.cat((real, -imaginary), -1), torch.cat((imaginary, real), -1)), -2)


def pair_products(moment: torch.Tensor) -> torch.Tensor:
    """sum_n x y^T [..., d, d] -> sum_n conj(x[p]) y[p] over RoPE pairs, [..., d/2] complex."""
    top, bottom = moment.chunk(2, -2)
    (rr, ri), (ir, ii) = top.chunk(2, -1), bottom.chunk(2, -1)
    real, imaginary = rr + ii, ri - ir
    return torch.complex(*(torch.diagonal(part, dim1=-2, dim2=-1) for part in (real, imaginary)))


def unit_phase(number: torch.Tensor) -> torch.Tensor:
    """number / |number|, complex; 1 where the number is 0, so that a dead pair is not rotated."""
    size = number.abs()
    return torch.where(size > 0, number / size, 1)


def quarter_phase(number: torch.Tensor) -> torch.Tensor:
    """The closest of 1, 1j, -1 and -1j, complex; 1 where the number is 0."""
    across = number.imag.abs() > number.real.abs()
    real, imaginary = (1 - 2 * (part < 0).to(part.dtype) for part in (number.real, number.imag))
    return torch.complex(real * ~across, imaginary * across)


def rotate_pairs(rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply RoPE pairs by complex numbers; unit numbers are the 2-D rotations of Eq. 14.

    rows: [H, d, ...] real, pair p being rows (p, p + d/2); factor: [H, d/2] complex. Returns [H, d, ...].
    """
    first, second = rows.chunk(2, dim=1)
    factor = factor.reshape(*factor.shape, *[1] * (rows.ndim - 2))
    real, imaginary = factor.real, factor.imag
    return torch.cat((real * first - imaginary * second, imaginary * first + real * second), dim=1)
