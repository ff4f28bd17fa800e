"""Which SIGINT is meant for which call of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from nb_accelerate.worker.ends import NUMBER
from nb_accelerate.worker.interrupt import InterruptGate


class Rank:
    """A rank's gate, and the kernel's end of its pipe."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.gate = InterruptGate(self.read)

    def announce(self, number: int) -> None:
        os.write(self.write, NUMBER.pack(number))

    def call(self, *, begun: list[int]) -> None:
        with self.gate.open():
            begun.append(1)
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def rank() -> Iterator[Rank]:
    handler = signal.getsignal(signal.SIGINT)
    rank = Rank()
    yield rank
    signal.signal(signal.SIGINT, handler)
    os.close(rank.read)
    os.close(rank.write)


def test_a_signal_alone_is_not_meant_for_the_rank(rank: Rank):
    rank.call(begun=[])
    signal.raise_signal(signal.SIGINT)


def test_a_call_is_interrupted_once_however_often_the_signal_comes(rank: Rank):
    with rank.gate.open():
        rank.announce(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    rank.call(begun=[])


def test_a_call_that_has_not_begun_is_interrupted_as_it_begins(rank: Rank):
    begun: list[int] = []
    rank.call(begun=begun)
    rank.announce(2)
    signal.raise_signal(signal.SIGINT)  # while it is idle
    with pytest.raises(KeyboardInterrupt):
        rank.call(begun=begun)
    assert begun == [1]
    rank.call(begun=begun)


def test_an_interrupt_that_comes_after_the_end_does_not_hit_the_next_call(rank: Rank):
    rank.call(begun=[])
    rank.announce(1)
    signal.raise_signal(signal.SIGINT)
    rank.announce(1)  # and once more, without a signal
    rank.call(begun=[])
