"""What asks a training to stop: signals, also those that get lost, and output that is closed."""

import os
import signal
import sys

import pytest
import torch

from common.errors import UserError
from common.training import checkpoints, sharding
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_a_garbage_collection_loses_stops_the_next_step(ranks):
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)  # its exception is printed and ignored

    Finalized()
    with signals_noted():
        assert sharding.pending_signals == [signal.SIGTERM]
        sharding.pending_signals.clear()


def test_output_that_is_closed_is_a_terminal_that_hangs_up(ranks, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    with signals_noted():
        ranks.say("step 1")
        assert sharding.pending_signals == [signal.SIGHUP]
        sharding.pending_signals.clear()
        Ranks(1, 2, torch.device("cpu")).say("of another rank")
        assert not sharding.pending_signals


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
    try:
        with pytest.raises(KeyboardInterrupt):
            sharding.free_memory(ranks)
    finally:
        sharding.pending_signals.clear()


def test_a_training_takes_no_directory_of_someone_else(ranks, tmp_path):
    directory = tmp_path / "teacher.train"
    directory.mkdir()
    checkpoints.begin(str(directory), {"steps": 1}, ranks)
    (directory / "notes.txt").write_text("mine")
    checkpoints.begin(str(directory), {"steps": 1}, ranks)  # beside a training they disturb nothing
    assert checkpoints.own_files(str(directory)) == ["settings.json"]
    checkpoints.remove_training(str(directory))
    assert os.listdir(directory) == ["notes.txt"]
    (directory / "metrics.jsonl").write_text("mine")
    with pytest.raises(UserError, match="training with its settings.json, found metrics.jsonl; move it away"):
        checkpoints.begin(str(directory), {"steps": 1}, ranks)
