"""Procrustes on Gram matrices against the formulas on vectors, with scipy as the witness."""

import numpy as np
import pytest
import scipy.linalg
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from common.method.procrustes import (
    align_keys,
    align_values,
    key_similarity,
    pair_mean,
    polar,
    sign_flips,
    value_similarity,
)
from common.method.rope import rotate_pairs
from common.method.stats import (
    STRIP,
    LayerGrams,
    LayerStats,
    gram_half,
    key_gram,
    output_gram,
    to_unit,
    unpack_half,
)
from conftest import tiny_model

N, H, D = 300, 4, 8


@pytest.fixture
def heads() -> torch.Tensor:
    """[n, H, d] correlated head vectors in float64."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(N, 1, D, generator=generator, dtype=torch.float64)
    mix = torch.randn(H, D, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, H, D, generator=generator, dtype=torch.float64)
    return torch.einsum("nzd,hde->nhe", shared, mix) + 0.5 * noise


def best_pair_rotations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rotate each RoPE pair of x [n, d] by its best angle towards y, from a 2 x 2 problem of its own."""
    rotated, half = np.empty_like(x), x.shape[1] // 2
    for p in range(half):
        (a, b), (c, e) = x[:, [p, p + half]].T, y[:, [p, p + half]].T
        angle = np.arctan2((a * e - b * c).sum(), (a * c + b * e).sum())
        rotated[:, p] = np.cos(angle) * a - np.sin(angle) * b
        rotated[:, p + half] = np.sin(angle) * a + np.cos(angle) * b
    return rotated


def direct(x: np.ndarray, y: np.ndarray, criterion: str) -> float:
    """Eq. 2, 3, 18, 19 and 22 (squared) as printed, on vectors [n, d]."""
    if criterion == "cos":
        return float(np.mean(np.sum(x * y, 1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)))
    return -float(np.mean(np.sum((x - y) ** 2, 1)))


@pytest.mark.parametrize("criterion", ["cos", "dist"])
def test_similarity_equals_direct_formulas(heads, criterion):
    chosen = to_unit(heads) if criterion == "cos" else heads
    values = value_similarity(value_gram(chosen), N, criterion)
    keys = key_similarity(key_gram(chosen), N, criterion)
    vectors, raw = chosen.numpy(), heads.numpy()
    for i in range(H):
        for j in range(H):
            # min |x_j R - x_i|
            rotation, _ = scipy.linalg.orthogonal_procrustes(vectors[:, j], vectors[:, i])
            values_after = direct(vectors[:, i], vectors[:, j] @ rotation, criterion)
            rotated = best_pair_rotations(vectors[:, j], vectors[:, i])
            before = direct(raw[:, i], raw[:, j], criterion)
            assert values[0][i, j] == pytest.approx(before, abs=1e-10)
            assert values[1][i, j] == pytest.approx(values_after, abs=1e-10)
            assert keys[0][i, j] == pytest.approx(before, abs=1e-10)
            assert keys[1][i, j] == pytest.approx(direct(vectors[:, i], rotated, criterion), abs=1e-10)


def value_gram(values: torch.Tensor) -> torch.Tensor:
    """The definition: C[i, j] = sum_n v_i v_j^T of values [n, H, d]."""
    return torch.einsum("nia,njb->ijab", values, values)


def complex_pairs(keys: torch.Tensor) -> torch.Tensor:
    """The definition: z[p] = k[p] + i k[p + d/2] of keys [n, H, d]."""
    half = keys.shape[-1] // 2
    return keys[..., :half] + 1j * keys[..., half:]


def complex_gram(keys: torch.Tensor) -> torch.Tensor:
    """The definition: c[i, j, p] = sum_n conj(z_i[p]) z_j[p]."""
    z = complex_pairs(keys)
    return torch.einsum("nip,njp->ijp", z.conj(), z)


def test_key_gram_is_its_definition(heads):
    torch.testing.assert_close(key_gram(heads), complex_gram(heads), rtol=0, atol=1e-10)
    assert key_gram(heads).imag.abs().max() > 1


def test_unit_norm_vectors_and_a_zero_vector_that_stays_zero(heads):
    vectors = heads.clone()
    vectors[3, 1] = 0
    unit = to_unit(vectors)
    lengths = unit.norm(dim=-1)
    assert float(lengths[3, 1]) == 0 and lengths.sum() == pytest.approx(N * H - 1)
    torch.testing.assert_close(unit * vectors.norm(dim=-1, keepdim=True), vectors)


def test_statistics_in_batches_equal_one_product(heads):
    stats = LayerStats(H, D)
    for part in heads.split(70):
        stats.update_keys(part)
        stats.update_values(part)
    grams = LayerGrams(stats.tensors(), H)
    float32 = {"rtol": 1e-5, "atol": 1e-3}  # batch products are float32, sums of 300 terms of size ~10
    torch.testing.assert_close(grams.value("raw"), value_gram(heads), **float32)
    torch.testing.assert_close(grams.key("raw"), complex_gram(heads), **float32)
    torch.testing.assert_close(grams.full_key, value_gram(heads), **float32)
    torch.testing.assert_close(grams.key_mean, heads.mean(0), rtol=1e-5, atol=1e-6)
    assert grams.tokens == N
    unit = {"rtol": 1e-5, "atol": 1e-5}
    directions = heads / heads.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(grams.value("unit"), value_gram(directions), **unit)
    torch.testing.assert_close(grams.key("unit"), complex_gram(directions), **unit)


def test_query_and_output_grams_are_sums_over_the_query_heads_of_a_key_value_head():
    queries = torch.randn(30, 6, D, dtype=torch.float64)
    stats = LayerStats(2, D)
    for part in queries.split(20):
        stats.update_queries(part)
    grams = torch.einsum("nia,nib->iab", queries, queries)
    expected = torch.stack([grams[:3].sum(0), grams[3:].sum(0)])
    torch.testing.assert_close(stats.sums["query.gram"], expected, rtol=1e-5, atol=1e-4)
    weight = torch.randn(20, 6 * D)
    columns = [weight[:, D * head : D * head + D].double() for head in range(6)]
    grams = [column.T @ column for column in columns]
    expected = torch.stack([sum(grams[:3]), sum(grams[3:])])
    torch.testing.assert_close(output_gram(weight, 2, D), expected)


@pytest.mark.parametrize("count", [1, STRIP, STRIP + 1, 2 * STRIP + 3])
def test_half_gram_in_strips_loses_nothing(count):
    heads = torch.randn(30, count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    half = gram_half(heads)
    assert len(half) == count * (count + 1) // 2
    torch.testing.assert_close(unpack_half(half, count), value_gram(heads), rtol=0, atol=1e-12)


def test_polar_agrees_with_scipy(heads):
    x, y = heads[:, 0], heads[:, 1]
    ours = polar(value_gram(heads)[1, 0])  # of Y X^T: minimises |Q x - y| for column vectors, Eq. 4
    theirs, _ = scipy.linalg.orthogonal_procrustes(x.numpy(), y.numpy())  # min |x R - y|, row vectors
    np.testing.assert_allclose(ours.numpy(), theirs.T, atol=1e-10)
    eq6 = ours.T  # what Eq. 6 prints is the transpose: it must fit worse
    assert (x @ ours.T - y).norm() < (x @ eq6.T - y).norm()


def test_keys_before_rope_are_enough():
    model = tiny_model()
    rotary = LlamaRotaryEmbedding(model.config)
    keys = torch.randn(N, H, D)
    positions = torch.randint(0, 4096, (1, N))
    cos, sin = rotary(keys, positions)
    by_head = keys.transpose(0, 1)[None]
    after = apply_rotary_pos_emb(by_head, by_head, cos, sin)[0][0].transpose(0, 1)
    # float32 angles up to 4096 radians: 1e-3 of sums of 300 products
    torch.testing.assert_close(key_gram(after.double()), key_gram(keys.double()), rtol=1e-3, atol=2e-2)


def algorithm_1(shapes: list[np.ndarray], rounds: int, solve) -> list[np.ndarray]:
    """Generalized Procrustes as printed, on vectors [n, d]: solve(Y_i, mean) rotates Y_i onto the mean."""
    rotated = [shape.copy() for shape in shapes]
    for _ in range(rounds):
        mean = sum(rotated) / len(rotated)
        rotated = [solve(shape, mean) for shape in rotated]
    return rotated


def eye() -> torch.Tensor:
    return torch.eye(D, dtype=torch.float64).expand(H, D, D)


def onto(shape: np.ndarray, mean: np.ndarray) -> np.ndarray:
    left, _, right = np.linalg.svd(shape.T @ mean)
    return shape @ left @ right


@pytest.mark.parametrize("rounds", [1, 5, 40])
def test_value_alignment_equals_algorithm_1_on_vectors(heads, rounds):
    rotation = align_values(value_gram(heads)[None], rounds, tolerance=-1)[0]  # -1: do not stop early
    expected = algorithm_1([heads[:, i].numpy() for i in range(H)], rounds, onto)
    for i in range(H):
        np.testing.assert_allclose((heads[:, i] @ rotation[i].T).numpy(), expected[i], atol=1e-8)
    torch.testing.assert_close(rotation @ rotation.mT, eye(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 5, 40])
def test_key_alignment_equals_algorithm_1_on_vectors(heads, rounds):
    rotation = align_keys(key_gram(heads)[None], rounds, tolerance=-1)[0]  # -1: do not stop early
    expected = algorithm_1([heads[:, i].numpy() for i in range(H)], rounds, best_pair_rotations)
    rotated = rotate_pairs(heads.permute(1, 2, 0), rotation).permute(2, 0, 1)
    for i in range(H):
        np.testing.assert_allclose(rotated[:, i].numpy(), expected[i], atol=1e-8)


def agreement(vectors: torch.Tensor, rotate) -> float:
    """sum_n |sum_i Q_i v_i|^2 of vectors [n, H, d], which Algorithm 1 raises."""
    return float(rotate(vectors).sum(1).square().sum())


@pytest.mark.parametrize("kind", ["values", "keys"])
def test_alignment_goes_on_until_it_has_settled(heads, kind):
    """As far as 3000 rounds go, to a millionth; far beyond what three rounds reach."""
    gram, align = (value_gram(heads), align_values) if kind == "values" else (key_gram(heads), align_keys)

    def reached(rotation):
        if kind == "values":
            return agreement(heads, lambda vectors: torch.einsum("hab,nhb->nha", rotation, vectors))
        rows = heads.permute(1, 2, 0)
        return agreement(heads, lambda vectors: rotate_pairs(rows, rotation).permute(2, 0, 1))

    settled = reached(align(gram, rounds=3000, tolerance=-1))
    assert reached(align(gram)) >= settled * (1 - 1e-6)
    assert reached(align(gram, rounds=3)) < settled * (1 - 1e-5)
    assert reached(align(gram, tolerance=1e-2)) < settled * (1 - 1e-5)


def test_similarity_after_alignment_is_symmetric(heads):
    for similarity, gram in ((value_similarity, value_gram(heads)), (key_similarity, key_gram(heads))):
        for matrix in similarity(gram, N, "dist"):
            torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12)
            assert (matrix.diagonal().abs() < 1e-9).all()


def test_alignment_of_hidden_copies_is_exact(heads):
    """Heads that are one shape behind unknown rotations come back together, for values and for keys."""
    one = heads[:, :1]
    rotations = torch.linalg.qr(torch.randn(H, D, D, dtype=torch.float64)).Q
    values = torch.einsum("nzd,hed->nhe", one, rotations)
    rotation = align_values(value_gram(values)[None])[0]
    aligned = torch.einsum("nhd,hed->nhe", values, rotation)
    torch.testing.assert_close(aligned, aligned[:, :1].expand(-1, H, -1), rtol=0, atol=1e-5)
    angles = 6 * torch.rand(H, D // 2, dtype=torch.float64)
    phases = torch.polar(torch.ones_like(angles), angles)
    keys = rotate_pairs(one.expand(-1, H, -1).permute(1, 2, 0), phases).permute(2, 0, 1)
    rotation = align_keys(key_gram(keys)[None])[0]
    aligned = rotate_pairs(keys.permute(1, 2, 0), rotation).permute(2, 0, 1)
    torch.testing.assert_close(aligned, aligned[:, :1].expand(-1, H, -1), rtol=0, atol=1e-5)


def test_key_rotation_is_orthogonal_never_a_reflection_and_commutes_with_rope(heads):
    rotation = align_keys(key_gram(heads)[None])[0]
    matrix = rotate_pairs(eye(), rotation)  # the d x d map of each head
    torch.testing.assert_close(matrix @ matrix.mT, eye(), rtol=0, atol=1e-12)
    pairs = torch.stack([matrix[:, [p, p + D // 2]][:, :, [p, p + D // 2]] for p in range(D // 2)])
    determinants = torch.linalg.det(pairs)
    torch.testing.assert_close(determinants, torch.ones_like(determinants), rtol=0, atol=1e-12)
    angles = torch.rand(D // 2, dtype=torch.float64) * 100
    rope = rotate_pairs(eye(), torch.polar(torch.ones_like(angles), angles).expand(H, -1))
    torch.testing.assert_close(rope @ matrix, matrix @ rope, rtol=0, atol=1e-12)


def test_silent_pair_is_left_alone(heads):
    silent = heads.clone()
    silent[:, :, [0, D // 2]] = 0
    assert torch.equal(align_keys(key_gram(silent)[None])[0][:, 0], torch.ones(H, dtype=torch.complex128))


def test_similarity_of_pairs_that_only_flip_is_the_real_part(heads):
    """Eq. 18 where only u = 1 and -1 are exact: |Re c[p]|, and |c[p]| over the free pairs."""
    free = torch.tensor([True, False, True, False])
    gram = key_gram(heads)
    _, after = key_similarity(gram, N, "cos", free)
    best = torch.where(free, gram.abs(), torch.maximum(gram.real, -gram.real)).sum(-1) / N
    torch.testing.assert_close(after, best, rtol=0, atol=1e-12)
    assert (after < key_similarity(gram, N, "cos")[1] - 1e-6).any()


def test_no_single_sign_flip_improves_a_group():
    """100 random groups of six heads; the first head of each keeps its sign."""
    gram = torch.randn(100, 6, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    gram = gram + gram.transpose(1, 2)
    signs = sign_flips(gram)
    assert (signs.abs() == 1).all() and (signs[:, 0] == 1).all()
    pull = torch.einsum("gijp,gjp->gip", gram, signs) - torch.einsum("giip,gip->gip", gram, signs)
    assert (signs * pull >= 0).all()  # flipping head i changes the sum by -4 s_i pull_i


def test_all_groups_at_once_are_each_group_alone(heads):
    """Leading axes: the groups of a layer."""
    grams = value_gram(heads), key_gram(heads)
    for gram, align in zip(grams, (align_values, align_keys), strict=True):
        other = gram.flip(0, 1)
        together = align(torch.stack((gram, other)), rounds=7, tolerance=-1)
        for ours, alone in zip(together, (gram, other), strict=True):
            torch.testing.assert_close(ours, align(alone, rounds=7, tolerance=-1))


def test_pair_mean():
    matrix = torch.tensor([[9.0, 1, 2], [1, 9, 3], [2, 3, 9]])
    assert pair_mean(matrix) == 2


def test_decompositions_shared_among_threads_are_the_same_ones():
    """More matrices than threads, and fewer; the number of threads is as it was afterwards."""
    generator, threads = torch.Generator().manual_seed(8), torch.get_num_threads()
    matrices = torch.randn(5, 3, 6, 6, dtype=torch.float64, generator=generator)
    try:
        torch.set_num_threads(2)
        for batch in (matrices, matrices[:1, :1], matrices[0, 0]):
            factors = polar(batch)
            for ours, matrix in zip(factors.reshape(-1, 6, 6), batch.reshape(-1, 6, 6), strict=True):
                np.testing.assert_allclose(ours.numpy(), scipy.linalg.polar(matrix.numpy())[0], atol=1e-12)
        assert factors.shape == (6, 6) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
