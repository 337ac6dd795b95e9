"""What asks a training to stop: signals, also those that get lost, and output that is closed."""

import signal
import sys

import pytest
import torch

from common.training import sharding
from common.training.engine import signals_noted
from common.training.sharding import Ranks, joined_ranks


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may run the tests
    with joined_ranks() as ranks:
        yield ranks
    signal.signal(signal.SIGHUP, before)
    sharding.pending_signals.clear()


class Full:
    """Output whose reader has left, or whose disk is full."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_in_a_step_waits_for_its_end_and_elsewhere_interrupts(ranks, number):
    with signals_noted():
        signal.raise_signal(number)
        assert sharding.pending_signals == [number]
        sharding.pending_signals.clear()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_a_signal_after_the_last_step_is_passed_on(ranks):
    with pytest.raises(KeyboardInterrupt), signals_noted():
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_a_garbage_collection_loses_stops_the_next_step(ranks):
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)  # its exception is printed and ignored

    Finalized()
    assert sharding.pending_signals == [signal.SIGTERM]


def test_output_that_is_closed_is_a_terminal_that_hangs_up(ranks, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    with signals_noted():
        Ranks(1, 2, torch.device("cpu")).say("of another rank")
        assert not sharding.pending_signals
        ranks.say("step 1")
        assert sharding.pending_signals == [signal.SIGHUP]
        sharding.pending_signals.clear()


def test_under_nohup_nobody_listens_and_training_goes_on(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with joined_ranks() as ranks, signals_noted():
            monkeypatch.setattr(sys, "stdout", Full())
            ranks.say("step 1")
            assert not sharding.pending_signals
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_memory_is_freed_interrupts_after_that(ranks, monkeypatch):
    monkeypatch.setattr(sharding.gc, "collect", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        sharding.free_memory(ranks)
