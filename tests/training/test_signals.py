"""What asks a training to stop: signals, also those that get lost."""

import signal

import pytest

from common.training import sharding
from common.training.engine import signals_noted
from common.training.sharding import joined_ranks


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may run the tests
    with joined_ranks() as ranks:
        yield ranks
    signal.signal(signal.SIGHUP, before)
    sharding.pending_signals.clear()


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


def test_a_signal_while_memory_is_freed_interrupts_after_that(ranks, monkeypatch):
    monkeypatch.setattr(sharding.gc, "collect", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        sharding.free_memory(ranks)
