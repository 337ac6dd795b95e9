"""The training loop of every phase: rates, clipping, signals, checkpoints by the clock, metrics."""

import itertools
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.data.rows import Sample
from common.run.errors import UserError
from common.training import checkpoints, engine
from common.training.attention import Trainee
from common.training.checkpoints import saved_checkpoints
from common.training.engine import Job, Schedule, Step, steps
from common.training.lines import METRICS, read_metrics, summarize
from common.training.metrics import Metrics
from common.training.packing import rows_of_step, split_over_ranks
from common.training.sharding import Ranks, joined_ranks
from models import save_tiny, tiny_model
from reference import SCHEDULE, built, half_masked_student

SAMPLES = [Sample((1, 2), (3,)), Sample((4, 5, 6), (7,))]


def schedule_of(count: int, **changes) -> Schedule:
    return replace(SCHEDULE, **{"steps": count, "batch": 1, "print_every": 1} | changes)


def train_squares(job: Job, schedule: Schedule, loss=lambda hidden: hidden.square().mean()) -> bool:
    """Train on a loss that needs no teacher. Returns False if a signal stopped it."""
    for step in steps(job, schedule, SAMPLES):
        for row in step.rows:
            step.backward(loss(job.trainee(row)))
        step.update()
    return not job.stopped


@pytest.fixture
def job(group_of_one, tmp_path) -> Job:
    """A job for train_squares."""
    trainee = built(save_tiny(tmp_path / "model"), group_of_one)
    optimizer = torch.optim.SGD([{"params": list(trainee.parameters()), "initial_lr": 1e-3}])
    (tmp_path / "train").mkdir()
    return Job(trainee, optimizer, str(tmp_path / "train"), group_of_one)


@pytest.mark.parametrize("rank, changes, expected", [
    (0, {"save_minutes": 1.5}, [2, 4, 5]), (0, {"save_steps": 2}, [2, 4, 5]), (1, {"save_minutes": 1.5}, [5]),
])  # fmt: skip
def test_a_checkpoint_restarts_the_clock_of_the_first_rank(job, monkeypatch, rank, changes, expected):
    """A step takes a minute. The other ranks' clocks decide nothing."""
    saved, ticks = [], itertools.count()
    job.ranks = Ranks(rank, 1 + rank, torch.device("cpu"))
    clock = SimpleNamespace(perf_counter=lambda: 60 * job.step + 0.01 * next(ticks))
    monkeypatch.setattr(engine, "time", clock)
    monkeypatch.setattr(engine.checkpoints, "save", lambda job: saved.append(job.step))
    assert train_squares(job, schedule_of(5, batch=2, **changes))
    assert saved == expected


def lonely_rank(monkeypatch) -> tuple[Step, torch.nn.Parameter]:
    """The second rank of two, at a step whose gradient is 1 per unit of loss; sums are twice its own."""
    weight = torch.nn.Parameter(torch.tensor(3.0))
    trainee = SimpleNamespace(net=torch.nn.ParameterList([weight]))
    optimizer = torch.optim.SGD([{"params": [weight], "initial_lr": 0.1}], lr=0.1)
    job = Job(trainee, optimizer, "", Ranks(1, 2, torch.device("cpu")), step=4)
    monkeypatch.setattr(engine.dist, "all_reduce", lambda tensor: tensor.mul_(2))
    monkeypatch.setattr(engine.dist, "all_gather_object",
                        lambda into, loss: into.__setitem__(slice(None), [1.0, loss]))
    return Step(job, schedule_of(5, clip=0.0, batch=3), [], SAMPLES), weight


def test_a_step_sums_the_rows_of_all_ranks(monkeypatch):
    """FSDP averages gradients over ranks: each rank's are scaled by their number, its loss is not."""
    step, weight = lonely_rank(monkeypatch)
    for factor in (1.0, 5.0):
        step.backward(factor * weight, kl=torch.tensor(1e8 * factor + 1))
    assert float(weight.grad) == 2 * 6
    assert all(total.dtype == torch.float64 for total in step.totals.values())
    step.update(own=torch.tensor([1.0, 2.0]), other=7)
    assert step.metrics["loss"] == 2 * 18 and step.metrics["kl"] == pytest.approx(12e8 + 4, abs=65)
    assert (step.metrics["own"], step.metrics["other"]) == ([1.0, 2.0], 7)
    assert float(weight.detach()) == pytest.approx(3 - 0.1 * 12) and weight.grad is None


def test_a_loss_that_is_not_finite_is_named_by_rank_and_samples(monkeypatch):
    """Also where its gradient is finite."""
    step, weight = lonely_rank(monkeypatch)
    step.backward(weight + math.inf)
    shares = [split_over_ranks(SAMPLES, number, schedule_of(5, batch=3), world=2) for number in (4, 5)]
    assert shares[0] != shares[1]  # of this step, not of the next
    samples = re.escape(str(shares[0][1]))
    message = rf"step 5: expected a finite loss, found rank 1: loss inf, samples {samples}; the last"
    with pytest.raises(UserError, match=message):
        step.update()
    assert float(weight.detach()) == 3


def test_the_loop_trains_with_the_scheduled_rate_and_clipped_gradients(job):
    """Three steps of torch's SGD on the same batches, each sample in a row of its own."""
    reference = Trainee(tiny_model(attn_implementation="packed"))
    optimizer = torch.optim.SGD(reference.parameters())
    schedule = schedule_of(3, clip=0.5, warmup=2, batch=2, tokens_per_microbatch=1)
    assert train_squares(job, schedule)
    lines = read_metrics(str(Path(job.directory, METRICS)))
    for step, line in zip(range(3), lines, strict=True):
        optimizer.zero_grad()
        loss = sum(reference(row).square().mean() for row in rows_of_step(SAMPLES, step, schedule, job.ranks))
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(reference.net.parameters(), 0.5))
        assert norm > 0.5 and line["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert line["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert line["lr"] == pytest.approx(1e-3 * schedule.rate(step))
        optimizer.param_groups[0]["lr"] = line["lr"]
        optimizer.step()
    for ours, theirs in zip(job.trainee.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_in_a_step_waits_for_its_end_and_elsewhere_interrupts(number):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may run the tests
    with joined_ranks():
        with engine.signals_noted() as noted:
            signal.raise_signal(number)
            noted.clear()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt), engine.signals_noted():  # after the last step it is passed on
            signal.raise_signal(number)
    signal.signal(signal.SIGHUP, before)


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    schedule = schedule_of(100, warmup=10)
    shares = [schedule.rate(step) for step in range(101)]
    assert shares[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    assert shares[55] == pytest.approx(0.5)  # halfway
    assert shares[100] == pytest.approx(0) and shares[99] > 0


def test_no_clipping_leaves_gradients_as_they_are():
    trainee = Trainee(tiny_model(), {"log_alpha": torch.zeros(2)})
    for parameter in trainee.parameters():
        parameter.grad = torch.ones_like(parameter)
    size = sum(parameter.numel() for parameter in trainee.net.parameters())
    assert float(engine.clip_gradients(trainee, 0)) == pytest.approx(size**0.5, rel=1e-4)
    assert all((parameter.grad == 1).all() for parameter in trainee.parameters())
    engine.clip_gradients(trainee, 1.0)
    norm = sum(float(parameter.grad.square().sum()) for parameter in trainee.net.parameters()) ** 0.5
    assert norm == pytest.approx(1, rel=1e-3) and (trainee.replicated["log_alpha"].grad == 1).all()


@pytest.mark.parametrize("loss, rate, message", [
    (lambda hidden: (0 * hidden).abs().sum().sqrt(), 0.1,  # finite where its gradient is not
     r"step 1: expected a finite loss, found a gradient of norm nan, samples \[[01]\]"),
    (lambda hidden: (0 * hidden).sum(), 0.1, "step 1: expected a gradient, found zeros: nothing to"),
    (lambda hidden: hidden.square().mean(), 1e38, "step 1: expected finite weights, found NaN or Inf"),
])  # fmt: skip
def test_what_is_not_finite_or_zero_stops_before_it_is_saved(job, loss, rate, message):
    job.optimizer.param_groups[0]["initial_lr"] = rate
    before = [parameter.full_tensor().clone() for parameter in job.trainee.parameters()]
    with pytest.raises(UserError, match=message):
        train_squares(job, schedule_of(1), loss)
    after = [parameter.full_tensor() for parameter in job.trainee.parameters()]
    assert all(map(torch.equal, before, after)) == (rate < 1) and not saved_checkpoints(job.directory)


def test_a_rank_whose_launcher_is_gone_saves_and_stops(job, monkeypatch):
    monkeypatch.setattr(engine, "PARENT", os.getppid() + 1)
    assert train_squares(job, schedule_of(2))  # not under torchrun: a shell may exit before its job

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    job.step = 0
    assert not train_squares(job, schedule_of(3))
    assert job.step == 1 and checkpoints.step_of(saved_checkpoints(job.directory)[0]) == 1


def test_masks_may_change_alone(group_of_one, tmp_path):
    """A masked student may start as its teacher: only Eq. 29 has a gradient then."""
    job = half_masked_student(group_of_one, tmp_path).job
    step = Step(job, schedule_of(1), [], SAMPLES)
    step.backward(job.trainee.replicated["log_alpha"].sum())
    step.update()
    assert step.metrics["grad_norm"] == 0


def test_metrics_after_the_checkpoint_are_dropped_on_resume(job):
    """A kill between two checkpoints leaves lines of steps that are trained again."""
    path = Path(job.directory, METRICS)
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    job.step = 2
    Metrics(job, schedule_of(4)).close()
    assert read_metrics(str(path)) == [{"step": 1}, {"step": 2}]


def test_the_summary_of_a_training():
    first = {"loss": 3.0, "tokens": 3.0, "start_heldout_kl": 0.2}
    last = {"loss": 1.0, "tokens": 4.0, "heldout_kl": 0.1}
    expected = {**first, **last, "tokens": 11, "open_masks": 2}
    assert summarize([first, last | {"open_masks": 2}, last]) == expected
