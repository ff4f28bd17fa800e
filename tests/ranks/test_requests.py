"""What a request does, on ranks that are no processes of this machine: the loop knows nothing but their handles."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.deadlines import observing
from fixtures.ranks import RunRanks

from nb_accelerate.diagnostics.stacks import DUMP_SIGNAL, where
from nb_accelerate.errors import DeadlineError, PoolError, RankDiedError
from nb_accelerate.launch import Launch, notebook_launcher
from nb_accelerate.pool.ending import cell_steps, wording
from nb_accelerate.pool.rank import PoolRank
from nb_accelerate.progress_page import PageReader
from nb_accelerate.progress_page.layout import Phase
from nb_accelerate.progress_page.page import ProgressPage
from nb_accelerate.protocol.channel import Channel
from nb_accelerate.protocol.messages import Call, ErrorReport, Failure, Parcel, Quit, Ready, Result
from nb_accelerate.ranks import hang, proxy
from nb_accelerate.ranks.failures import Incident, IncidentKind, Wording, death, error_of, first_cause
from nb_accelerate.ranks.guard import GuardedOutput
from nb_accelerate.ranks.handle import RankHandle
from nb_accelerate.ranks.hang import HangWatch
from nb_accelerate.ranks.loop import RankLoop
from nb_accelerate.ranks.panel import RequestView
from nb_accelerate.ranks.proxy import RankProxy
from nb_accelerate.ranks.request import Awaits, Request
from nb_accelerate.ranks.request_output import RequestOutput
from nb_accelerate.ranks.sinks import Sink
from nb_accelerate.ranks.status import locate_ranks
from nb_accelerate.ranks.steps import call_steps, quit_steps
from nb_accelerate.ranks.timeouts import NEVER, Timeouts

SOON = Timeouts(ask=0.02, cause=0.0, interrupt=0.02, unwind=0.02, cut=0.02, wait=0.02, terminate=0.02, kill=0.02)


class ActorRank(RankHandle):
    """A rank that is a thread, as one of an engine would be: a channel, streams, an end, and verbs.

    Args:
        rank: its number.
        answer: to a call; None if it never answers.
        ends_on: verbs that end it.

    Attributes:
        verbs: what it was told to do.
    """

    def __init__(self, rank: int, answer: Result | Failure | None, *, ends_on: Sequence[str] = ()) -> None:
        self.rank = self.local_rank = rank
        self.mark = b"a mark of 16 b.."
        self.page = PageReader()
        self.channel, there = Channel.pair()
        self.verbs: list[str] = []
        self._there = Channel(there)
        self._answer = answer
        self._ends_on = ends_on
        self._pid: int | None = None
        pipes = [os.pipe() for _ in range(4)]
        self.stdout, self.stderr, self.stacks, self.status = (read for read, _ in pipes)
        for fd in (self.stdout, self.stderr, self.stacks, self.status):
            os.set_blocking(fd, False)
        self._ends = [write for _, write in pipes]
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # the test has closed the other end
            self._there.send(Ready(pid=0))
            while True:
                message = self._there.recv().message
                if isinstance(message, Quit):
                    self._end(0)
                elif isinstance(message, Call) and self._answer is not None:
                    os.write(self._ends[0], f"rank {self.rank}\n".encode())
                    self._there.send(self._answer)

    def _end(self, exitcode: int) -> None:
        with self._lock:
            if self._ends:
                self._code = exitcode
                for fd in self._ends:
                    os.close(fd)
                self._ends = []

    def _told(self, verb: str) -> None:
        self.verbs.append(verb)
        if verb in self._ends_on:
            self._end(-signal.SIGKILL)

    @property
    def pid(self) -> int | None:
        return self._pid

    @pid.setter
    def pid(self, pid: int) -> None:
        self._pid = pid

    def ask(self, message: Any, fds: Sequence[int] = ()) -> None:
        self.channel.send(message, fds)

    def interrupt(self) -> None:
        self._told("interrupt")

    def nudge(self) -> None:
        pass

    def dump_stacks(self, *, by_signal: bool = False) -> None:
        if "dump_stacks" not in self.verbs:
            self._told("dump_stacks")

    def terminate(self) -> None:
        self._told("terminate")

    def kill(self) -> None:
        self._told("kill")

    def is_stopped(self) -> bool:
        return False

    def is_lost(self) -> bool:
        return False

    def give_up(self) -> None:
        self.ended = True

    def read_end(self) -> None:
        self.ended, self.exitcode = True, self._code

    def close(self) -> None:
        self._end(0)
        self.channel.close()
        self._thread.join()
        self._there.close()
        self.page.close()
        for fd in (self.stdout, self.stderr, self.stacks, self.status):
            os.close(fd)


class Cell(Sink):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.due = NEVER
        self.text = ""

    def write(self, stream: str, text: str) -> None:
        self.text += text


@pytest.fixture
def loop() -> Iterator[RankLoop]:
    one = RankLoop()
    yield one
    one.close()


def begin(
    loop: RankLoop, handles: Sequence[RankHandle], steps: Any, *, has_thread: bool = False, **options: Any
) -> Request:
    ranks = [RankProxy(handle, loop) for handle in handles]
    for rank in ranks:
        loop.add(rank)
    set_up = Request(
        ranks=ranks, send=lambda _: None, steps=steps, wording=Wording(what="the set-up"), awaits=Awaits.READY
    )
    if not has_thread:  # else the ranks may have said already that they are ready
        loop.begin(set_up)
        loop.run(set_up)
    request = Request(
        ranks=ranks,
        send=lambda rank: rank.handle.ask(Call(parcel=Parcel())),
        steps=steps,
        wording=options.pop("wording", Wording(what="the call")),
        world_size=len(ranks),
        **options,
    )
    loop.begin(request)
    return request


def failure(name: str, when: float, *, peer_lost: bool = False) -> Failure:
    return Failure(
        report=ErrorReport(type_name=name, message="", frames=()), parcel=None, when=when, peer_lost=peer_lost
    )


RESULT = Result(parcel=Parcel())


def test_stacks_that_are_asked_for_before_a_rank_is_ready_are_asked_for_when_it_is(loop: RankLoop) -> None:
    handle = ActorRank(0, None)
    rank = RankProxy(handle, loop)
    loop.add(rank)
    request = Request(ranks=[rank], send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=1)
    view = RequestView(request, ())
    view.ask()
    assert handle.verbs == []
    rank.is_ready = True
    view.stacks()
    assert handle.verbs == ["dump_stacks"]


def test_ranks_of_any_kind_answer_print_and_leave(loop: RankLoop) -> None:
    cell = Cell()
    loop.output = GuardedOutput(RequestOutput([0, 1], cell), cell)
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
    fails = ActorRank(0, failure("First", time.monotonic()))
    hangs = ActorRank(1, None, ends_on=["kill"])
    request = begin(loop, [fails, hangs], call_steps(SOON))
    loop.run(request)
    assert hangs.verbs == ["dump_stacks", "interrupt", "terminate", "kill"]
    assert "rank 0 raised First" in str(error_of(request))


def cut(rank: RankProxy) -> None:
    assert isinstance(rank.handle, ActorRank)
    rank.handle._told("cut")


@pytest.mark.parametrize(("interrupts", "verbs"), [(1, []), (2, ["kill"])])
def test_a_rank_of_a_pool_is_killed_only_if_the_user_insists(loop: RankLoop, interrupts: int, verbs: list[str]) -> None:
    hangs = ActorRank(0, None, ends_on=["kill"])
    steps = cell_steps(Timeouts(interrupt=0.02, cut=0.02, kill=20.0), cut)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        loop.post(insist if interrupts > 1 else lambda: hangs._end(0))

    def insist() -> None:
        loop.interrupt(request)

    request = begin(loop, [hangs], steps, say=say)
    loop.interrupt(request)
    loop.run(request)
    assert hangs.verbs == ["interrupt", "cut", *verbs]
    assert "rank 0 runs C code that cannot be interrupted" in said[0]
    assert isinstance(error_of(request), KeyboardInterrupt)


@pytest.mark.parametrize("insists", [False, True])
def test_an_interrupt_leaves_ranks_the_time_to_save_unless_the_user_insists(loop: RankLoop, insists: bool) -> None:
    handle = ActorRank(0, None, ends_on=["kill"])
    saves = ProgressPage(handle.page._memory)
    saves.begin_request()
    saves.enter(Phase.SAVING)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        loop.post((lambda: loop.interrupt(request)) if insists else (lambda: handle._there.send(RESULT)))

    request = begin(loop, [handle], call_steps(SOON), say=say)
    loop.interrupt(request)
    loop.run(request)
    assert handle.verbs == (["interrupt", "kill"] if insists else ["interrupt"])
    assert said == ["rank 0 is saving. Interrupt once more not to wait"]


@pytest.mark.parametrize("insists", [False, True])
def test_a_failure_leaves_ranks_the_time_to_save_in_the_background(loop: RankLoop, insists: bool) -> None:
    fails, saves = ActorRank(0, failure("First", 1.0)), ActorRank(1, None, ends_on=["terminate"])
    page = ProgressPage(saves.page._memory)
    page.begin_request()
    page.save_in_background(True)
    del page  # it holds on to the memory, which is closed at the end
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        loop.post((lambda: loop.interrupt(request)) if insists else end_of_save)

    def end_of_save() -> None:
        ProgressPage(saves.page._memory).save_in_background(False)

    request = begin(loop, [fails, saves], call_steps(SOON), say=say)
    loop.run(request)
    assert saves.verbs == ["dump_stacks", "interrupt", "terminate"]
    assert said == ["rank 1 is saving. Interrupt not to wait"]
    assert ("interrupted" if insists else "rank 0 raised First") in str(error_of(request))


def test_ranks_that_do_not_answer_in_time_are_named(loop: RankLoop) -> None:
    handles = [ActorRank(0, RESULT), ActorRank(1, None, ends_on=["terminate"])]
    request = begin(loop, handles, call_steps(SOON), timeout=600.0)

    def expire(_: RankLoop) -> None:
        if 0 in request.answers:
            request.expire()

    loop.observers.append(expire)
    try:
        loop.run(request)
    finally:
        loop.observers.remove(expire)
    error = error_of(request)
    assert isinstance(error, DeadlineError)
    assert str(error) == "the call took longer than 600 s; rank 1 had not finished"


def test_the_error_about_a_rank_whose_message_cannot_be_read_keeps_the_cause(loop: RankLoop) -> None:
    handle = ActorRank(0, None, ends_on=["kill"])
    request = begin(loop, [handle], call_steps(SOON))
    no_pickle = b"no pickle"
    handle._there._socket.sendall(struct.pack("!QB?", len(no_pickle), 0, False) + no_pickle)
    loop.run(request)
    error = error_of(request)
    assert "cannot be read (UnpicklingError" in str(error)
    assert isinstance(error.__cause__, pickle.UnpicklingError)


def test_a_rank_that_was_stopped_before_another_one_failed_is_reported(loop: RankLoop) -> None:
    class Stopped(ActorRank):
        def is_stopped(self) -> bool:
            return True

    said: list[str] = []
    handles = [ActorRank(0, failure("First", time.monotonic())), Stopped(1, None, ends_on=["kill"])]
    request = begin(loop, handles, call_steps(SOON), say=said.append)
    loop.run(request)
    assert said == ["rank 1 is stopped (SIGSTOP). To let it go on: kill -CONT 0"]
    assert "Meanwhile rank 1 was stopped" in error_of(request).__notes__[-1]


def test_a_rank_that_prints_faster_than_it_is_read_answers_all_the_same() -> None:
    class PrintsMore(Cell):
        def write(self, stream: str, text: str) -> None:
            with contextlib.suppress(IndexError):  # the rank has ended
                os.write(handle._ends[0], b"more\n")

    loop = RankLoop()
    loop.start()
    cell = PrintsMore()
    handle = ActorRank(0, RESULT)
    loop.output = GuardedOutput(RequestOutput([0], cell), cell)
    request = begin(loop, [handle], call_steps(SOON), has_thread=True)
    try:
        assert request.done.wait(20)
    finally:
        handle._end(0)
        loop.close()


def test_only_a_rank_that_does_not_answer_is_asked_for_its_stacks_by_a_signal(loop: RankLoop) -> None:
    class Asked(ActorRank):
        def dump_stacks(self, *, by_signal: bool = False) -> None:
            self.verbs.append("signal" if by_signal else "request")
            if self.rank == 0 or by_signal:
                os.write(self._ends[2], b'Stack:\n  File "<string>", line 1 in <module>\n')

    handles = [Asked(0, None), Asked(1, None)]
    ranks = [RankProxy(one, loop) for one in handles]
    for rank in ranks:
        loop.add(rank)
        rank.ask_for_stacks()
    while not all(rank.has_stacks.is_set() for rank in ranks):
        loop._wait_once()
    assert [one.verbs for one in handles] == [["request"], ["request", "signal"]]


def test_where_a_rank_is_comes_with_the_last_piece_of_its_stacks() -> None:
    pieces = [
        b'Thread 0x00007f (most recent call first):\n  File "/x/threading.py", line 2 in _bootstrap\n\n',
        b'Current thread 0x00007e (most recent call first):\n  File "/home-of/train.py", line 7 in load\n',
        b'  File "<string>", line 1 in <module>\n',
    ]

    class Writes(ActorRank):
        def dump_stacks(self, *, by_signal: bool = False) -> None:
            os.write(self._ends[2], pieces.pop(0))

    def write_next(loop: RankLoop) -> None:
        if pieces and loop.ranks[0].stacks:  # what was written before has been read
            loop.ranks[0].handle.dump_stacks()

    loop = RankLoop()
    loop.start()
    try:
        loop.add(RankProxy(Writes(0, None), loop))
        loop.observers.append(write_next)
        assert locate_ranks(loop.ranks, {0}, 20.0, loop.post) == {0: "in load, /home-of/train.py:7"}
    finally:
        loop.observers.remove(write_next)
        loop.close()


def test_a_request_whose_answer_is_read_when_its_time_is_over_is_done_at_once(loop: RankLoop) -> None:
    handle = ActorRank(0, RESULT)
    request = begin(loop, [handle], call_steps(SOON), timeout=600.0)
    assert select.select([handle.channel], [], [], 20.0)[0], "the answer has come, and was not read"
    request.expire()
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
    loop.output = GuardedOutput(RequestOutput([0], cell), cell)
    loop.start()
    assert loop.ended.wait(20)
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


def incident(kind: IncidentKind, when: float, **options: Any) -> Incident:
    return Incident(kind=kind, when=when, **options)


class TestFirstCause:
    """Of several things that went wrong, which one was it?"""

    EARLY = incident(IncidentKind.DIED, 1.0)
    LATE = incident(IncidentKind.FAILED, 2.0, failure=(failure("Late", 2.0), ()))
    LOST = incident(IncidentKind.FAILED, 0.5, failure=(failure("Lost", 0.5, peer_lost=True), ()))
    OURS = incident(IncidentKind.DIED, 0.1, is_consequence=True)
    USER = incident(IncidentKind.INTERRUPTED, 9.0)

    @pytest.mark.parametrize(
        ("incidents", "cause"),
        [
            ([LATE, EARLY], EARLY),
            ([LOST, LATE], LATE),
            ([OURS, LOST], LOST),
            ([EARLY, USER], USER),
        ],
    )
    def test_is_what_nothing_else_explains(self, incidents: list[Incident], cause: Incident) -> None:
        assert first_cause(incidents) is cause


class TestDeath:
    """A launch and a pool say it in the same words, and both know of the out-of-memory killer."""

    @pytest.mark.parametrize("make", [RankProxy, PoolRank])
    def test_of_a_rank_that_was_killed_for_its_memory_says_so(self, loop: RankLoop, make: Callable[..., Any]) -> None:
        handle = ActorRank(1, None)
        rank = make(handle, loop)
        handle.exitcode = -signal.SIGKILL
        words = wording("the cell") if make is PoolRank else Wording()
        error = death(rank, words, "its last words\n", out_of_memory=True)
        assert isinstance(error, RankDiedError)
        assert str(error).startswith("rank 1 was ended by SIGKILL (killed)")
        assert "out-of-memory killer was at work" in str(error)
        assert str(error).endswith("its last words")
        rank.close()


def waits_in_vain() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()


def test_a_launch_whose_ranks_wait_in_vain_says_who_waits_for_whom(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Launch, "timeouts", Timeouts(quiet=0.3))
    launch = notebook_launcher(waits_in_vain, (), 2, block=False, progress="off")
    assert isinstance(launch, Launch)
    said, deadline = "", time.monotonic() + 30.0
    while "nothing has moved" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        launch.wait(0.05)
    launch.stop()
    assert "rank 0 waits in barrier, called from waits_in_vain" in said
    assert "rank 1 has come to the end. Interrupt it to end it" in said


def runs_python_code() -> int:
    signals: list[int] = []
    signal.signal(DUMP_SIGNAL, lambda signum, _: signals.append(signum))
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        sum(range(100))
    return len(signals)


def test_a_rank_that_runs_python_code_says_where_it_is_and_gets_no_signal(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "timeouts", Timeouts(quiet=0.2))
    monkeypatch.setattr(proxy, "_ANSWER_TIMEOUT", 30.0)  # however busy the machine is
    found: set[str] = set()

    def note(loop: RankLoop) -> None:
        found.update(where(bytes(rank.stacks).decode()) for rank in loop.ranks.values() if rank.has_stacks.is_set())

    with observing(note):
        assert run_ranks(runs_python_code, world_size=1) == [0]
    assert any("runs_python_code" in place for place in found)


def test_ranks_that_move_slowly_are_asked_for_their_stacks_less_often(
    loop: RankLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now))
    rank = RankProxy(ActorRank(0, None), loop)
    loop.add(rank)
    request = Request(ranks=[rank], send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=1)
    watch = HangWatch(request, Timeouts(quiet=3.0))
    for pause, wait in ((20.0, 3.0), (1.0, 3.0), (10.0, 20.0), (500.0, 60.0)):  # the first is the start of the ranks
        now += pause
        watch.moved()
        assert watch.due == now + wait
