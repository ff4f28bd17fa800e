"""Whatever fails in the thread that listens to the ranks costs output, or a rank, and never the notebook."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nb_accelerate.errors import PoolError
from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.pool import CellHandle, CellOptions, Pool, PoolOptions, read_cell
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.ranks.failing.hang import HangWatch
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.output.merge import Merge
from nb_accelerate.notebook.ranks.output.rank_output import RankOutput
from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
from nb_accelerate.notebook.ranks.sources import Sources
from nb_accelerate.notebook.ranks.timeouts import Timeouts

CELL = """
import sys
from IPython.display import display
print("both"); print("rank", rank); print("to stderr", file=sys.stderr)
display({"rank": rank})
print("\\r10%", end="", flush=True); print("\\r20%")
rank * 10
"""


class Fault(Exception):
    """Injected."""


class Page:
    """A sink that keeps what it gets, and can fail."""

    due = float("inf")

    def __init__(self) -> None:
        self.text = ""
        self.broken: set[str] = set()

    def write(self, stream: str, text: str) -> None:
        self.fail_if_broken("write")
        self.text += text

    def display(self, kind: str, content: dict[str, Any]) -> None:
        self.fail_if_broken("display")
        self.text += str(content["data"].get("text/plain")) + "\n"

    def flush(self) -> None:
        self.fail_if_broken("flush")

    def close(self) -> None:
        self.fail_if_broken("close")

    def fail_if_broken(self, what: str) -> None:
        if what in self.broken:
            raise Fault(what)


def run(pool: Pool, code: str, page: Page | None = None, **options: Any) -> list[Any]:
    chosen = CellOptions(wants_values=True, progress="off", timeout=20.0, **options)
    return pool.run(read_cell(code), chosen, variables={}, sink=page or Page())


@contextlib.contextmanager
def fault(
    place: type,
    name: str,
    *,
    times: int = 10**9,
    error: BaseException | None = None,
    then: Callable[[], object] = lambda: None,
) -> Iterator[list[int]]:
    """Meanwhile, a method raises, so many times, and something else happens; gives how often it did."""
    original = place.__dict__[name]
    raised: list[int] = []

    def fail(*given: Any, **options: Any) -> Any:
        if len(raised) >= times:
            return original(*given, **options)
        raised.append(1)
        then()
        raise error or Fault(name)

    def guarded(output: RequestOutput, *given: Any) -> None:  # its methods guard themselves
        with output.guard:
            fail(output, *given)

    inside: Any = guarded if place is RequestOutput else fail
    setattr(place, name, property(fail) if isinstance(original, property) else inside)
    try:
        yield raised
    finally:
        setattr(place, name, original)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    one = Pool()
    one.start(PoolOptions(num_processes=2))
    yield one
    one.stop()


@pytest.fixture
def own() -> Iterator[Pool]:
    """Ranks of one test, which loses some of them."""
    one = Pool()
    one.start(PoolOptions(num_processes=2))
    yield one
    one.stop()


@contextlib.contextmanager
def goes_on(pool: Pool) -> Iterator[None]:
    """Afterwards the next cell runs, as it does on ranks to which nothing has happened."""
    run(pool, "kept = rank")
    yield
    began, page = time.monotonic(), Page()
    assert run(pool, "print('next')\nkept", page) == [0, 1]
    assert "next\n" in page.text
    assert time.monotonic() - began < 5.0


SHOWING: list[tuple[type, str]] = [
    *((RequestOutput, name) for name in ("text", "display", "finish")),
    *((Merge, name) for name in ("add", "finish", "due")),
    *((RankOutput, name) for name in ("feed", "finish")),
]


@pytest.mark.parametrize(("place", "name"), SHOWING)
def test_an_error_in_showing_output_costs_output_only(pool: Pool, place: type, name: str):
    page = Page()
    with goes_on(pool), fault(place, name) as raised:
        assert run(pool, CELL, page) == [0, 10]
    assert raised
    assert page.text.count("could not be shown") == 1
    assert page.text.count(f"(Fault: {name})") == 1


@pytest.mark.parametrize("place", [RequestOutput, Merge])
def test_output_that_is_due_and_cannot_be_shown_is_not_tried_without_end(
    pool: Pool, place: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(Pool, "timeouts", replace(Pool.timeouts, fold=0.0))
    flag, page = tmp_path / "flag", Page()
    cell = f"import os, time\nif rank == 0: print('due')\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\n1"
    with goes_on(pool), fault(place, "flush", then=flag.touch) as raised:
        assert run(pool, cell, page) == [1, 1]
    assert 1 <= len(raised) < 50
    assert page.text.count("(Fault: flush)") == 1


@pytest.mark.parametrize("broken", [{"write"}, {"display"}, {"flush"}, {"write", "display", "flush", "close"}])
def test_a_cell_that_takes_no_output_ends_nothing(pool: Pool, broken: set[str]):
    page = Page()
    page.broken = broken
    with goes_on(pool):
        assert run(pool, CELL, page) == [0, 10]
    assert page.text.count("could not be shown") == (0 if len(broken) > 2 else 1)


def test_errors_in_what_follows_a_cell_are_as_harmless(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise Fault("telling")

    monkeypatch.setattr("nb_accelerate.notebook.pool.cell.tell_failure", fail)
    page = Page()
    with goes_on(pool):
        pool.finish(pool.begin(read_cell("1"), CellOptions(progress="off"), variables={}, sink=page))
    assert "cell failed (Fault: telling)." in page.text
    assert "could not be shown" not in page.text


def test_a_look_for_hangs_that_fails_is_not_repeated(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pool, "timeouts", replace(Pool.timeouts, quiet=0.01))
    page = Page()
    with goes_on(pool), fault(HangWatch, "act") as raised:
        assert run(pool, "import time; time.sleep(0.3)\nrank", page) == [0, 1]
    assert len(raised) == 1
    assert page.text.count("hang failed (Fault: act).") == 1
    assert "could not be shown" not in page.text


def test_a_rank_whose_output_cannot_be_read_goes_on(own: Pool):
    with fault(Sources, "read", times=1, error=OSError("no memory")):
        assert run(own, "print('lost')\nrank") == [0, 1]
    assert run(own, "rank") == [0, 1]


def test_signals_that_cannot_be_sent_keep_no_cell_from_its_end(pool: Pool):
    with goes_on(pool), fault(LocalRank, "signal"), pytest.raises(ZeroDivisionError):
        run(pool, "1 / (1 - rank)")


def test_what_cannot_be_sent_to_a_rank_is_raised(pool: Pool):
    with goes_on(pool), fault(LocalRank, "ask", times=1), pytest.raises(Fault):
        run(pool, "rank")


class TestLostRanks:
    def test_a_rank_whose_messages_cannot_be_read_is_killed_and_can_be_replaced(self, own: Pool):
        run(own, "kept = rank")
        with fault(Channel, "drain", times=1, error=EOFError("half a message")), pytest.raises(PoolError) as caught:
            run(own, "rank")
        assert "(EOFError: half a message)" in str(caught.value)
        (lost,) = own.lost
        assert own.restart(lost) == [lost]
        assert run(own, "kept", ranks=(1 - lost,)) == [1 - lost]

    def test_a_rank_that_does_not_end_when_it_is_killed_counts_as_lost(
        self, own: Pool, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(Pool, "timeouts", Timeouts(interrupt=0.05, cut=0.05, wait=0.05, kill=0.05))
        request = own.begin(
            read_cell("import time\ntime.sleep(600)"), CellOptions(ranks=(1,)), variables={}, sink=Page()
        )
        with fault(LocalRank, "signal"), fault(LocalRank, "announce_interrupt"):
            own.interrupt()
            assert request.done.wait(20)
        with pytest.raises(KeyboardInterrupt):
            own.finish(request)
        assert [(rank, "did not end" in why) for rank, why in own.lost.items()] == [(1, True)]
        assert own.restart(1) == [1]
        assert run(own, "rank") == [0, 1]

    def test_how_a_rank_ended_may_stay_unknown(self, own: Pool):
        def unreadable(handle: LocalRank) -> None:
            handle.ended = True  # nobody has reported an exit code

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalRank, "read_end", unreadable)
            with pytest.raises(PoolError, match="rank 1 is lost"):
                run(own, "import os\nif rank: os._exit(3)")
        assert own.restart(1) == [1]


@pytest.mark.parametrize("failure", [MemoryError("the thread"), SystemExit(3)], ids=["error", "exit"])
class TestThreadThatFails:
    """A mistake that nothing contains: all ranks are ended, everybody is told, and new ones can be started."""

    def break_thread(self, pool: Pool, failure: BaseException) -> Callable[[], None]:
        group = pool.group
        assert group is not None

        def fail(_: Any = None) -> None:
            raise failure

        def start() -> None:
            group.loop.post(fail)
            assert group.loop.posted.ended.wait(20)

        return start

    def test_a_wait_for_a_cell_ends_at_once(self, own: Pool, failure: BaseException):
        request = own.begin(read_cell("import time; time.sleep(600)"), CellOptions(), variables={}, sink=Page())
        handle = CellHandle(own, request)
        threading.Timer(0.1, self.break_thread(own, failure)).start()
        assert handle.wait(20)
        for _ in range(2):
            with pytest.raises(PoolError, match=f"has failed .*{type(failure).__name__}") as caught:
                handle.result(20)
        assert caught.value.__cause__ is failure
        assert not own.has_ranks
        own.start(PoolOptions(num_processes=1))
        assert run(own, "rank") == [0]

    def test_whatever_is_asked_afterwards_says_so_once(self, own: Pool, failure: BaseException):
        self.break_thread(own, failure)()
        asked: list[Callable[[], object]] = [
            lambda: run(own, "1"),
            lambda: own.push({"x": 1}),
            lambda: own.pull(["x"]),
            lambda: own.restart(1),
        ]
        first, *others = asked if isinstance(failure, MemoryError) else asked[::-1]
        with pytest.raises(PoolError, match="has failed") as caught:
            first()
        assert "%distributed start" in str(caught.value)
        for one in others:
            with pytest.raises(PoolError, match="no ranks are running"):
                one()
        own.start(PoolOptions(num_processes=1))
        assert run(own, "rank") == [0]

    @pytest.mark.parametrize(
        "again", ["restart", *(pytest.param(one, marks=pytest.mark.slow) for one in ("start", "stop"))]
    )
    def test_start_restart_and_stop_do_what_they_say(self, own: Pool, failure: BaseException, again: str):
        self.break_thread(own, failure)()
        if again == "start":
            own.start(PoolOptions(num_processes=1))
        elif again == "restart":
            own.restart()
        own.stop()

    def test_a_rank_that_is_being_added_is_let_go_of(self, own: Pool, failure: BaseException):
        group = own.group
        assert group is not None
        expected = type(failure) if isinstance(failure, Exception) else PoolError
        with pytest.raises(expected), fault(RankLoop, "_add", error=failure):
            own.restart(1)
        own.stop()
