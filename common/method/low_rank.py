"""Low-rank merging: the best shared value head, and key head pair by pair, of each group; in float64.

Values affect the model only through W_O,i v_i, and any invertible d x d map may be inserted between W_V,i and
W_O,i, so the best shared value head is a low-rank approximation. With R_i the symmetric root of
W_O,i^T W_O,i, the stacked vectors R_i v_i have second moment E = R C R. The best shared head consists of its
first d principal components, v~ = U^T R v, and head i reconstructs its value as R_i^-1 U_i v~. The singular
vectors of [W_O,i W_V,i] S^(1/2), with S the second moment of the attention input, give the same result: S
cancels, so neither S nor its inverse is needed.

Keys affect the model only through conj(q_i[p]) k_i[p], and any complex factor per RoPE pair commutes with
RoPE. With w_i^2 = E|q_i[p]|^2, the best shared key of a pair is the first principal component of the D
numbers w_i k_i[p], a combination sum_j combine_j k_j[p]. Head i reconstructs its key as read_i k~[p], and the
factor is folded into its query: q_i <- conj(read_i) q_i.

Grams suffice for both. Notation: G groups of D heads, d = head_dim, P = d/2. Grams as in
common/method/stats.py, for one layer, within groups.
"""

import torch

from common.method.procrustes import polar, threaded
from common.method.rope import unit_phase

QUERY_FLOOR = 1e-6  # relative to a layer's mean query energy: unused keys keep a small weight
RANK_TOLERANCE = 1e-12  # relative to the largest eigenvalue: directions below it are rounding noise


def symmetric_root(output_gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric root of W_O^T W_O [..., d, d] and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(output_gram)
    kept = values > RANK_TOLERANCE * values[..., -1:]
    root = values.clamp(min=0).sqrt() * kept
    inverse = torch.where(kept, values, 1).rsqrt() * kept
    return tuple((vectors * diagonal[..., None, :]) @ vectors.mT for diagonal in (root, inverse))


def merge_values(gram: torch.Tensor, output_gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """C [G, D, D, d, d] and W_O,i^T W_O,i [G, D, d, d] -> combine [G, D, d, d], read [G, D, d, d].

    v~ = sum_j combine_j v_j, and v_i is replaced by read_i v~: W_V~ = sum_j combine_j W_V,j, W_O,i <- W_O,i
    read_i. v~ is only determined up to an invertible map: the one chosen brings it as close as possible to
    the mean of the group's values by an orthogonal map, with their mean energy, so that it can be blended
    with them and trained at their learning rate. A group whose values or outputs are all zero gets the mean.
    """
    groups, members, _, size, _ = gram.shape
    root, inverse = symmetric_root(output_gram)
    weighted = torch.einsum("giab,gijbc,gjcd->giajd", root, gram, root)
    weighted = weighted.reshape(groups, members * size, members * size)
    leading = torch.linalg.eigh(weighted).eigenvectors[..., -size:].view(groups, members, size, size)  # U_i
    combine = leading.mT @ root
    read = inverse @ leading
    toward_mean = torch.einsum("gijab,gjcb->gac", gram, combine)  # D sum_n mean v~^T
    gauge = polar(toward_mean)[:, None]
    mean_energy = torch.einsum("giiaa->g", gram) / members
    energy = torch.einsum("giab,gijbc,gjac->g", combine, gram, combine)
    alive = (energy > 0)[:, None, None, None]
    scale = (mean_energy / energy.where(energy > 0, 1)).sqrt()[:, None, None, None].where(alive, 1)
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    combine = torch.where(alive, scale * (gauge @ combine), eye / members)
    return combine, torch.where(alive, read @ gauge.mT / scale, eye)


def key_weights(energy: torch.Tensor) -> torch.Tensor:
    """w_i[p] from one layer's sum_n |q_i[p]|^2 [..., P]: its root, floored at QUERY_FLOOR times the mean."""
    mean = energy.mean()
    return energy.clamp(min=float(QUERY_FLOOR * mean)).sqrt() if mean > 0 else torch.ones_like(energy)


def merge_keys(gram: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """c [G, D, D, P] and w [G, D, P] -> combine [G, D, P], read [G, D, P], complex.

    k~[p] = sum_j combine_j k_j[p], and k_i[p] is replaced by read_i k~[p]. read_i is the regression of k_i on
    k~, not the eigenvector component divided by w_i, so it is at most sqrt(E|k_i|^2 / E|k~|^2) however small
    w_i is. k~ has the phase closest to the mean of the group's keys, and their mean energy. Pairs whose keys
    are all zero get the mean.
    """
    moment = gram.transpose(1, 2).permute(0, 3, 1, 2)  # [G, P, D, D]: sum_n z_i conj(z_j)
    w = weights.permute(0, 2, 1)
    leading = torch.linalg.eigh(w[..., :, None] * moment * w[..., None, :]).eigenvectors[..., -1]
    combine = leading.conj() * w  # [G, P, D]
    cross = torch.einsum("gpij,gpj->gpi", moment, combine.conj())  # sum_n z_i conj(z~)
    energy = torch.einsum("gpi,gpi->gp", combine, cross).real[..., None]
    energies = torch.diagonal(moment, dim1=-2, dim2=-1).real  # sum_n |z_i|^2
    total = energies.sum(-1, keepdim=True)  # less a mean's share, it may be below zero by rounding
    alive = (total > 0) & (energy > RANK_TOLERANCE * total)
    read = torch.where(alive, cross / energy.where(alive, 1), 1)
    combine = torch.where(alive, combine, 1 / combine.shape[-1])
    scale = torch.where(alive, (total / combine.shape[-1] / energy.where(alive, 1)).sqrt(), 1)
    gauge = unit_phase(read.sum(-1, keepdim=True)) * scale
    return (gauge * combine).permute(0, 2, 1), (read / gauge).permute(0, 2, 1)


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
        loss[i, i + 1 :] = threaded(torch.linalg.eigvalsh, pairs)[:, :size].clamp(min=0).sum(-1)
    return share(loss + loss.T, torch.einsum("iaa->", diagonal))


def share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """part / whole, or 0 where the whole is 0."""
    return part / whole.where(whole > 0, 1)
