"""Packing changes the speed and nothing else: no attention across samples, the same loss and gradient."""

from dataclasses import replace

import pytest
import torch

from common.data.rows import Sample
from common.method.losses import cross_entropy
from common.training.attention import Trainee
from common.training.engine import Schedule
from common.training.packing import batch_indices, build_row, pack, rows_of_step, split_over_ranks
from common.training.sharding import Ranks
from models import tiny_model
from reference import ALONE, SCHEDULE, random_samples


def schedule(capacity: int) -> Schedule:
    """Steps of 8 samples in rows of `capacity` tokens."""
    return replace(SCHEDULE, steps=10, batch=8, tokens_per_microbatch=capacity)


def test_pack_holds_everything_once_and_within_capacity():
    lengths = [len(sample) for sample in random_samples(200)]
    rows = pack(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    assert len(rows) <= 1.2 * sum(lengths) / 64 + 1
    assert pack([100, 5], 64) == [[0], [1]]  # longer than a row: a row of its own
    assert pack([40, 24, 24, 40], 64) == [[0, 1], [3, 2]]  # what fits exactly fits


def test_batches_are_shuffled_epochs():
    """Of 30 samples in batches of 7: the fifth ends one pass and begins the next."""
    seen = [i for step in range(9) for i in batch_indices(step, 7, 30, seed=1)]
    assert sorted(seen[:30]) == sorted(seen[30:60]) == list(range(30))
    assert seen[:30] != seen[30:60]
    again, other = (batch_indices(3, 7, 35, seed) for seed in (1, 2))
    assert batch_indices(3, 7, 35, seed=1) == again != other
    assert sorted(batch_indices(0, 5, 5, 2**63 - 1)) == [0, 1, 2, 3, 4]  # huge seeds are as good as others


def test_weights_stand_where_tokens_are_predicted():
    """A text is all prompt; a chat's mean over answer tokens runs over all of its answers."""
    text, chat = Sample((1, 2, 3)), Sample((4, 5), (6,), (7,), (8, 9, 10))
    row = build_row([text, chat], batch=2)
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]]
    assert row.targets.tolist() == [2, 3, 0, 5, 6, 7, 8, 9, 10, 0]
    assert row.prompt_weight.tolist() == [0.25, 0.25, 0, 0.25, 0, 0.25, 0, 0, 0, 0]
    assert row.answer_weight.tolist() == [0, 0, 0, 0, 0.125, 0, 0.125, 0.125, 0.125, 0]
    torch.testing.assert_close(row.all_weight, torch.tensor([0.25, 0.25, 0] + [1 / 12] * 6 + [0]))
    assert (row.prompt_at.tolist(), row.answer_at.tolist()) == ([0, 1, 3, 5], [4, 6, 7, 8])
    assert row.starts.tolist() == [0, 3, 10] and row.starts.dtype == torch.int32
    assert row.lengths == (3, 7) == (len(text), len(chat)) and chat.answer_tokens == 4


def test_packed_gradient_equals_one_sample_at_a_time():
    """As attention does not cross samples."""
    gradients = []
    for capacity in (1, 64, 10_000):
        trainee = Trainee(tiny_model(attn_implementation="packed"))
        for row in rows_of_step(random_samples(8), 0, schedule(capacity), ALONE):
            logits = trainee.net.lm_head(trainee(row))
            (cross_entropy(logits, row.targets) * row.answer_weight).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainee.parameters()]))
    alone, *packed = gradients
    close = 1e-5 * float(alone.abs().max()) + 1e-7
    for gradient in packed:
        torch.testing.assert_close(gradient, alone, rtol=1e-3, atol=close)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_a_step(world):
    """Together the ranks hold each predicted token's weight once; those with fewer rows get idle ones."""
    samples, steps, rows = random_samples(20), schedule(32), []
    shares = split_over_ranks(samples, 2, steps, world)
    packed = [pack([len(samples[i]) for i in share], 32) for share in shares]
    most = max(map(len, packed))
    for rank, busy in enumerate(map(len, packed)):
        share = rows_of_step(samples, 2, steps, Ranks(rank, world, torch.device("cpu")))
        assert [row.is_idle for row in share] == [False] * busy + [True] * (most - busy)
        rows += share
    assert any(row.is_idle for row in rows) == (world > 2)  # of this seed
    for weight in ("prompt_weight", "answer_weight", "all_weight"):
        assert sum(float(getattr(row, weight).sum()) for row in rows) == pytest.approx(1, abs=1e-5)
        assert not any(getattr(row, weight).any() for row in rows if row.is_idle)
    assert all(row.input_ids.numel() for row in rows)


@pytest.mark.parametrize("world", [1, 8, 16])
def test_ranks_get_equally_many_tokens(world):
    """Of lengths as those of the eight tasks; a rank with one long sample alone has as many as that has."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.empty(4000).exponential_(1 / 96, generator=generator) + 24).clamp(max=480).int().tolist()
    samples = [Sample((1,) * length, (2,)) for length in lengths]
    for step in range(20):
        shares = split_over_ranks(samples, step, replace(schedule(4096), batch=64), world)
        tokens = [sum(len(samples[i]) for i in share) for share in shares]
        assert max(tokens) <= max(1.1 * sum(tokens) / world, *(len(samples[i]) for i in sum(shares, [])))
