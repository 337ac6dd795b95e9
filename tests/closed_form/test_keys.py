"""Merging keys with RoPE in mind, by definition: least squares over sampled queries, keys and distances."""

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from common.closed_form import keys as key_merge
from common.closed_form.keys import (
    KeyFit,
    RopeAverages,
    alternate,
    log_uniform,
    merge_rope_keys,
    start_by_band,
    start_by_pairs,
)
from common.closed_form.values import merge_values
from common.method.rope import to_complex, to_matrix
from models import tiny_model
from reference import DISTANCES, FREQUENCIES, normal, rope_rotations

GROUPS, MEMBERS, SIZE, TOKENS = 2, 3, 8, 60
SCALE = torch.tensor([1.0, 0.7, 1.6, 0.4], dtype=torch.float64)  # of queries and keys
ROTATIONS = rope_rotations()
SCALES = pytest.mark.parametrize("scale", [None, SCALE], ids=["", "scaled"])


def rope_turns(scale: torch.Tensor | None = None) -> torch.Tensor:
    """R(-t), or S R(-t) S, by which scores read keys where RoPE scales queries and keys, too."""
    diagonal = torch.eye(SIZE).double() if scale is None else torch.diag(scale.repeat(2))
    return diagonal @ ROTATIONS @ diagonal


class Sampled:
    """Keys [n, G, D, d] with a mean and a mixing of heads, queries likewise, and the loss written out."""

    def __init__(self, turns: torch.Tensor = ROTATIONS):
        mix = normal(GROUPS, MEMBERS * SIZE, MEMBERS * SIZE, seed=1) / 5
        shape = TOKENS, GROUPS, MEMBERS, SIZE
        keys = torch.einsum("ngx,gxy->ngy", normal(TOKENS, GROUPS, MEMBERS * SIZE, seed=2), mix)
        self.keys = keys.view(shape) + normal(GROUPS, MEMBERS, SIZE, seed=3)
        self.queries = normal(*shape, seed=4) @ normal(SIZE, SIZE, seed=5)
        self.turns = turns

    def fit(self, turns: RopeAverages | None = None) -> KeyFit:
        gram = torch.einsum("ngia,ngjb->gijab", self.keys, self.keys) / TOKENS
        query = torch.einsum("ngia,ngib->giab", self.queries, self.queries) / TOKENS
        return KeyFit(gram, self.keys.mean(0), query, turns or RopeAverages(FREQUENCIES, DISTANCES))

    def loss(self, encode: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
        """sum_i E_q Var_{t,k} of the score's error, over all samples: [G]."""
        shared = torch.einsum("gjab,ngjb->nga", encode, self.keys)
        error = torch.einsum("tab,ngib->tngia", self.turns, self.keys)
        error = error - torch.einsum("giab,tbc,ngc->tngia", decode, self.turns, shared)
        scores = torch.einsum("qgia,tngia->giqtn", self.queries, error).flatten(3)
        return scores.var(3, correction=0).mean(2).sum(1)


def factors(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    shape = GROUPS, MEMBERS, SIZE, SIZE
    return normal(*shape, seed=seed), normal(*shape, seed=seed + 1)


@pytest.fixture(autouse=True)
def undamped(monkeypatch):
    """Damping and noise are there for degenerate input; definitions are checked without."""
    monkeypatch.setattr(key_merge, "DAMPING", 0.0)
    monkeypatch.setattr(key_merge, "NOISE", 0.0)


def test_turns_are_rope_and_its_averages():
    rotary = LlamaRotaryEmbedding(tiny_model().config)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    for position, distance in ((5, 0), (9, 4), (300, 123)):
        cos, sin = rotary(query, torch.tensor([[position - distance, position]]))
        turned_key = apply_rotary_pos_emb(key, key, cos[:, :1], sin[:, :1])[0]
        turned_query = apply_rotary_pos_emb(query, query, cos[:, 1:], sin[:, 1:])[0]
        turns = RopeAverages(rotary.inv_freq.double(), torch.tensor([float(distance)], dtype=torch.float64))
        score = query[0, 0, 0].double() @ turns.turn(key[0, 0, 0].double())
        assert float(score) == pytest.approx(float((turned_query * turned_key).sum()), abs=1e-4)
    for scale in (None, SCALE):
        each = rope_turns(scale)
        turns, matrix, mean = RopeAverages(FREQUENCIES, DISTANCES, scale), normal(3, SIZE, SIZE), each.mean(0)
        forward = torch.einsum("tab,gbc,tdc->gad", each, matrix, each) / 5
        backward = torch.einsum("tba,gbc,tcd->gad", each, matrix, each) / 5
        for ours, expected in ((turns.turn(matrix), matrix @ mean.T), (turns.forward(matrix), forward),
                               (turns.backward(matrix), backward),
                               (turns.spread(matrix), backward - mean.T @ matrix @ mean)):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_distances_are_log_uniform_up_to_the_context():
    distances = log_uniform(4096)
    assert (distances >= 0).all() and (distances < 4096).all() and distances[-1] > 3600
    assert distances.dtype == torch.float64
    gaps = (distances + 1).log().diff()
    torch.testing.assert_close(gaps, gaps[:1].expand_as(gaps))
    assert float((distances + 1).log().mean()) == pytest.approx(np.log(4097) / 2, rel=1e-12)


@SCALES
def test_the_loss_is_the_variance_of_the_scores_error(scale):
    sampled, turns = Sampled(rope_turns(scale)), RopeAverages(FREQUENCIES, DISTANCES, scale)
    ours, definition = sampled.fit(turns).loss(*factors()), sampled.loss(*factors())
    torch.testing.assert_close(ours, definition, rtol=1e-10, atol=0)


def test_scaled_pairs_start_as_keys_that_are_scaled(monkeypatch):
    """S R S k is R S^2 k, and S^2 A k is what that start's A makes of S^2 k."""
    monkeypatch.setattr(key_merge, "BAND_LIMIT", float(DISTANCES.max() * FREQUENCIES.median()) + 1e-9)
    sampled, square = Sampled(), SCALE.square().repeat(2)
    scaled = sampled.fit(RopeAverages(FREQUENCIES, DISTANCES, SCALE))
    sampled.keys = square * sampled.keys
    for start in (start_by_pairs, lambda fit: start_by_band(fit, *start_by_pairs(fit))):
        (encode, decode), (expected, same) = start(scaled), start(sampled.fit())
        torch.testing.assert_close(square[:, None] * encode / square, expected)
        torch.testing.assert_close(decode, same)


@SCALES
@pytest.mark.parametrize("half", ["encode", "decode"])
def test_each_half_is_the_least_squares_over_all_queries_keys_and_distances(half, scale):
    """Where the loss as written out, convex and quadratic in each half, has no slope."""
    sampled = Sampled(rope_turns(scale))
    maps, slopes = dict(zip(("encode", "decode"), factors(), strict=True)), []
    best = getattr(sampled.fit(RopeAverages(FREQUENCIES, DISTANCES, scale)), f"best_{half}")(**maps)
    for tried in (maps[half], best):
        leaf = tried.clone().requires_grad_()
        slopes.append(torch.autograd.grad(sampled.loss(**maps | {half: leaf}).sum(), leaf)[0].abs().amax())
    assert slopes[1] < 1e-10 * slopes[0]


@pytest.mark.parametrize("damping", [0.0, 1e-6, 0.1])
def test_no_half_ever_raises_the_loss(damping, monkeypatch):
    monkeypatch.setattr(key_merge, "DAMPING", damping)
    fit = Sampled().fit()
    encode, decode = key_merge.start_by_pairs(fit)
    losses = [fit.loss(encode, decode)]
    for _ in range(6):
        decode = fit.best_decode(encode, decode)
        losses.append(fit.loss(encode, decode))
        encode = fit.best_encode(encode, decode)
        losses.append(fit.loss(encode, decode))
    falls = -torch.stack(losses).diff(dim=0) / losses[0]
    assert (falls >= -1e-12).all() and (falls[:2] > 1e-3).all()


def test_keys_that_are_zero_are_merged_and_lose_nothing(monkeypatch):
    """Of one group; the other's do not change."""
    monkeypatch.undo()  # with damping and noise
    sampled = Sampled()
    expected = merge_rope_keys(sampled.fit())
    sampled.keys[:, 0] = 0
    fit = sampled.fit()
    assert alternate(fit, *key_merge.start_by_pairs(fit), 2)[2][0] == 0
    for merged, both in zip(merge_rope_keys(fit), expected, strict=True):
        assert merged.isfinite().all()
        torch.testing.assert_close(merged[1], both[1], rtol=1e-4, atol=1e-4)


def test_without_frequencies_it_is_the_merge_of_values():
    """RoPE that turns nothing leaves scores bilinear: the truncated SVD, with Sigma for W_O^T W_O."""
    sampled = Sampled(torch.eye(SIZE, dtype=torch.float64).expand(5, SIZE, SIZE))
    fit = sampled.fit(RopeAverages(torch.zeros(4, dtype=torch.float64), DISTANCES))
    centered = sampled.keys - sampled.keys.mean(0)
    gram = torch.einsum("ngia,ngjb->gijab", centered, centered) / TOKENS
    best = fit.loss(*merge_values(gram, fit.query))
    torch.testing.assert_close(fit.loss(*merge_rope_keys(fit)), best, rtol=1e-9, atol=0)


def test_the_better_start_is_kept_for_each_group(monkeypatch):
    fit = Sampled().fit()
    by_pairs = key_merge.start_by_pairs(fit)
    by_band = key_merge.start_by_band(fit, *by_pairs)
    losses = torch.stack([alternate(fit, *start, 1)[2] for start in (by_pairs, by_band)])
    assert (losses[0] != losses[1]).all()
    torch.testing.assert_close(fit.loss(*merge_rope_keys(fit, 1)), losses.min(0).values)
    monkeypatch.setattr(key_merge, "start_by_band", lambda fit, encode, decode: (encode, 0 * decode))
    losses[1] = alternate(fit, by_pairs[0], 0 * by_pairs[1], 1)[2]
    torch.testing.assert_close(fit.loss(*merge_rope_keys(fit, 1)), losses.min(0).values)


def test_slow_pairs_start_as_values_do_and_the_others_pair_by_pair():
    fit = Sampled().fit()
    by_pairs = key_merge.start_by_pairs(fit)
    by_band = key_merge.start_by_band(fit, *by_pairs)
    slow = torch.tensor([2, 3, 6, 7])  # radians within 40 positions: 40, 12, 0.8 (the limit) and 0.04
    slow = slow[FREQUENCIES[slow % 4] * 40 < key_merge.BAND_LIMIT]
    assert slow.tolist() == [3, 7]
    fast = torch.tensor([0, 1, 2, 4, 5, 6])
    centered = fit.gram - fit.mean[:, :, None, :, None] * fit.mean[:, None, :, None, :]
    values = merge_values(centered[..., slow, :][..., slow], fit.query[..., slow, :][..., slow])
    for ours, pairs, value in zip(by_band, by_pairs, values, strict=True):
        torch.testing.assert_close(ours[..., slow, :][..., slow], value)
        torch.testing.assert_close(ours[..., fast, :][..., fast], pairs[..., fast, :][..., fast])
        assert not ours[..., slow, :][..., fast].any() and not ours[..., fast, :][..., slow].any()


def test_the_shared_keys_have_the_phase_and_energy_of_the_mean():
    sampled = Sampled()
    fit = sampled.fit()
    start = factors()
    encode, decode = key_merge.balanced(fit.gram, *start)
    torch.testing.assert_close(key_merge.balanced(1e-9 * fit.gram, *start), (encode, decode))
    assert not key_merge.balanced(fit.gram, 0 * encode, decode)[0].any()
    torch.testing.assert_close(fit.loss(encode, decode), fit.loss(*start))
    shared = to_complex(torch.einsum("gjab,ngjb->nga", encode, sampled.keys))
    keys = to_complex(sampled.keys)
    torch.testing.assert_close(shared.abs().square().sum(0), keys.abs().square().sum(0).mean(1))
    cross = (shared.conj() * keys.mean(2)).sum(0)
    torch.testing.assert_close(cross.imag, torch.zeros_like(cross.imag), rtol=0, atol=1e-9)
    assert (cross.real > 0).all()


def test_pairs_start_from_what_softmax_sees():
    """Keys less what all distances leave of their mean, weighted by the queries' root mean square; that of a
    head without queries is a thousandth of all."""
    sampled = Sampled()
    sampled.queries[:, 0, 0] = 0
    keys, angles = to_complex(sampled.keys), -DISTANCES[:, None] * FREQUENCIES
    steady = torch.polar(torch.ones_like(angles), angles).mean(0) * keys.mean(0)  # [G, D, P]
    gram = torch.einsum("ngip,ngjp->gijp", keys.conj(), keys) / TOKENS
    gram = gram - torch.einsum("gip,gjp->gijp", steady.conj(), steady)
    energy = to_complex(sampled.queries).abs().square().mean(0)
    weights = energy.clamp(min=1e-6 * energy.mean().item()).sqrt()
    expected = [to_matrix(factor) for factor in key_merge.merge_keys(gram, weights)]
    for ours, theirs in zip(key_merge.start_by_pairs(sampled.fit()), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
