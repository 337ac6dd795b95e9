"""Procrustes analysis on Gram matrices: similarity of two aligned heads, and rotations that align a group.

All in float64 / complex128. C[i, j] = sum_n v_i v_j^T and c[i, j, p] = sum_n conj(z_i[p]) z_j[p] as in
common/method/stats.py, over H heads, or over the D heads of each group.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from common.method.rope import unit_phase

MAX_ROUNDS = 500  # Algorithm 1 converges in tens of rounds (keys) or hundreds (values)
GAIN_TOLERANCE = 1e-10  # relative gain per round at convergence: far below the precision of printed figures


def threaded(decompose, matrices: torch.Tensor) -> torch.Tensor:
    """decompose(matrices [..., d, d]); on a CPU the batch is split over one single-threaded worker per core.

    LAPACK processes the matrices one by one, and several threads do not speed up one of a head's size.
    """
    cores = torch.get_num_threads()
    if matrices.is_cuda or cores == 1:
        return decompose(matrices)
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = list(pool.map(decompose, matrices.reshape(-1, *matrices.shape[-2:]).chunk(cores)))
    torch.set_num_threads(cores)  # otherwise threads created later would start with 1
    return torch.cat(parts).reshape(*matrices.shape[:-2], *parts[0].shape[1:])


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonal polar factor of matrix [..., d, d]: Phi Psi^T of its SVD Phi S Psi^T.

    For the matrix Y X^T it minimizes Eq. 4. Eq. 6, 10 and 21 print its transpose Psi Phi^T, the minimizer for
    X Y^T.
    """
    def factor(matrices):
        left, _, right = torch.linalg.svd(matrices)
        return left @ right

    return threaded(factor, matrix)


def value_similarity(gram: torch.Tensor, tokens: int, criterion: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, H] similarity of value heads before (Eq. 3) and after (Eq. 19, 22) the best alignment of each pair.

    gram: C [H, H, d, d], from unit-norm vectors for "cos", from raw ones for "dist". sum_n <v_i, Q v_j> is
    maximal at the polar factor of C[i, j], where it equals the nuclear norm.
    """
    before = torch.einsum("ijaa->ij", gram)
    rows, columns = torch.triu_indices(len(gram), len(gram))
    after = torch.zeros_like(before)
    after[rows, columns] = threaded(torch.linalg.svdvals, gram[rows, columns]).sum(-1)
    after = after.triu() + after.triu(1).T
    return tuple(_similarity(overlap, before.diagonal(), tokens, criterion) for overlap in (before, after))


def key_similarity(
    gram: torch.Tensor, tokens: int, criterion: str, free: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, H] similarity of key heads before (Eq. 2) and after (Eq. 18, 22) the best rotation per RoPE pair.

    gram: c [H, H, d/2] complex, from unit-norm vectors for "cos", from raw ones for "dist".
    sum_n Re(conj(z_i) u z_j) is maximal at u = conj(c) / |c|, where it equals |c|. Pairs that are not free
    (free: [d/2] bool, None for all free) only allow u = 1 and -1, with a maximum of |Re c|.
    """
    best = gram.abs() if free is None else torch.where(free, gram.abs(), gram.real.abs())
    before, after = gram.real.sum(-1), best.sum(-1)
    return tuple(_similarity(overlap, before.diagonal(), tokens, criterion) for overlap in (before, after))


def _similarity(overlap: torch.Tensor, energy: torch.Tensor, tokens: int, criterion: str) -> torch.Tensor:
    """Mean cosine, or minus the mean squared distance |v_i|^2 + |v_j|^2 - 2 <v_i, v_j> (Eq. 22, squared)."""
    if criterion == "cos":
        return overlap / tokens
    return -(energy[:, None] + energy[None, :] - 2 * overlap) / tokens


def align_values(
    gram: torch.Tensor, rounds: int = MAX_ROUNDS, tolerance: float = GAIN_TOLERANCE
) -> torch.Tensor:
    """Generalized Procrustes (Algorithm 1) for values: Q [..., D, d, d] that align the heads Q_i v_i.

    gram: C [..., D, D, d, d] over the D heads of each group; leading axes are a batch. With the mean shape
    M = 1/D sum_j Q_j v_j, the update of Q_i is the polar factor of sum_n M v_i^T = 1/D sum_j Q_j C[j, i], so
    the vectors themselves are not needed. All heads in a round use the same M, as printed. A group of one
    head gets the identity.
    """
    *lead, members, _, size, _ = gram.shape
    rotation = torch.eye(size, dtype=gram.dtype, device=gram.device).expand(*lead, members, size, size)
    before = None
    for _ in range(rounds):
        toward_mean = torch.einsum("...jab,...jibc->...iac", rotation, gram) / members  # sum_n M v_i^T
        agreement = torch.einsum("...iab,...iab->...", rotation, toward_mean)  # D sum_n |M|^2, rising
        if before is not None and (agreement - before <= tolerance * agreement.abs()).all():
            break
        before = agreement
        rotation = polar(toward_mean)
    return rotation.contiguous()


def align_keys(
    gram: torch.Tensor,
    rounds: int = MAX_ROUNDS,
    tolerance: float = GAIN_TOLERANCE,
    free: torch.Tensor | None = None,
) -> torch.Tensor:
    """Generalized Procrustes for keys: one unit number per head and RoPE pair, u [..., D, d/2] complex.

    gram: c [..., D, D, d/2]. Algorithm 1 with rotations of the form of Eq. 14: u_i <- unit(sum_j u_j c[i,
    j]). Multiplying by a unit number is a rotation, never a reflection, and commutes with RoPE (Eq. 17).
    Pairs that are not free ([d/2] bool, None for all free) get 1 or -1.
    """
    *lead, members, _, pairs = gram.shape
    rotation = torch.ones(*lead, members, pairs, dtype=gram.dtype, device=gram.device)
    before = None
    for _ in range(rounds):
        toward_mean = torch.einsum("...jp,...ijp->...ip", rotation, gram)
        agreement = (rotation.conj() * toward_mean).real.sum((-2, -1))
        if before is not None and (agreement - before <= tolerance * agreement.abs()).all():
            break
        before = agreement
        rotation = unit_phase(toward_mean)
    if free is None or free.all():
        return rotation
    return torch.where(free, rotation, sign_flips(gram.real).to(rotation.dtype))


def sign_flips(gram: torch.Tensor) -> torch.Tensor:
    """Signs s [..., D, d/2] that make sum_ij s_i s_j Re c[i, j] large, separately for each RoPE pair.

    gram: Re c [..., D, D, d/2]. Algorithm 1 would get stuck: a head's contribution to the mean outweighs the
    pull towards the other sign. Instead, start from the signs of the leading eigenvector; then each head in
    turn takes the sign that best agrees with the others, until none changes. The first head of a group keeps
    its sign. For two heads the result is optimal.
    """
    between = gram.movedim(-1, -3)  # [..., d/2, D, D]
    signs = torch.where(torch.linalg.eigh(between).eigenvectors[..., -1] < 0, -1.0, 1.0).to(gram.dtype)
    between = between - torch.diag_embed(torch.diagonal(between, dim1=-2, dim2=-1))
    before = torch.zeros_like(signs)
    while not torch.equal(signs, before):  # every change raises the sum, so this terminates
        before = signs.clone()
        for head in range(signs.shape[-1]):
            pull = torch.einsum("...j,...j->...", between[..., head, :], signs)
            signs[..., head] = torch.where(pull == 0, signs[..., head], pull.sign())
    return (signs * signs[..., :1]).mT


def pair_mean(overlap: torch.Tensor) -> torch.Tensor:
    """Mean over pairs i < j of [..., D, D], D > 1."""
    members = overlap.shape[-1]
    rows, columns = torch.triu_indices(members, members, 1)
    return overlap[..., rows, columns].mean(-1)
