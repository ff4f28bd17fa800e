"""Ranks that fail while they are started, and interrupts while they are started or ended: nothing hangs or is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nb_accelerate.errors import ConfigError, PoolError, RankDiedError, StartError
from nb_accelerate.notebook.launch import servers, setup
from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.pool import CellHandle, CellOptions, Pool, PoolOptions, group as groups, read_cell
from nb_accelerate.notebook.pool.pool import PoolState
from nb_accelerate.notebook.ranks.loop import RankLoop

LEAVES_SLOWLY = "import atexit, time\natexit.register(time.sleep, 600)"


def run(pool: Pool, code: str, **options: Any) -> list[Any]:
    return pool.run(read_cell(code), CellOptions(wants_values=True, progress="off", **options), variables={})


def before(patch: pytest.MonkeyPatch, place: type, name: str, act: Callable[..., object], *, times: int = 1) -> None:
    """Do something before a method is called, so many times."""
    original, done = place.__dict__[name], []

    def act_first(*given: Any, **options: Any) -> Any:
        if len(done) < times:
            done.append(1)
            act()
        return original(*given, **options)

    patch.setattr(place, name, act_first)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def pool() -> Iterator[Pool]:
    one = Pool()
    yield one
    one.stop()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no list of descriptors")
def test_a_rank_takes_five_descriptors_of_the_notebook_and_all_together_few(pool: Pool) -> None:
    servers.warm_server()  # which stays
    before = len(os.listdir("/proc/self/fd"))
    pool.start(PoolOptions(num_processes=4))
    run(pool, "pass")
    assert len(os.listdir("/proc/self/fd")) - before <= 5 * 4 + 5


class TestInterrupts:
    @pytest.mark.parametrize("times", [1, 2])
    def test_stopping_is_quick_then_and_leaves_nothing(self, pool: Pool, monkeypatch: pytest.MonkeyPatch, times: int):
        pool.start(PoolOptions(num_processes=2))
        run(pool, LEAVES_SLOWLY)
        before(monkeypatch, RankLoop, "begin", interrupt, times=times)
        monkeypatch.setattr(Pool, "timeouts", replace(Pool.timeouts, quit=50.0))
        with pytest.raises(KeyboardInterrupt):
            pool.stop()
        assert (pool.state, pool.has_ranks) == (PoolState.STOPPED, False)
        pool.stop()

    def test_restarting_ends_the_ranks_and_can_be_repeated_as_a_start(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ):
        pool.start(PoolOptions(num_processes=2))
        before(monkeypatch, RankLoop, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.restart()
        with pytest.raises(PoolError, match="%distributed start"):
            pool.restart()
        pool.start(PoolOptions(num_processes=2))
        assert run(pool, "rank") == [0, 1]

    @pytest.mark.parametrize(("place", "name"), [(RankLoop, "add"), (RankLoop, "begin"), (LocalRank, "handed_over")])
    def test_ranks_that_are_being_started_are_ended(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch, place: type, name: str
    ):
        before(monkeypatch, place, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.start(PoolOptions(num_processes=2))
        assert pool.state is PoolState.STOPPED

    @pytest.mark.slow
    def test_replacing_a_rank_leaves_one_that_can_be_replaced(self, pool: Pool, monkeypatch: pytest.MonkeyPatch):
        pool.start(PoolOptions(num_processes=2))
        run(pool, "kept = rank")
        before(monkeypatch, RankLoop, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.restart(1)
        assert list(pool.lost) == [1]
        assert pool.restart(1) == [1]
        assert run(pool, "kept", ranks=(0,)) == [0]

    @pytest.mark.slow
    def test_a_stop_that_was_broken_off_can_be_repeated(self, pool: Pool, monkeypatch: pytest.MonkeyPatch):
        class Alarm(Exception):
            """As a user's own signal handler raises it, anywhere."""

        def ring() -> None:
            raise Alarm

        pool.start(PoolOptions(num_processes=2))
        before(monkeypatch, RankLoop, "close", ring)
        with pytest.raises(Alarm):
            pool.stop()
        assert pool.has_ranks
        pool.stop()
        assert not pool.has_ranks


def fail_to_set_up(patch: pytest.MonkeyPatch, rank: int) -> None:
    """One rank raises when it makes itself a process of the group."""
    original = setup.rank_environ

    def broken(plan: Any, rendezvous: Any, local_rank: int, **given: Any) -> dict[str, str]:
        environ = original(plan, rendezvous, local_rank, **given)
        return {**environ, "WORLD_SIZE": "device is broken"} if local_rank == rank else environ

    patch.setattr(setup, "rank_environ", broken)


def when_asked_to_join(patch: pytest.MonkeyPatch, rank: int, act: Callable[[Any], object]) -> None:
    original = groups.send_join

    def send(member: Any, *given: Any) -> None:
        if member.rank == rank:
            act(member)
        original(member, *given)

    patch.setattr(groups, "send_join", send)


def kill(member: Any) -> None:
    os.kill(member.handle.pid, signal.SIGKILL)


@pytest.mark.limit(30)
class TestRanksThatMeet:
    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, 2])
    def test_the_failure_of_one_is_raised_and_ends_the_others(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch, rank: int
    ):
        with monkeypatch.context() as patch:
            fail_to_set_up(patch, rank)
            with pytest.raises(ConfigError, match="device is broken"):
                pool.start(PoolOptions(num_processes=3))
        assert pool.state is PoolState.STOPPED
        with monkeypatch.context() as patch:
            when_asked_to_join(patch, rank, kill)
            with pytest.raises(RankDiedError, match=rf"rank {rank} .*SIGKILL .*being started"):
                pool.start(PoolOptions(num_processes=3))
        assert pool.state is PoolState.STOPPED
        pool.start(PoolOptions(num_processes=3))
        assert run(pool, "rank") == [0, 1, 2]

    @pytest.mark.slow
    def test_a_new_rank_that_fails_is_told_of_and_can_be_replaced(self, pool: Pool, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(Pool, "timeouts", replace(Pool.timeouts, cut=0.1, rendezvous=0.1))
        pool.start(PoolOptions(num_processes=2))
        with monkeypatch.context() as patch:
            fail_to_set_up(patch, 1)
            with pytest.raises(ConfigError, match="device is broken"):
                pool.restart(1)
        assert 1 in pool.lost
        with monkeypatch.context() as patch:
            when_asked_to_join(patch, 1, kill)
            with pytest.raises(RankDiedError, match=r"rank 1 .*SIGKILL"):
                pool.restart(1)
        assert pool.restart(1) == [1]
        assert run(pool, "rank") == [0, 1]

    @pytest.mark.slow
    def test_one_that_does_not_come_is_named_when_its_time_is_up(self, pool: Pool, monkeypatch: pytest.MonkeyPatch):
        def stop(member: Any) -> None:
            os.kill(member.handle.pid, signal.SIGSTOP)
            assert pool.group is not None
            (request,) = pool.group.loop.requests
            request.start = 0.1

        when_asked_to_join(monkeypatch, 1, stop)
        with pytest.raises(StartError, match=r"1 of 2 .*\(joining"):
            pool.start(PoolOptions(num_processes=2))
        assert pool.state is PoolState.STOPPED


FAILED_MEETING = """
import datetime
import torch
import torch.distributed as dist
dist.destroy_process_group()
try:
    store, patience = dist.HashStore(), datetime.timedelta(seconds=0.1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=patience)
except Exception:
    kept = "the other did not come"
kept
"""

SUM = """
import torch
import torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
int(total)
"""


@pytest.mark.slow
def test_a_rank_that_was_in_a_meeting_that_failed_meets_new_ones(pool: Pool):
    pool.start(PoolOptions(num_processes=2))
    assert run(pool, FAILED_MEETING, ranks=(0,)) == ["the other did not come"]
    assert pool.restart(1) == [1]
    assert run(pool, SUM) == [2, 2]
    assert run(pool, "kept", ranks=(0,)) == ["the other did not come"]


@pytest.mark.slow  # another server imports torch
def test_after_the_death_of_the_server_ranks_can_be_replaced(pool: Pool):
    pool.start(PoolOptions(num_processes=2))
    server = servers.warm_server().pid
    os.kill(server, signal.SIGKILL)
    while len(pool.lost) < 2:
        time.sleep(0.01)  # the pool's thread is told
    with pytest.raises(PoolError, match="forked from has ended") as caught:
        run(pool, "rank")
    assert "%distributed restart 0" in str(caught.value)
    assert pool.restart(0) == [0, 1]
    assert run(pool, "rank") == [0, 1]
    assert servers.warm_server().pid != server


@pytest.mark.slow  # another server imports torch
def test_when_the_server_dies_in_a_cell_it_is_told_that_the_variables_of_all_ranks_are_lost(pool: Pool):
    pool.start(PoolOptions(num_processes=2))
    code = "import os, signal, time\nif rank == 0:\n    os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    with pytest.raises(PoolError, match="forked from has ended") as caught:
        run(pool, code)
    assert "them again: %distributed restart" in str(caught.value)
    assert "kept" not in str(caught.value)
    assert pool.restart(0) == [0, 1]


def test_a_pool_is_idle_when_its_cell_in_the_background_has_ended(pool: Pool):
    pool.start(PoolOptions(num_processes=1))
    handle = CellHandle(pool, pool.begin(read_cell("1"), CellOptions(progress="off"), variables={}))
    assert handle.wait(30)
    assert (pool.state, pool.accepts_cells) == (PoolState.IDLE, True)
