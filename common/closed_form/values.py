"""Merging values: the best shared value head of each group, a low-rank approximation; in float64.

Values affect the model only through W_O,i v_i, and any invertible d x d map may be inserted between W_V,i and
W_O,i, so the best shared value head is a low-rank approximation. With R_i the symmetric root of
W_O,i^T W_O,i, the stacked vectors R_i v_i have second moment E = R C R. The best shared head consists of its
first d principal components, v~ = U^T R v, and head i reconstructs its value as R_i^-1 U_i v~. The singular
vectors of [W_O,i W_V,i] S^(1/2), with S the second moment of the attention input, give the same result: S
cancels, so neither S nor its inverse is needed.

Grams suffice. Notation: G groups of D heads, d = head_dim. Grams as in common/method/stats.py, for
one layer, within groups.
"""

import torch

from common.method.procrustes import polar, threaded

RANK_TOLERANCE = 1e-12  # relative to the largest eigenvalue: directions below it are rounding noise


def symmetric_root(output_gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric root of W_O^T W_O [..., d, d] and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(output_gram)
    kept = values > RANK_TOLERANCE * values[..., -1:]
    root = values.clamp(min=0).sqrt() * kept
    inverse = torch.where(kept, values, 1).rsqrt() * kept
    return tuple((vectors * diagonal[..., None, :]) @ vectors.mT for diagonal in (root, inverse))


def merge_values(gram: torch.Tensor, output_gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """C [G, D, D, d, d] and W_O,i^T W_O,i [G, D, d, d] -> encode [G, D, d, d], decode [G, D, d, d].

    v~ = sum_j encode_j v_j, and v_i is replaced by decode_i v~: W_V~ = sum_j encode_j W_V,j, W_O,i <- W_O,i
    decode_i. v~ is only determined up to an invertible map: the one chosen brings it as close as possible to
    the mean of the group's values by an orthogonal map, with their mean energy, so that it can be blended
    with them and trained at their learning rate. A group whose values or outputs are all zero gets the mean.
    """
    groups, members, _, size, _ = gram.shape
    root, inverse = symmetric_root(output_gram)
    weighted = torch.einsum("giab,gijbc,gjcd->giajd", root, gram, root)
    weighted = weighted.reshape(groups, members * size, members * size)
    leading = torch.linalg.eigh(weighted).eigenvectors[..., -size:].view(groups, members, size, size)  # U_i
    encode = leading.mT @ root
    decode = inverse @ leading
    toward_mean = torch.einsum("gijab,gjcb->gac", gram, encode)  # D sum_n mean v~^T
    gauge = polar(toward_mean)[:, None]
    mean_energy = torch.einsum("giiaa->g", gram) / members
    energy = torch.einsum("giab,gijbc,gjac->g", encode, gram, encode)
    alive = (energy > 0)[:, None, None, None]
    scale = (mean_energy / energy.where(energy > 0, 1)).sqrt()[:, None, None, None].where(alive, 1)
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    encode = torch.where(alive, scale * (gauge @ encode), eye / members)
    return encode, torch.where(alive, decode @ gauge.mT / scale, eye)


def value_loss(gram: torch.Tensor, output_gram: torch.Tensor) -> torch.Tensor:
    """Energy lost by merging the values of heads i and j, as a share of the layer's: [H, H].

    The sum of all but the first d eigenvalues of E. gram: C [H, H, d, d]; output_gram: [H, d, d].
    """
    heads, size = len(gram), gram.shape[-1]
    root, _ = symmetric_root(output_gram)
    energy = torch.einsum("iab,ijbc,jcd->ijad", root, gram, root)
    diagonal = torch.stack([energy[i, i] for i in range(heads)])
    loss = energy.new_zeros(heads, heads)
    for i in range(heads - 1):
        cross = energy[i, i + 1 :]
        upper = torch.cat((diagonal[i].expand_as(cross), cross), -1)
        lower = torch.cat((cross.mT, diagonal[i + 1 :]), -1)
        pairs = torch.cat((upper, lower), -2)  # [H - i - 1, 2d, 2d]
        lost = threaded(torch.linalg.eigvalsh, pairs)[:, :size]
        loss[i, i + 1 :] = lost.clamp(min=0).sum(-1)  # pragma: no mutate: negative only by rounding
    return ratio(loss + loss.T, torch.einsum("iaa->", diagonal))


def ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """part / whole, or 0 where the whole is 0."""
    return part / whole.where(whole > 0, 1)
