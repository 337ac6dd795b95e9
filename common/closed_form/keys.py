"""Merging keys: the shared key head of each group, in float64.

Pair by pair, where the search begins. Keys affect the model only through conj(q_i[p]) k_i[p], and any complex
factor per RoPE pair commutes with RoPE. With w_i^2 = E|q_i[p]|^2, the best shared key of a pair is the first
principal component of the D numbers w_i k_i[p], a combination sum_j encode_j k_j[p]. Head i reconstructs its
key as decode_i k~[p], and the factor is folded into its query: q_i <- conj(decode_i) q_i.

RoPE-aware. A stock model does not need RoPE pairs to stay pairs: any real A_j and B_i [d, d] make one, with
shared keys k~ = sum_j A_j k_j and queries q_i <- B_i^T q_i. At distance t the score q_i^T R k_i becomes q_i^T
B_i R k~, with R = R(-t) the rotation by RoPE. Softmax ignores what is the same for all keys, so what merging
loses is the variance of the score's error over keys and distances:

    loss = sum_i E_q Var_{t,k} [ q_i^T (R k_i - B_i R k~) ]

Queries, keys and distances count as independent. Distances are log-uniform up to the context, because
attention is mostly local. With K = E[k k^T] over the group's stacked heads, mu = E[k] and Sigma_i =
E[q_i q_i^T], the loss is quadratic in A for fixed B and in B for fixed A, and averages over distances are
elementwise factors on RoPE pairs (`RopeAverages`). The two halves alternate, from two initializations: pair
by pair, and with the pairs that hardly turn within the context merged like values. Where RoPE also scales
pairs by s, of queries and keys, R is s R(-t) s = s^2 R(-t), as s commutes with RoPE: A and B stay what they
are, and only averages change. Pair by pair, it changes nothing.

Notation: G groups of D heads, d = head_dim, P = d/2; all float64. A, B and Sigma are [G, D, d, d]; a matrix
over stacked heads is [G, D d, D d].
"""

import torch

from common.closed_form.values import RANK_TOLERANCE, merge_values
from common.method.rope import pair_products, to_complex, to_matrix, to_real, unit_phase
from common.method.stats import stack_heads

ROUNDS = 8  # of the alternation; later ones gain about a percent
STRATA = 40  # of the distribution of distances
DAMPING = 1e-6  # relative to the mean diagonal of a system: directions below it stay as they are
NOISE = 1e-10  # white noise added to the keys, relative to their mean energy: makes every system regular
QUERY_FLOOR = 1e-6  # relative to a layer's mean query energy: unused keys keep a small weight
BAND_LIMIT = 0.8  # radians: pairs that turn less within the context start as values; 1.6 and 3 do as well

Maps = tuple[torch.Tensor, torch.Tensor]  # A and B


def merge_keys(gram: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """c [G, D, D, P] and w [G, D, P] -> encode [G, D, P], decode [G, D, P], complex.

    k~[p] = sum_j encode_j k_j[p], and k_i[p] is replaced by decode_i k~[p]. decode_i is the regression of k_i
    on k~, not the eigenvector component divided by w_i, so it is at most sqrt(E|k_i|^2 / E|k~|^2) however
    small w_i is. k~ has the phase closest to the mean of the group's keys, and their mean energy. Pairs whose
    keys are all zero get the mean.
    """
    moment = gram.transpose(1, 2).permute(0, 3, 1, 2)  # [G, P, D, D]: sum_n z_i conj(z_j)
    w = weights.permute(0, 2, 1)
    leading = torch.linalg.eigh(w[..., :, None] * moment * w[..., None, :]).eigenvectors[..., -1]
    encode = leading.conj() * w  # [G, P, D]
    cross = torch.einsum("gpij,gpj->gpi", moment, encode.conj())  # sum_n z_i conj(z~)
    energy = torch.einsum("gpi,gpi->gp", encode, cross).real[..., None]
    energies = torch.diagonal(moment, dim1=-2, dim2=-1).real  # sum_n |z_i|^2
    total = energies.sum(-1, keepdim=True)  # less a mean's share, it may be below zero by rounding
    alive = (total > 0) & (energy > RANK_TOLERANCE * total)
    decode = torch.where(alive, cross / energy.where(alive, 1), 1)
    encode = torch.where(alive, encode, 1 / encode.shape[-1])
    scale = torch.where(alive, (total / encode.shape[-1] / energy.where(alive, 1)).sqrt(), 1)
    gauge = unit_phase(decode.sum(-1, keepdim=True)) * scale
    return (gauge * encode).permute(0, 2, 1), (decode / gauge).permute(0, 2, 1)


def log_uniform(context: int) -> torch.Tensor:
    """STRATA distances from 0 to context, with distance + 1 log-uniform; float64."""
    middles = (torch.arange(STRATA, dtype=torch.float64) + 0.5) / STRATA
    return (context + 1) ** middles - 1


def scale_parts(matrix: torch.Tensor, linear: torch.Tensor, conjugate: torch.Tensor) -> torch.Tensor:
    """Multiply the parts of real matrices [..., d, d] elementwise by complex numbers [P, P] each.

    On the complex coordinates z of a vector, any real matrix acts as z -> U z + V conj(z). U is multiplied by
    `linear` and V by `conjugate`.
    """
    top, bottom = matrix.chunk(2, -2)
    (a, b), (c, d) = top.chunk(2, -1), bottom.chunk(2, -1)
    u = linear * torch.complex(a + d, c - b) / 2
    v = conjugate * torch.complex(a - d, c + b) / 2
    plus, minus = u + v, u - v
    top, bottom = torch.cat((plus.real, -minus.imag), -1), torch.cat((plus.imag, minus.real), -1)
    return torch.cat((top, bottom), -2)


class RopeAverages:
    """Averages over distances t of R, the rotation by -t: times gain[p] exp(-1j frequencies[p] t) for pair p.

    frequencies: [P] radians per position; distances: [n]; scale: [P], of queries and of keys, the root of
    gain, or None for 1; all float64.
    """

    def __init__(self, frequencies: torch.Tensor, distances: torch.Tensor, scale: torch.Tensor | None = None):
        self.frequencies, self.furthest = frequencies, distances.max()
        self.gain = torch.ones_like(frequencies) if scale is None else scale.square()
        angles = -distances.to(frequencies.device)[:, None] * frequencies
        turns = torch.polar(self.gain.expand_as(angles), angles)  # [n, P]
        self.mean = turns.mean(0)
        self.linear = torch.einsum("np,nq->pq", turns, turns.conj()) / len(turns)
        self.conjugate = torch.einsum("np,nq->pq", turns, turns) / len(turns)

    def turn(self, vector: torch.Tensor) -> torch.Tensor:
        """avg(R) x for x [..., d]."""
        return to_real(self.mean * to_complex(vector))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        """avg(R X R^T) for X [..., d, d]."""
        return scale_parts(matrix, self.linear, self.conjugate)

    def backward(self, matrix: torch.Tensor) -> torch.Tensor:
        """avg(R^T X R) for X [..., d, d]."""
        return scale_parts(matrix, self.linear.conj(), self.conjugate.conj())

    def spread(self, matrix: torch.Tensor) -> torch.Tensor:
        """avg(R^T X R) - avg(R)^T X avg(R) for X [..., d, d]."""
        back = self.mean.conj()
        linear = self.linear.conj() - torch.outer(back, self.mean)
        return scale_parts(matrix, linear, self.conjugate.conj() - torch.outer(back, back))


class KeyFit:
    """The loss of a layer's groups, and its two halves.

    gram: E[k_i k_j^T] [G, D, D, d, d]; mean: E[k_i] [G, D, d]; query: Sigma [G, D, d, d].
    """

    def __init__(self, gram: torch.Tensor, mean: torch.Tensor, query: torch.Tensor, turns: RopeAverages):
        groups, members, _, size, _ = gram.shape
        self.gram, self.mean, self.query, self.turns = gram, mean, query, turns
        self.shape = groups, members, size
        stacked = stack_heads(gram)
        noise, dead = NOISE * mean_diagonal(stacked), (stacked == 0).all(-1).all(-1)[:, None, None]
        self.stacked = stacked + noise.where(~dead, 0) * identity_like(stacked)  # K
        energy = self.stacked.view(groups, members, size, members, size)
        energy = torch.stack([energy[:, i, :, i] for i in range(members)], dim=1)
        self.variance = self.covariance(energy, mean, mean)  # of R k_i
        flat = mean.flatten(1)[..., None]
        centered = self.stacked - flat @ flat.mT
        centered = centered.where(~dead, identity_like(stacked))
        self.dual = solve_each(centered, flat).view(groups, members, size)  # (K - mu mu^T)^-1 mu
        self.mean_share = (self.dual * mean).sum((-2, -1))[:, None, None]  # mu^T (K - mu mu^T)^-1 mu

    def covariance(self, moment: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Covariance over keys and distances of R x and R y: from E[x y^T], E[x] and E[y]."""
        left, right = self.turns.turn(left), self.turns.turn(right)
        return self.turns.forward(moment) - left[..., :, None] * right[..., None, :]

    def shared(self, encode: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Covariances of R k_i with R k~ [G, D, d, d], and of R k~ with itself [G, d, d]."""
        groups, members, size = self.shape
        stacked = encode.transpose(1, 2).reshape(groups, size, members * size)
        cross = self.stacked @ stacked.mT
        mean = torch.einsum("gjab,gjb->ga", encode, self.mean)
        itself = self.covariance(stacked @ cross, mean, mean)
        cross = cross.view(groups, members, size, size)
        return self.covariance(cross, self.mean, mean[:, None].expand_as(self.mean)), itself

    def loss(self, encode: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
        """The loss of each group, [G]."""
        cross, itself = self.shared(encode)
        error = self.variance - 2 * decode @ cross.mT + decode @ itself[:, None] @ decode.mT
        return (self.query * error).sum((1, 2, 3))

    def best_decode(self, encode: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
        """B for fixed A, damped around `decode`: the regression of R k_i on R k~. Sigma cancels."""
        cross, itself = self.shared(encode)
        residual = cross - decode @ itself[:, None]
        right = residual.flatten(1, 2).mT  # [G, d, D d]; pragma: no mutate: or head by head
        step = damped_solve(itself, right)
        return decode + step.mT.view_as(decode)

    def best_encode(self, encode: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
        """A for fixed B, damped around `encode`.

        Without the mean, A = G^-1 H, and K cancels. Subtracting the mean adds a rank-one step along
        (K - mu mu^T)^-1 mu.
        """
        weighted = decode.mT @ self.query  # B_i^T Sigma_i
        system = (weighted @ decode).sum(1)
        total, spread = self.turns.backward(system), self.turns.spread(system)
        residual = self.turns.backward(weighted) - total[:, None] @ encode
        groups, members, size = self.shape
        flat = residual.transpose(1, 2).reshape(groups, size, members * size)
        step = damped_solve(total, flat).view(groups, size, members, size).transpose(1, 2)
        encode = encode + step
        lost = self.turns.spread(weighted) - spread[:, None] @ encode
        lost = torch.einsum("gjab,gjb->ga", lost, self.mean)
        along = damped_solve(total, lost[..., None], self.mean_share * spread)
        return encode + along[:, None] * self.dual[:, :, None, :]


def identity_like(matrix: torch.Tensor) -> torch.Tensor:
    """The identity of the size, dtype and device of matrices [..., n, n]."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def mean_diagonal(matrix: torch.Tensor) -> torch.Tensor:
    """Mean diagonal of positive matrices [..., n, n] -> [..., 1, 1]; 1 where it is 0."""
    mean = torch.diagonal(matrix, dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return mean.where(mean > 0, 1)


def damped_solve(system: torch.Tensor, right: torch.Tensor, extra: torch.Tensor | float = 0,
                 damping: float | None = None) -> torch.Tensor:
    """Solve (system + extra + damping times the mean diagonal of system) x = right; by default DAMPING."""
    damping = DAMPING if damping is None else damping
    damped = system + extra + damping * mean_diagonal(system) * identity_like(system)
    return solve_each(damped, right)


def solve_each(system: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Solve system x = right for each of [n, ...]: MKL's batched LU hangs with more than one thread."""
    return torch.stack([torch.linalg.solve(*pair) for pair in zip(system, right, strict=True)])


def start_by_pairs(fit: KeyFit) -> Maps:
    """A and B pair by pair. Softmax ignores what is constant, so avg(R) E[k] is subtracted from the keys."""
    mean = fit.turns.turn(fit.mean)
    constant = pair_products(mean[:, :, None, :, None] * mean[:, None, :, None, :])
    energy = pair_products(fit.query).real
    weights = energy.clamp(min=float(QUERY_FLOOR * energy.mean())).sqrt()
    encode, decode = merge_keys(fit.turns.gain.square() * pair_products(fit.gram) - constant, weights)
    return to_matrix(encode), to_matrix(decode)


def start_by_band(fit: KeyFit, encode: torch.Tensor, decode: torch.Tensor) -> Maps:
    """A and B with the pairs that hardly turn merged like values instead, free of the mean."""
    slow = fit.turns.frequencies * fit.turns.furthest < BAND_LIMIT
    slow = torch.cat((slow, slow))
    inside = slow[:, None] & slow
    gain = fit.turns.gain.repeat(2)
    centered = fit.gram - fit.mean[:, :, None, :, None] * fit.mean[:, None, :, None, :]
    centered = gain[:, None] * centered * gain  # of R k, where R hardly turns
    like_values = merge_values(centered[..., slow, :][..., slow], fit.query[..., slow, :][..., slow])
    encode, decode = (matrix.where(~inside, 0) for matrix in (encode, decode))
    encode[..., inside], decode[..., inside] = (matrix.flatten(-2) for matrix in like_values)
    return encode * (gain / gain[:, None]), decode  # A of k from that of R k


def balanced(gram: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor) -> Maps:
    """A and B with every shared pair times a complex number, which changes no score.

    It gets the phase closest to the mean of the group's keys, and their mean energy, so that it can be
    blended with them and trained at their learning rate. gram: [G, D, D, d, d].
    """
    cross = pair_products(torch.einsum("giab,gijbc->gac", encode, gram))  # sum_n conj(z~) z_j, over j
    energy = pair_products(torch.einsum("giab,gijbc,gjdc->gad", encode, gram, encode)).real
    mean_energy = pair_products(torch.einsum("giiab->gab", gram)).real / gram.shape[1]
    alive = (energy > 0) & (mean_energy > 0)
    scale = (mean_energy / energy.where(alive, 1)).sqrt().where(alive, 1)
    factor = (scale * unit_phase(cross))[:, None]
    return to_matrix(factor) @ encode, decode @ to_matrix(1 / factor)


def alternate(fit: KeyFit, encode: torch.Tensor, decode: torch.Tensor, rounds: int):
    """A, B and the loss [G] after `rounds` of the two halves, which never raise it."""
    for _ in range(rounds):
        decode = fit.best_decode(encode, decode)
        encode = fit.best_encode(encode, decode)
    decode = fit.best_decode(encode, decode)
    return encode, decode, fit.loss(encode, decode)


def merge_rope_keys(fit: KeyFit, rounds: int = ROUNDS) -> Maps:
    """encode A and decode B, [G, D, d, d]: from the better initialization for each group."""
    by_pairs = start_by_pairs(fit)
    encode, decode, loss = alternate(fit, *by_pairs, rounds)
    band_encode, band_decode, band_loss = alternate(fit, *start_by_band(fit, *by_pairs), rounds)
    better = (band_loss < loss)[:, None, None, None]
    return balanced(fit.gram, band_encode.where(better, encode), band_decode.where(better, decode))
