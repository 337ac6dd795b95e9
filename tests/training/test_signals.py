"""What asks a training to stop."""

import signal

import pytest

from common.training.engine import signals_noted
from common.training.sharding import joined_ranks


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may run the tests
    with joined_ranks() as ranks:
        yield ranks
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_in_a_step_waits_for_its_end_and_elsewhere_interrupts(ranks, number):
    with signals_noted() as noted:
        signal.raise_signal(number)
        assert noted.is_set()
        noted.clear()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_a_signal_after_the_last_step_is_passed_on(ranks):
    with pytest.raises(KeyboardInterrupt), signals_noted():
        signal.raise_signal(signal.SIGTERM)
