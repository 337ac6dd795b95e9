"""Procrustes analysis on Gram matrices: similarity of two aligned heads, and rotations that align a group.

All in float64 / complex128. C[i, j] = sum_n v_i v_j^T and c[i, j, p] = sum_n conj(z_i[p]) z_j[p] as in
common/method/stats.py, over H heads, or over the D heads of each group. In a layer of G groups Q
[G, D, d, d] rotates values and u [G, D, d/2] keys, both in the order of `groups` [G, D] (head indices).
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from common.method.rope import quarter_phase, unit_phase
from common.method.stats import CRITERIA, LayerGrams, group_blocks

RELAXED, RELAXED_SWEEPS = 1.25, 8  # 1.5 and 12 reach no better optima on real values, 1.125 and 4 do worse
MAX_SWEEPS = 500  # convergence takes 3 to 20
GAIN_TOLERANCE = 1e-6  # relative gain of a sweep; local optima differ by 1e-5 to 1e-3
PHASE_TOLERANCE = 1e-6  # radians: the objective is then optimal to 1e-12


def threaded(decompose, matrices: torch.Tensor) -> torch.Tensor:
    """decompose(matrices [..., d, d]) on the CPU, split over one single-threaded worker per core.

    LAPACK processes the matrices one by one, and several threads do not speed up one of a head's size. A GPU
    does not either: cuSOLVER processes them one by one, too, and takes longer for each. The result is on the
    device of the matrices.
    """
    cores, device = torch.get_num_threads(), matrices.device
    matrices = matrices.cpu()
    if cores == 1 or not matrices.numel():  # pragma: no mutate: one core: for time alone
        return decompose(matrices).to(device)
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = list(pool.map(decompose, matrices.reshape(-1, *matrices.shape[-2:]).chunk(cores)))
    torch.set_num_threads(cores)  # otherwise threads created later would start with 1
    return torch.cat(parts).reshape(*matrices.shape[:-2], *parts[0].shape[1:]).to(device)


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """Polar factor of matrix [..., r, d], r >= d, with orthonormal columns: Phi Psi^T of its SVD Phi S Psi^T.

    For the matrix Y X^T it minimizes Eq. 4. Eq. 6, 10 and 21 print its transpose Psi Phi^T, the minimizer for
    X Y^T.
    """
    def factor(matrices):
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
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


def key_similarity(gram: torch.Tensor, tokens: int, criterion: str, free: torch.Tensor | None = None,
                   quarters: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, H] similarity of key heads before (Eq. 2) and after (Eq. 18, 22) the best rotation per RoPE pair.

    gram: c [H, H, d/2] complex, from unit-norm vectors for "cos", from raw ones for "dist".
    sum_n Re(conj(z_i) u z_j) is maximal at u = conj(c) / |c|, where it equals |c|. Pairs that are not free
    (free: [d/2] bool, None for all free) only allow u = 1 and -1, with a maximum of |Re c|; with `quarters`
    also 1j and -1j, with a maximum of |Im c|.
    """
    flipped = torch.maximum(gram.real.abs(), gram.imag.abs()) if quarters else gram.real.abs()
    best = gram.abs() if free is None else torch.where(free, gram.abs(), flipped)
    before, after = gram.real.sum(-1), best.sum(-1)
    return tuple(_similarity(overlap, before.diagonal(), tokens, criterion) for overlap in (before, after))


def _similarity(overlap: torch.Tensor, energy: torch.Tensor, tokens: int, criterion: str) -> torch.Tensor:
    """Mean cosine, or minus the mean squared distance |v_i|^2 + |v_j|^2 - 2 <v_i, v_j> (Eq. 22, squared)."""
    if criterion == "cos":
        return overlap / tokens
    return -(energy[:, None] + energy[None, :] - 2 * overlap) / tokens


def align_values(gram: torch.Tensor, sweeps: int = MAX_SWEEPS,
                 tolerance: float = GAIN_TOLERANCE) -> torch.Tensor:
    """Generalized Procrustes for values: Q [..., D, d, d] that make sum_n |sum_i Q_i v_i|^2 large.

    gram: C [..., D, D, d, d] over the D heads of each group; leading axes are a batch. Algorithm 1 moves all
    heads at once towards a mean that contains them, which may take hundreds of rounds. Here the heads take
    turns, each turning towards the sum of the others, from two initializations, and the better result is
    kept. The first head of a group keeps its coordinates. For two heads, one sweep finds the optimum: the
    polar factor of C[0, 1].
    """
    *lead, members, _, size, _ = gram.shape
    gram = gram.reshape(-1, members, members, size, size)
    between = gram.clone()
    between[:, range(members), range(members)] = 0  # what a head shares with itself depends on no rotation
    if members > 2:  # pragma: no mutate: two heads reach their optimum from any start
        starts = relaxed_starts(gram, between)
        first, second = (sweep_heads(between, start, sweeps, tolerance) for start in starts)
        better = agreement(between, second) > agreement(between, first)
        rotation = torch.where(better[:, None, None, None], second, first)
    else:
        eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
        rotation = sweep_heads(between, eye.expand(len(gram), members, size, size), sweeps, tolerance)
    return (rotation[:, :1].mT @ rotation).view(*lead, members, size, size)


def relaxed_starts(gram: torch.Tensor, between: torch.Tensor) -> list[torch.Tensor]:
    """Two initial Q [G, D, d, d] close to good optima, from C [G, D, D, d, d] with and without blocks i = j.

    Rotations are relaxed to maps into RELAXED * d dimensions with orthonormal columns: what is a local
    optimum in d dimensions often is none there. After a few sweeps from random maps (the same in every call),
    they are projected on the d principal components of sum_ij Q_i C[i, j] Q_j^T, with and without i = j.
    """
    members, size = gram.shape[1], gram.shape[-1]
    shape, generator = (members, round(RELAXED * size), size), torch.Generator().manual_seed(0)
    maps = polar(torch.randn(shape, dtype=gram.dtype, generator=generator).to(gram.device))
    maps = sweep_heads(between, maps.expand(len(gram), *shape), RELAXED_SWEEPS, GAIN_TOLERANCE)
    starts = []
    for blocks in (gram, between):
        moment = torch.einsum("giab,gijbc,gjec->gae", maps, blocks, maps)
        components = torch.linalg.eigh(moment).eigenvectors[..., -size:]
        starts.append(polar(components.mT[:, None] @ maps))
    return starts


def sweep_heads(between: torch.Tensor, maps: torch.Tensor, sweeps: int, tolerance: float) -> torch.Tensor:
    """Sweeps of Q_i <- polar(sum_{j != i} Q_j C[j, i]) over the heads of each group: Q [G, D, r, d].

    between: C [G, D, D, d, d] with zeros for i = j; maps: Q to start from. A group is done once a sweep
    raises its agreement by no more than this share of it.
    """
    maps, active = maps.clone(), torch.arange(len(between), device=between.device)
    before = between.new_full((len(between),), -torch.inf)
    for _ in range(sweeps):
        blocks, moving = between[active], maps[active]
        for head in range(maps.shape[1]):
            moving[:, head] = polar(torch.einsum("gjab,gjbc->gac", moving, blocks[:, :, head]))
        maps[active], after = moving, agreement(blocks, moving)
        rising = after - before > tolerance * after.abs()
        active, before = active[rising], after[rising]
        if not len(active):
            break
    return maps


def agreement(between: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """sum_ij tr(Q_i C[i, j] Q_j^T) [G], from C [G, D, D, d, d] and Q [G, D, r, d]."""
    return torch.einsum("giab,gijbc,gjac->g", maps, between, maps)


def align_keys(gram: torch.Tensor, free: torch.Tensor | None = None, quarters: bool = False) -> torch.Tensor:
    """Generalized Procrustes for keys: one unit number per head and RoPE pair, u [..., D, d/2] complex.

    gram: c [..., D, D, d/2]. A unit number is a rotation of Eq. 14, never a reflection. Pairs that are not
    free ([d/2] bool, None for all free) get 1 or -1, with `quarters` also 1j or -1j.
    """
    rotation = best_phases(gram)
    if free is None or free.all():
        return rotation
    restricted = best_phases(gram, quarter_phase) if quarters else best_phases(gram.real)
    return torch.where(free, rotation, restricted)


def best_phases(gram: torch.Tensor, phase=unit_phase) -> torch.Tensor:
    """u [..., D, d/2] that make sum_ij conj(u_i) c[i, j] u_j large, separately for each RoPE pair.

    gram: c [..., D, D, d/2], complex for any u of modulus 1, real for signs. phase: a number -> the closest u
    that is allowed. For each head, start from the phases that turn the others towards it; then each in turn
    takes the phase that best agrees with the rest, until none changes by PHASE_TOLERANCE; the best of the D
    results is kept. Algorithm 1 would never flip a sign: a head's own share of the mean outweighs the pull
    towards the opposite sign. The first head of a group gets 1.
    """
    gram = gram.movedim(-1, -3)  # [..., d/2, D, D]
    units = phase(gram).mT.clone()  # [..., d/2, starts, D]
    between = gram - torch.diag_embed(torch.diagonal(gram, dim1=-2, dim2=-1))
    for _ in range(MAX_SWEEPS):
        before = units.clone()
        for head in range(units.shape[-1]):
            pull = torch.einsum("...j,...sj->...s", between[..., head, :], units)
            turned = phase(pull)
            units[..., head] = turned.where(pull != 0, units[..., head])  # pragma: no mutate: any agrees
        if ((units - before).abs() <= PHASE_TOLERANCE).all():  # pragma: no mutate: settled phases stay
            break
    reached = torch.einsum("...si,...ij,...sj->...s", units.conj(), between, units).real
    best = units.take_along_dim(reached.argmax(-1)[..., None, None], -2).squeeze(-2)
    return (best * best[..., :1].conj()).mT


def pair_mean(overlap: torch.Tensor) -> torch.Tensor:
    """Mean over pairs i < j of [..., D, D], D > 1."""
    members = overlap.shape[-1]
    rows, columns = torch.triu_indices(members, members, 1)
    return overlap[..., rows, columns].mean(-1)


def layer_similarity(grams: LayerGrams) -> dict[str, torch.Tensor]:
    """One layer's similarities by name, before and after alignment, each [H, H]."""
    matrices = {}
    for criterion, kind in CRITERIA.items():
        keys = key_similarity(grams.key(kind), grams.tokens, criterion, grams.free, grams.joint_norm)
        values = value_similarity(grams.value(kind), grams.tokens, criterion)
        for head, (before, after) in (("key", keys), ("value", values)):
            matrices[f"{head}.{criterion}.before"] = before
            matrices[f"{head}.{criterion}.after"] = after
    return matrices


def align_layer(grams: LayerGrams, groups: torch.Tensor, criterion: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and u by Procrustes on unit-norm vectors ("cos") or raw ones ("dist"); the identity for "none"."""
    if criterion == "none":
        pairs, device = len(grams.free), grams.free.device
        identity = torch.eye(2 * pairs, dtype=torch.float64, device=device)
        ones = torch.ones(*groups.shape, pairs, dtype=torch.complex128, device=device)
        return identity.expand(*groups.shape, 2 * pairs, 2 * pairs), ones
    kind = CRITERIA[criterion]
    value_rotation = align_values(group_blocks(grams.value(kind), groups))
    key_rotation = align_keys(group_blocks(grams.key(kind), groups), grams.free, grams.joint_norm)
    return value_rotation, key_rotation


def value_overlap(gram: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """sum_n <Q_i v_i, Q_j v_j> [..., D, D] from C [..., D, D, d, d] and Q [..., D, d, d]."""
    return torch.einsum("...iab,...ijbc,...jac->...ij", rotation, gram, rotation)


def key_overlap(gram: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """sum_n Re(conj(u_i z_i) u_j z_j) [..., D, D] from c [..., D, D, d/2] and u [..., D, d/2]."""
    return torch.einsum("...ip,...ijp,...jp->...ij", rotation.conj(), gram, rotation).real


def within_group_cosine(grams: LayerGrams, groups: torch.Tensor, value_rotation: torch.Tensor,
                        key_rotation: torch.Tensor) -> dict[str, float]:
    """Mean cosine (Eq. 2, 3) over pairs of heads within groups, before and after rotation by Q and u."""
    value, key = group_blocks(grams.value("unit"), groups), group_blocks(grams.key("unit"), groups)
    overlaps = {
        "key_before": key.real.sum(-1),
        "key_after": key_overlap(key, key_rotation),
        "value_before": torch.einsum("gijaa->gij", value),
        "value_after": value_overlap(value, value_rotation),
    }
    return {name: float(pair_mean(overlap).mean()) / grams.tokens for name, overlap in overlaps.items()}
