"""What a request does, on ranks that are no processes of this machine: the loop knows nothing but their handles."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import signal
import struct
import threading
import time
from typing import Any

import pytest
from fixtures.actor_ranks import RESULT, SOON, ActorRank, Cell, begin, failure
from fixtures.deadlines import expire

from nb_accelerate.base.progress_page.layout import Phase
from nb_accelerate.base.progress_page.page import ProgressPage
from nb_accelerate.errors import DeadlineError, PoolError
from nb_accelerate.notebook.ranks.failing.errors import error_of
from nb_accelerate.notebook.ranks.failing.incidents import Wording
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
from nb_accelerate.notebook.ranks.proxy import RankProxy
from nb_accelerate.notebook.ranks.request import Awaits, Request
from nb_accelerate.notebook.ranks.steps import call_steps, cell_steps, quit_steps
from nb_accelerate.notebook.ranks.timeouts import NEVER, Timeouts


def test_ranks_of_any_kind_answer_print_and_leave(loop: RankLoop) -> None:
    cell = Cell()
    loop.output = RequestOutput([0, 1], cell)
    request = begin(loop, [ActorRank(rank, RESULT) for rank in range(2)], call_steps(SOON))
    loop.run(request)
    assert (sorted(request.answers), request.incidents, error_of(request)) == ([0, 1], [], None)
    leaving = Request(
        ranks=request.ranks,
        send=RankProxy.quit,
        steps=quit_steps(SOON, seconds=20.0),
        wording=Wording(),
        awaits=Awaits.END,
    )
    loop.begin(leaving)
    loop.run(leaving)
    loop.output.finish()
    assert [rank.handle.exitcode for rank in request.ranks] == [0, 0]
    assert sorted(cell.text.splitlines()) == ["[rank 0] rank 0", "[rank 1] rank 1"]


def test_a_launch_that_fails_takes_the_steps_of_its_table_until_every_rank_has_ended(loop: RankLoop) -> None:
    fails = ActorRank(1, failure("First", time.monotonic()))
    hang = [ActorRank(rank, None, ends_on=["kill"]) for rank in (0, 2)]
    request = begin(loop, [hang[0], fails, hang[1]], call_steps(SOON))
    loop.run(request)
    assert [rank.verbs for rank in hang] == [["dump_stacks", "interrupt", "terminate", "kill"]] * 2
    assert "rank 1 raised First" in str(error_of(request))


def test_failures_other_than_the_first_are_told_beside_it(loop: RankLoop) -> None:
    failures = [failure("First", 1.0), failure("Second", 2.0), failure("First", 3.0)]
    request = begin(loop, [ActorRank(rank, answer) for rank, answer in enumerate(failures)], call_steps(SOON))
    loop.run(request)
    error = error_of(request)
    assert "rank 0 raised First" in str(error)
    assert re.findall(r"Rank (\d) .*: (\w+)", "".join(error.__notes__)) == [("1", "Second")]


def cut(rank: RankProxy) -> None:
    assert isinstance(rank.handle, ActorRank)
    rank.handle.told("cut")


@pytest.mark.parametrize(("interrupts", "verbs"), [(1, []), (2, ["kill"])])
def test_a_rank_of_a_pool_is_killed_only_if_the_user_insists(loop: RankLoop, interrupts: int, verbs: list[str]) -> None:
    hangs = ActorRank(0, None, ends_on=["kill"])
    steps = cell_steps(Timeouts(interrupt=0.02, cut=0.02, kill=20.0), cut)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        loop.post(insist if interrupts > 1 else lambda: hangs.end(0))

    def insist() -> None:
        loop.interrupt(request)

    request = begin(loop, [hangs], steps, say=say)
    loop.interrupt(request)
    loop.run(request)
    assert hangs.verbs == ["interrupt", "cut", *verbs]
    assert "rank 0 runs C" in said[0]
    assert isinstance(error_of(request), KeyboardInterrupt)


@pytest.mark.parametrize("insists", [False, True])
@pytest.mark.parametrize(("steps", "last"), [(call_steps(SOON), ["kill"]), (cell_steps(SOON, cut), ["cut", "kill"])])
def test_an_interrupt_leaves_ranks_the_time_to_save_unless_the_user_insists(
    loop: RankLoop, steps: Any, last: list[str], insists: bool
) -> None:
    handle = ActorRank(0, None, ends_on=["kill"])
    saves = ProgressPage(handle.page.buffer)
    saves.begin_request()
    saves.enter(Phase.SAVING)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        loop.post((lambda: loop.interrupt(request)) if insists else (lambda: handle.there.send(RESULT)))

    request = begin(loop, [handle], steps, say=say)
    loop.interrupt(request)
    loop.run(request)
    assert handle.verbs == ["interrupt", *(last if insists else [])]
    assert said == ["rank 0 is saving. Interrupt once more not to wait"]


@pytest.mark.parametrize("insists", [False, True])
def test_a_failure_leaves_ranks_the_time_to_save_in_the_background(loop: RankLoop, insists: bool) -> None:
    fails, saves = ActorRank(1, failure("First", 1.0)), ActorRank(2, None, ends_on=["terminate"])
    page = ProgressPage(saves.page.buffer)
    page.begin_request()
    page.save_in_background(True)
    del page  # it holds on to the memory, which is closed at the end
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        loop.post((lambda: loop.interrupt(request)) if insists else end_of_save)

    def end_of_save() -> None:
        ProgressPage(saves.page.buffer).save_in_background(False)

    request = begin(loop, [ActorRank(0, RESULT), fails, saves], call_steps(SOON), say=say)
    loop.run(request)
    assert saves.verbs == ["dump_stacks", "interrupt", "terminate"]
    assert said == ["rank 2 is saving. Interrupt not to wait"]
    assert ("interrupted" if insists else "rank 1 raised First") in str(error_of(request))


def test_an_interrupt_says_where_a_rank_was_that_c_code_keeps_from_answering(loop: RankLoop) -> None:
    class InC(ActorRank):
        def dump_stacks(self, *, by_signal: bool = False) -> None:
            super().dump_stacks(by_signal=by_signal)
            os.write(self.write_ends[2], b'Thread 0x1 (most recent call first):\n  File "/srv/a.py", line 3 in train\n')
            os.write(self.write_ends[2], b'  File "<string>", line 1 in <module>\n')

    handle = InC(0, None)
    request = begin(loop, [handle], call_steps(Timeouts(interrupt=20.0)))
    loop.interrupt(request)

    def end(_: RankLoop) -> None:
        if request.stacks:
            handle.end(-signal.SIGKILL)

    loop.observers.append(end)
    try:
        loop.run(request)
    finally:
        loop.observers.remove(end)
    assert handle.verbs == ["interrupt", "dump_stacks"]
    assert error_of(request).__notes__ == ["Rank 0 was in train, /srv/a.py:3"]


def test_ranks_that_do_not_answer_in_time_are_named(loop: RankLoop) -> None:
    handles = [ActorRank(0, RESULT), ActorRank(1, None, ends_on=["terminate"])]
    request = begin(loop, handles, call_steps(SOON), timeout=600.0)

    def act(_: RankLoop) -> None:
        if 0 in request.answers and not request.incidents:
            expire(request)

    loop.observers.append(act)
    try:
        loop.run(request)
    finally:
        loop.observers.remove(act)
    error = error_of(request)
    assert isinstance(error, DeadlineError)
    assert str(error) == "the call took longer than 600 s; rank 1 had not finished"


def test_the_error_about_a_rank_whose_message_cannot_be_read_keeps_the_cause(loop: RankLoop) -> None:
    handle = ActorRank(0, None, ends_on=["kill"])
    request = begin(loop, [handle], call_steps(SOON))
    no_pickle = b"no pickle"
    handle.there._socket.sendall(struct.pack("!QB?", len(no_pickle), 0, False) + no_pickle)
    loop.run(request)
    error = error_of(request)
    assert "cannot be read (UnpicklingError" in str(error)
    assert isinstance(error.__cause__, pickle.UnpicklingError)


def test_a_rank_that_prints_faster_than_it_is_read_answers_all_the_same() -> None:
    class PrintsMore(Cell):
        def write(self, stream: str, text: str) -> None:
            with contextlib.suppress(IndexError):  # the rank has ended
                os.write(handle.write_ends[0], b"more\n")

    loop = RankLoop()
    loop.start()
    cell = PrintsMore()
    handle = ActorRank(0, RESULT)
    loop.output = RequestOutput([0], cell)
    request = begin(loop, [handle], call_steps(SOON), has_thread=True)
    try:
        assert request.done.wait(20)
    finally:
        handle.end(0)
        loop.close()


def test_a_request_whose_answer_is_read_when_its_time_is_over_is_done_at_once(loop: RankLoop) -> None:
    handle = ActorRank(0, RESULT)
    request = begin(loop, [handle], call_steps(SOON), timeout=600.0)
    assert select.select([handle.channel], [], [], 20.0)[0], "the answer has come, and was not read"
    expire(request)
    loop.run(request)
    assert request.incidents == []


def test_a_loop_that_is_closed_while_a_deadline_is_due_ends(caplog: pytest.LogCaptureFixture) -> None:
    class ClosesLoop(Cell):
        """Has the loop closed by another thread, once, at a moment when something is due."""

        @property
        def due(self) -> float:
            if not closing and threading.current_thread() is loop._thread:
                closing.append(threading.Thread(target=loop.close))
                closing[0].start()
                assert posted.wait(20)
                return 0.0
            return NEVER

        @due.setter
        def due(self, _: float) -> None:
            pass

    def post(*given: Any) -> None:
        original(*given)
        posted.set()

    closing: list[threading.Thread] = []
    posted = threading.Event()
    loop = RankLoop()
    original, loop.post = loop.post, post
    cell = ClosesLoop()
    loop.output = RequestOutput([0], cell)
    loop.start()
    assert loop.posted.ended.wait(20)
    closing[0].join()
    assert not caplog.records


@pytest.mark.parametrize("how", ["read_end", "pid"])
def test_a_request_ends_with_the_loop_that_carries_it(how: str) -> None:
    loop = RankLoop()
    loop.start()
    handle = ActorRank(0, None)
    request = begin(loop, [handle], call_steps(SOON), has_thread=True)

    def fail() -> None:
        raise MemoryError(how)

    loop.post(fail)
    assert request.done.wait(20)
    with pytest.raises(PoolError, match=f"MemoryError: {how}"):
        raise error_of(request) or AssertionError
    assert handle.verbs[-1] == "kill"
    loop.close()
    refused = []
    loop.post(fail, lambda: refused.append("late"))
    assert refused == ["late"]


@pytest.mark.parametrize("has_thread", [False, True])
def test_an_interrupt_just_before_a_rank_is_read_closes_it_and_leaves_the_loop_whole(
    loop: RankLoop, monkeypatch: pytest.MonkeyPatch, has_thread: bool
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    if has_thread:
        loop.start()
    handle = ActorRank(0, RESULT)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_do", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.add(RankProxy(handle))
    if has_thread:
        loop._do(lambda: None)
    else:
        while handle.channel.fileno() >= 0:
            loop.wait_once()
    assert handle.channel.fileno() < 0
    assert loop.failure is None
