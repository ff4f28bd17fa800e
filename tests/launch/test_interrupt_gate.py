"""Which SIGINT is meant for which call of a rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from nb_accelerate.base.progress_page import ProgressPage, layout
from nb_accelerate.notebook.protocol.messages import NUDGE, Failure
from nb_accelerate.notebook.worker import interrupt
from nb_accelerate.notebook.worker.call import answer
from nb_accelerate.notebook.worker.interrupt import InterruptGate


class Rank:
    """A rank's gate, and its page as the kernel writes to it."""

    def __init__(self) -> None:
        self.memory = bytearray(layout.SIZE)
        self.gate = InterruptGate(ProgressPage(self.memory))
        self.interrupts = 0

    def announce(self, number: int) -> None:
        self.interrupts += 1
        word = number * layout.INTERRUPTS + self.interrupts
        layout.WORD.pack_into(self.memory, 8 * layout.INTERRUPT, word)

    def call(self, *, begun: list[int]) -> None:
        with self.gate:
            self.gate.check()
            begun.append(1)
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def rank() -> Iterator[Rank]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, NUDGE)}
    hook = sys.unraisablehook
    rank = Rank()
    yield rank
    sys.unraisablehook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_signal_alone_is_not_meant_for_the_rank(rank: Rank):
    rank.call(begun=[])
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(NUDGE)


def test_an_interrupt_is_not_meant_for_a_process_that_the_rank_has_forked(rank: Rank):
    with rank.gate:
        rank.announce(1)
        if not (child := os.fork()):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0) == (child, 0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_call_is_interrupted_once_however_often_the_signal_comes(rank: Rank):
    with rank.gate:
        rank.announce(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(NUDGE)
        rank.announce(1)  # the user insists
        with pytest.raises(KeyboardInterrupt):
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


def test_what_travels_with_a_call_that_is_interrupted_before_is_closed_and_not_read(rank: Rank):
    taken: list[int] = []

    def load() -> tuple[Any, Any, Any]:
        taken.append(1)
        return print, (), {}

    reader, writer = os.pipe()
    rank.announce(1)
    message, _ = answer(load, rank.gate, (writer,))
    assert isinstance(message, Failure)
    assert (message.report.type_name, taken) == ("KeyboardInterrupt", [])
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_an_interrupt_that_comes_after_the_end_does_not_hit_the_next_call(rank: Rank):
    rank.call(begun=[])
    rank.announce(1)
    signal.raise_signal(signal.SIGINT)
    rank.announce(1)  # and once more, without a signal
    rank.call(begun=[])


def test_a_nudge_is_an_interrupt_unless_users_handle_those_themselves(rank: Rank):
    with rank.gate:
        rank.announce(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(NUDGE)
        seen: list[int] = []
        signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
        rank.announce(1)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(NUDGE)
        assert seen == [signal.SIGINT]


class Thing:
    pass


def test_an_interrupt_that_hits_where_python_drops_it_comes_with_the_next_nudge(
    rank: Rank, capsys: pytest.CaptureFixture[str]
):
    with rank.gate:
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        rank.announce(1)
        del thing
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(NUDGE)
        signal.raise_signal(NUDGE)
    del reference
    assert capsys.readouterr().err == ""


def test_what_else_is_dropped_is_told_as_ever(rank: Rank, monkeypatch: pytest.MonkeyPatch):
    told: list[Any] = []
    monkeypatch.setattr(rank.gate, "_previous_hook", lambda dropped: told.append(dropped.exc_type))
    for error in (ValueError, KeyboardInterrupt):
        thing = Thing()
        weakref.finalize(thing, (_ for _ in ()).throw, error)
        del thing
    assert told == [ValueError, KeyboardInterrupt]
    rank.call(begun=[])


def of_a_loop(function: Callable[[], Any]) -> Callable[[], Any]:
    """The same function, as if it stood in a module of asyncio."""
    return types.FunctionType(function.__code__, {**globals(), "__name__": "asyncio.somewhere"})


@of_a_loop
def is_hit_in_the_loop() -> None:
    signal.raise_signal(signal.SIGINT)


def test_between_two_steps_of_tasks_an_interrupt_waits_for_the_next_round(rank: Rank):
    steps: list[int] = []

    async def goes_on() -> None:
        is_hit_in_the_loop()
        steps.append(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        steps.append(2)

    rank.announce(1)
    with closing(asyncio.new_event_loop()) as loop, rank.gate:
        task = loop.create_task(goes_on())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        assert steps == [1]
        loop.run_until_complete(task)  # it can be cancelled, or go on
        assert steps == [1, 2]


def test_a_signal_that_comes_while_one_is_handled_waits_for_the_next_round_too(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
):
    if hasattr(asyncio, "_nest_patched"):
        pytest.skip("loops that jupyter_client 7 has patched, in an earlier test, end a round earlier")
    steps: list[int] = []

    async def goes_on() -> None:
        is_hit_in_the_loop()
        steps.append(1)

    def once_more(fd: int, size: int, *, test: Any) -> bytes:
        test.patch.undo()
        test.raise_signal(test.NUDGE)
        return bytes(test.read(fd, size))

    rank.announce(1)
    # Its frame is one of the module's, like those in which a signal may come while another is being handled.
    read = types.FunctionType(once_more.__code__, vars(interrupt))
    test = types.SimpleNamespace(patch=monkeypatch, raise_signal=signal.raise_signal, NUDGE=NUDGE, read=os.read)
    read.__kwdefaults__ = {"test": test}
    monkeypatch.setattr(interrupt, "os", types.SimpleNamespace(**{**vars(os), "read": read}))
    with closing(asyncio.new_event_loop()) as loop, rank.gate:
        task = loop.create_task(goes_on())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        assert steps == [1]


def test_what_a_loop_could_not_raise_any_more_is_raised_by_a_nudge(rank: Rank):
    rank.announce(1)
    with closing(asyncio.new_event_loop()) as loop, rank.gate:
        loop.call_soon(is_hit_in_the_loop)
        loop.call_soon(loop.stop)
        loop.run_forever()  # the round in which it was hit is the last
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(NUDGE)
