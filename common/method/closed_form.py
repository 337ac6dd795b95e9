"""Closed-form merging: the best shared key and value head of each group, from Gram matrices alone, in float64.

A head's values count through W_O,i v_i, and any d x d map between W_V,i and W_O,i leaves the model as it is: what a group
can keep in one value head is a low-rank question. With R_i the symmetric root of W_O,i^T W_O,i, the stacked vectors R_i v_i
have second moment E = R C R; the best shared head is its first d principal components, v~ = U^T R v, and head i reads it
back as R_i^-1 U_i v~. The singular vectors of [W_O,i W_V,i] S^(1/2), with S the second moment of the attention input, give the
same: S cancels, so neither S nor an inverse of it is needed.

A head's keys count through conj(q_i[p]) k_i[p], and any complex factor per RoPE pair commutes with RoPE. With
w_i^2 = E|q_i[p]|^2 the best shared key of a pair is the first principal component of the D numbers w_i k_i[p], a combination
sum_j combine_j k_j[p]; head i reads it back as factor_i k~[p], which its query absorbs: q_i <- conj(factor_i) q_i.

Notation: G groups of D heads, d = head_dim, P = d/2. Grams as in common/method/stats.py, of one layer, within groups.
"""

import torch

from common.method.fuse import Merge
from common.method.procrustes import polar, shared_out
from common.method.rope import unit_phase

FLOOR = 1e-6  # of a layer's mean query energy: where a query never looks, its key still has some weight
DEAD = 1e-12  # of the largest eigenvalue: directions below it hold rounding, nothing else


def root(output_gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric root of W_O^T W_O [..., d, d] and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(output_gram)
    alive = values > DEAD * values[..., -1:]
    forward = values.clamp(min=0).sqrt() * alive
    backward = torch.where(alive, values, 1).rsqrt() * alive
    return tuple((vectors * diagonal[..., None, :]) @ vectors.mT for diagonal in (forward, backward))


def merge_values(gram: torch.Tensor, output_gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """C [G, D, D, d, d] and W_O,i^T W_O,i [G, D, d, d] -> combine [G, D, d, d], read [G, D, d, d].

    v~ = sum_j combine_j v_j, and v_i is replaced by read_i v~: W_V~ = sum_j combine_j W_V,j, W_O,i <- W_O,i read_i. Among all
    orthogonal coordinates of v~ it has those nearest to the mean of the group's values, and the mean of their energies, so that it
    can be blended with them and trained at their learning rate.
    """
    groups, members, _, size, _ = gram.shape
    forward, backward = root(output_gram)
    energy = torch.einsum("giab,gijbc,gjcd->giajd", forward, gram, forward).reshape(groups, members * size, members * size)
    leading = torch.linalg.eigh(energy).eigenvectors[..., -size:].view(groups, members, size, size)  # U_i: [d, components]
    combine = leading.mT @ forward
    read = backward @ leading
    toward_mean = torch.einsum("gijab,gjcb->gac", gram, combine)  # D sum_n mean v~^T
    turn = polar(toward_mean)
    own = torch.einsum("giiaa->g", gram) / members
    shared = torch.einsum("giab,gijbc,gjac->g", combine, gram, combine)
    scale = torch.where(shared > 0, (own / shared.where(shared > 0, 1)).sqrt(), 1)[:, None, None, None]
    return scale * (turn[:, None] @ combine), read @ turn[:, None].mT / scale


def key_weights(energy: torch.Tensor) -> torch.Tensor:
    """w_i[p] from sum_n |q_i[p]|^2 of one layer [..., P]: its root, with FLOOR times the mean as the least."""
    mean = energy.mean()
    return energy.clamp(min=float(FLOOR * mean)).sqrt() if mean > 0 else torch.ones_like(energy)


def merge_keys(gram: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """c [G, D, D, P] and w [G, D, P] -> combine [G, D, P], factor [G, D, P], complex.

    k~[p] = sum_j combine_j k_j[p], and k_i[p] is replaced by factor_i k~[p]. factor_i is the regression of k_i on k~, not
    a component over w_i, so it stays below sqrt(E|k_i|^2 / E|k~|^2) however small w_i is. k~ has the phase nearest to the
    mean of the group's keys and the mean of their energies.
    """
    moment = gram.transpose(1, 2).permute(0, 3, 1, 2)  # [G, P, D, D]: sum_n z_i conj(z_j)
    w = weights.permute(0, 2, 1)
    leading = torch.linalg.eigh(w[..., :, None] * moment * w[..., None, :]).eigenvectors[..., -1]
    combine = leading.conj() * w  # [G, P, D]
    read = torch.einsum("gpij,gpj->gpi", moment, combine.conj())  # sum_n z_i conj(z~)
    energy = torch.einsum("gpi,gpi->gp", combine, read).real[..., None]
    own = torch.diagonal(moment, dim1=-2, dim2=-1).real
    dead = energy <= DEAD * own.sum(-1, keepdim=True)  # keys that are zero: their mean, which is zero, serves
    factor = torch.where(dead, 1, read / energy.where(~dead, 1))
    combine = torch.where(dead, 1 / combine.shape[-1], combine)
    gauge = unit_phase(factor.sum(-1, keepdim=True)) * torch.where(dead, 1, (own.mean(-1, keepdim=True) / energy.where(~dead, 1)).sqrt())
    return (gauge * combine).permute(0, 2, 1), (factor / gauge).permute(0, 2, 1)


def closed_form(value_gram: torch.Tensor, output_gram: torch.Tensor, key_gram: torch.Tensor, weights: torch.Tensor) -> Merge:
    """The best merge of one layer: C [G, D, D, d, d], W_O,i^T W_O,i [G, D, d, d], c [G, D, D, P], w [G, D, P]."""
    return Merge(*merge_values(value_gram, output_gram), *merge_keys(key_gram, weights))


def value_loss(gram: torch.Tensor, output_gram: torch.Tensor) -> torch.Tensor:
    """What merging the values of heads i, j loses: energy beyond the first d components, as a share of the layer's. [H, H].

    gram: C [H, H, d, d]; output_gram: [H, d, d].
    """
    heads, size = len(gram), gram.shape[-1]
    forward, _ = root(output_gram)
    energy = torch.einsum("iab,ijbc,jcd->ijad", forward, gram, forward)
    own = torch.stack([energy[i, i] for i in range(heads)])
    loss = energy.new_zeros(heads, heads)
    for i in range(heads - 1):
        others = energy[i, i + 1 :]
        pairs = torch.cat((torch.cat((own[i].expand_as(others), others), -1), torch.cat((others.mT, own[i + 1 :]), -1)), -2)
        loss[i, i + 1 :] = shared_out(torch.linalg.eigvalsh, pairs)[:, :size].clamp(min=0).sum(-1)
    return (loss + loss.T) / torch.einsum("iaa->", own)


def key_loss(gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What merging the keys of heads i, j loses: the smaller eigenvalue of each pair's weighted 2 x 2 Gram, as a share. [H, H].

    gram: c [H, H, P]; weights: w [H, P].
    """
    own = torch.einsum("iip->ip", gram).real * weights.square()
    cross = (gram.abs() * weights[:, None] * weights[None]).square()
    first, second = own[:, None], own[None]
    smaller = (first + second - ((first - second).square() + 4 * cross).sqrt()).clamp(min=0) / 2
    loss = (smaller.sum(-1) / own.sum()).triu(1)
    return loss + loss.T
