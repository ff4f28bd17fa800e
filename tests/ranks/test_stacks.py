"""Ranks say where they are, when they are asked or when nothing moves."""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import signal
import sys
import textwrap
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from fixtures.actor_ranks import SOON, ActorRank
from fixtures.deadlines import observing
from fixtures.ranks import RunRanks

import nb_accelerate
from nb_accelerate.base.progress_page import ProgressPage, layout
from nb_accelerate.notebook.diagnostics.stacks import DUMP_SIGNAL, ONE_THREAD, listed, where
from nb_accelerate.notebook.launch import Launch
from nb_accelerate.notebook.protocol.messages import Parcel, Result
from nb_accelerate.notebook.ranks import proxy
from nb_accelerate.notebook.ranks.failing import hang
from nb_accelerate.notebook.ranks.failing.hang import DeadlockWatch, HangWatch
from nb_accelerate.notebook.ranks.failing.incidents import Wording
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.proxy import RankProxy
from nb_accelerate.notebook.ranks.request import Request
from nb_accelerate.notebook.ranks.request_panel import RequestView
from nb_accelerate.notebook.ranks.status import locate_ranks
from nb_accelerate.notebook.ranks.steps import call_steps
from nb_accelerate.notebook.ranks.timeouts import Timeouts

if TYPE_CHECKING:
    pass


def test_a_list_of_frames_has_those_of_users_and_of_libraries_and_none_of_our_own() -> None:
    package = os.path.dirname(nb_accelerate.__file__)
    ours = f'  File "{package}/accelerator/training.py", line 156 in _wait\n'
    torchs = f'  File "{torch.__file__}", line 3 in forward\n'
    users = '  File "/train.py", line 7 in train\n'
    head = "Current thread 0x0000000000000001 (most recent call first):\n"
    assert listed(f"{head}{ours}{users}") == (["train, /train.py:7"], [])
    assert listed(f"{head}{torchs}{ours}{users}") == (
        ["train, /train.py:7"],
        [f"forward, {torch.__file__}:3"],
    )
    assert listed(f"{head}{ours}") == (["outside your code"], [])
    assert listed("") == (["no answer"], [])


def test_a_finalizer_is_not_where_a_rank_is() -> None:
    frames = (
        f'  File "{torch.__file__}", line 3 in wait\n'
        f'  File "{torch.__file__}", line 2 in __del__\n'
        '  File "/train.py", line 7 in train\n'
    )
    assert where(f"Current thread 0x0000000000000001 (most recent call first):\n{frames}") == "in train, /train.py:7"


def test_what_a_line_runs_is_told_while_it_imports_or_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    source = """
    import sys
    from nb_accelerate.notebook.worker.stack_writer import _inside
    imported = _inside(sys._getframe())
    def load():
        return _inside(sys._getframe())
    class Model:
        def __init__(self):
            self.said = load()
    """
    (folder / "slow_library.py").write_text(textwrap.dedent(source), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))  # as while another thread imports it
    library = importlib.import_module("slow_library")
    monkeypatch.delitem(sys.modules, "slow_library")
    assert library.imported == "importing slow_library"
    assert library.load() == "load"
    assert library.Model().said == ("Model" if sys.version_info >= (3, 11) else "")


def test_stacks_that_are_asked_for_before_a_rank_is_ready_are_asked_for_when_it_is(loop: RankLoop) -> None:
    handle = ActorRank(0, None)
    rank = RankProxy(handle)
    loop.add(rank)
    request = Request(ranks=[rank], send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=1)
    view = RequestView(request, ())
    view.ask()
    assert handle.verbs == []
    rank.is_ready = True
    view.stacks()
    assert handle.verbs == ["dump_stacks"]


def test_only_a_rank_that_does_not_answer_is_asked_for_its_stacks_by_a_signal(loop: RankLoop) -> None:
    class Asked(ActorRank):
        def dump_stacks(self, *, by_signal: bool = False) -> None:
            self.verbs.append("signal" if by_signal else "request")
            if self.rank == 0 or by_signal:
                os.write(self.write_ends[2], b'Stack:\n  File "<string>", line 1 in <module>\n')

    handles = [Asked(0, None), Asked(1, None)]
    ranks = [RankProxy(one) for one in handles]
    for rank in ranks:
        loop.add(rank)
        rank.ask_for_stacks()
    while not all(rank.has_stacks.is_set() for rank in ranks):
        loop.wait_once()
    assert [one.verbs for one in handles] == [["request"], ["request", "signal"]]


def test_a_rank_that_waits_for_its_next_request_is_outside_of_users_code() -> None:
    dump = (
        "Stack (most recent call first):\n"
        '  File "/x/nb_accelerate/notebook/protocol/channel.py", line 155 in _recv_fds\n'
        '  File "/x/nb_accelerate/notebook/worker/rank.py", line 9 in serve\n  File "<string>", line 1 in <module>\n'
    )
    assert where(dump) == "outside your code"


def test_where_a_rank_is_comes_with_the_last_piece_of_its_stacks() -> None:
    pieces = [
        b'Thread 0x00007f (most recent call first):\n  File "/x/threading.py", line 2 in _bootstrap\n\n',
        b'Current thread 0x00007e (most recent call first):\n  File "/home-of/train.py", line 7 in load\n',
        b'  File "<string>", line 1 in <module>\n',
    ]

    class Writes(ActorRank):
        def dump_stacks(self, *, by_signal: bool = False) -> None:
            os.write(self.write_ends[2], pieces.pop(0))

    def write_next(loop: RankLoop) -> None:
        if pieces and loop.ranks[0].stacks:  # what was written before has been read
            loop.ranks[0].handle.dump_stacks()

    loop = RankLoop()
    loop.start()
    try:
        loop.add(RankProxy(Writes(0, None)))
        loop.observers.append(write_next)
        assert locate_ranks(loop.ranks, {0}, 20.0, loop.post) == {0: "in load, /home-of/train.py:7"}
    finally:
        loop.observers.remove(write_next)
        loop.close()


def computes_for_a_while() -> float:
    """Rank 0 is in a backward of 2 s or more, whose stack looks like a wait for the gradients of others."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        return 0.0
    weight = torch.eye(800).requires_grad_()
    product, forward = weight, time.monotonic()
    while time.monotonic() < forward + 1.5:
        product = product @ weight
    backward = time.monotonic()
    product.sum().backward()
    return time.monotonic() - backward


@pytest.mark.slow
def test_a_rank_that_computes_long_after_others_have_returned_is_left_alone(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "timeouts", Timeouts(quiet=0.2, deadlock=0.4))
    seconds, _ = run_ranks(computes_for_a_while)
    assert seconds > 1.5  # else it shows nothing


def dump(*frames: str) -> str:
    return f"{ONE_THREAD}Stack (most recent call first):\n" + "".join(f'  File "{frame}\n' for frame in frames)


WAITS = dump('/torch/distributed/distributed_c10d.py", line 9 in barrier', 'train.py", line 7 in train')
JOINS = dump(
    '/torch/distributed/distributed_c10d.py", line 9 in _store_based_barrier',
    '/torch/distributed/distributed_c10d.py", line 5 in init_process_group',
    'train.py", line 7 in train',
)
COMPUTES = dump('/torch/autograd/graph.py", line 5 in _engine_run_backward', 'train.py", line 7 in train')
CALLS = dump('/torch/distributed/rpc/api.py", line 9 in rpc_sync', 'train.py", line 7 in train')
IDLE = dump('/nb_accelerate/notebook/worker/rank.py", line 9 in serve')
LOADS = dump('train.py", line 8 in load')


def test_only_ranks_that_can_wait_for_nobody_else_are_deadlocked(
    loop: RankLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, used = 100.0, 1.0
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ActorRank, "processor_time", lambda _: used)

    ranks = [RankProxy(ActorRank(rank, None)) for rank in range(3)]
    for rank in ranks:
        loop.add(rank)

    def watch(size: int = 3, finished: tuple[int, ...] = (2,), on_host: bool = True) -> DeadlockWatch:
        request = Request(
            ranks=ranks,
            send=lambda _: None,
            steps=call_steps(SOON),
            wording=Wording(),
            world_size=size,
            on_host=on_host,
        )
        request.answers.update({rank: (Result(parcel=Parcel()), ()) for rank in finished})
        one = DeadlockWatch(request, longest=20.0)
        others = [rank for rank in ranks if rank.rank in finished]
        monkeypatch.setattr(one, "measure", functools.partial(one.measure, others=others))
        return one

    ranks[2].stacks[:] = IDLE.encode()
    both = {0: WAITS, 1: WAITS}
    assert watch().measure(both) == 0.0
    assert watch().measure({0: WAITS, 1: LOADS}) is None
    assert watch().measure({0: WAITS, 1: JOINS}) is None  # perhaps with a process outside
    assert watch().measure({0: WAITS, 1: ""}) is None
    assert watch().measure({0: WAITS, 1: CALLS}) is None
    mine = CALLS.replace("/torch/distributed/rpc/api", "/me/torch/distributed/train")
    assert watch().measure({0: WAITS, 1: mine}) is None
    assert watch(on_host=False).measure(both) is None  # of devices nothing is known
    assert watch(size=5).measure(both) is None  # the others are on another machine
    assert watch(finished=()).measure({**both, 2: WAITS}) is None  # in different collectives: perhaps a library's own
    assert watch().measure({0: WAITS, 1: WAITS.removeprefix(ONE_THREAD)}) is None  # a thread may bring it
    ranks[2].stacks[:] = IDLE.removeprefix(ONE_THREAD).encode()
    assert watch().measure(both) is None  # one of the rank that has come to the end may, too
    ranks[2].stacks[:] = IDLE.encode()

    page = ProgressPage(mmap.mmap(ranks[1].handle.page.fd, layout.SIZE))
    page.note_other_group()
    page.begin_request()
    assert watch().measure(both) is None  # perhaps for processes of another launch
    page.words[layout.OTHER_GROUP] = 0

    one = watch()
    one.measure(both)
    now += 10.0
    used += 0.1
    assert one.measure(both) == 10.0
    now += 1.0
    assert one.measure({0: WAITS, 1: ""}) is None
    assert one.measure(both) == 10.0  # where it was meanwhile is not known
    now += 1000.0  # the machine was suspended
    assert one.measure(both) == 30.0
    one.moved()
    assert one.measure(both) == 0.0
    now += 10.0
    assert one.measure({0: WAITS, 1: WAITS.replace("line 7", "line 8")}) == 0.0
    now += 10.0
    used += 3.0
    assert one.measure({0: WAITS, 1: WAITS.replace("line 7", "line 8")}) == 0.0  # something is computed or transferred
    monkeypatch.setattr(ActorRank, "processor_time", lambda _: None)
    now += 10.0
    assert one.measure({0: WAITS, 1: WAITS.replace("line 7", "line 8")}) == 0.0


def test_a_rank_that_is_asked_alone_and_computes_is_not_said_to_wait(
    loop: RankLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now))

    rank, beside = RankProxy(ActorRank(0, None)), RankProxy(ActorRank(1, None))
    for one in (rank, beside):
        loop.add(one)

    def said_of(stack: str) -> list[str]:
        nonlocal now
        rank.stacks[:] = stack.encode()
        said: list[str] = []
        request = Request(
            ranks=[rank], send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=1, say=said.append
        )
        request.idle = lambda: [beside]
        watch = HangWatch(request, Timeouts())
        for _ in range(6):
            now += 60.0
            watch.act()
        return said

    assert said_of(COMPUTES) == []
    (line,) = said_of(WAITS)
    assert "0 waits in barrier, " in line
    assert "1 does not run" in line


def test_ranks_that_do_not_run_a_cell_in_the_background_may_run_what_it_waits_for_next(loop: RankLoop) -> None:
    ranks = [RankProxy(ActorRank(rank, None)) for rank in range(2)]
    for rank in ranks:
        loop.add(rank)

    def others(attended: bool) -> list[RankProxy]:
        request = Request(
            ranks=ranks[:1], send=lambda _: None, steps=call_steps(SOON), wording=Wording(), attended=attended
        )
        request.idle = lambda: ranks[1:]
        return HangWatch(request, Timeouts())._others()

    assert others(attended=True) == ranks[1:]
    assert others(attended=False) == []


def runs_python_code() -> int:
    signals: list[int] = []
    signal.signal(DUMP_SIGNAL, lambda signum, _: signals.append(signum))
    end = time.monotonic() + 5  # a busy machine may ask first while the rank still imports this
    while time.monotonic() < end:
        sum(range(100))
    return len(signals)


@pytest.mark.slow
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
    assert any("runs_python_code" in place for place in found), found


def test_ranks_that_move_slowly_are_asked_for_their_stacks_less_often(
    loop: RankLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now))
    rank = RankProxy(ActorRank(0, None))
    loop.add(rank)
    request = Request(ranks=[rank], send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=1)
    moved: list[str] = []
    monkeypatch.setattr(DeadlockWatch, "moved", lambda _: moved.append("moved"))
    watch = HangWatch(request, Timeouts(quiet=3.0))
    for pause, wait in ((20.0, 3.0), (1.0, 3.0), (10.0, 20.0), (500.0, 60.0)):  # the first is the start of the ranks
        now += pause
        watch.printed()
        assert watch.due == now + wait
    assert len(moved) == 4, "who prints is not deadlocked"
