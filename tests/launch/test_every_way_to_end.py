"""A table: every way a rank can end badly, for every start method and number of ranks.

Each ends within its deadline, with the right error, and leaves nothing; afterwards the same process launches again.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from fixtures.deadlines import every_rank_is_heard, log_of, overdue_when
from fixtures.leaks import started_by
from fixtures.ranks import RunRanks

from nb_accelerate.errors import DeadlineError, RankDiedError, RemoteError, ShippingError
from nb_accelerate.launchers import notebook_launcher
from nb_accelerate.notebook.launch import Launch
from nb_accelerate.notebook.protocol.messages import NUDGE
from nb_accelerate.notebook.ranks.request import Request
from nb_accelerate.notebook.ranks.timeouts import Timeouts

HANGS = "from here on it hangs"
"""What the rank that does says."""


def my_rank() -> int:
    return int(os.environ["RANK"])


def is_last() -> bool:
    return my_rank() == int(os.environ["WORLD_SIZE"]) - 1


def others_wait() -> None:
    """What the ranks that do not fail do: they wait in a collective for one that will not come."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if not is_last():
            dist.barrier()


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Stubborn(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("I stay here")


def raises() -> None:
    others_wait()
    if is_last():
        raise Odd(1, 2)


def raises_on_import() -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "a_module_that_breaks":
                raise ImportError("broken on import")

    others_wait()
    if is_last():
        sys.meta_path.insert(0, Finder())
        __import__("a_module_that_breaks")


def exits() -> None:
    others_wait()
    if is_last():
        sys.exit(7)


def exits_at_once() -> None:
    others_wait()
    if is_last():
        os._exit(8)


def segfaults() -> None:
    others_wait()
    if is_last():
        ctypes.string_at(0)


def is_killed() -> None:
    others_wait()
    if is_last():
        os.kill(os.getpid(), signal.SIGKILL)


def is_aborted() -> None:
    others_wait()
    if is_last():
        os.abort()


def is_terminated() -> None:
    others_wait()
    if is_last():
        os.kill(os.getpid(), signal.SIGTERM)


def hangs_in_c() -> None:
    others_wait()
    if is_last():
        print(HANGS, flush=True)
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # never looks for signals, never gives up the interpreter's lock


def hangs_in_a_collective() -> None:
    others_wait()
    if is_last():
        print(HANGS, flush=True)
        threading.Event().wait()


def ignores_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    others_wait()
    if is_last():
        raise Odd(1, 2)


def returns_rows() -> object:
    if is_last():
        return (rank for rank in ())
    return my_rank()


def raises_what_refuses_to_be_pickled() -> None:
    others_wait()
    if is_last():
        raise Stubborn("no way out")


def raises_what_cannot_be_pickled() -> None:
    class Hopeless(Exception):
        ranks = (rank for rank in ())

    others_wait()
    if is_last():
        raise Hopeless("no way out")


def floods() -> None:
    others_wait()
    if is_last():
        for number in range(20_000):
            print(f"line {number}")
        raise Odd(1, 2)


def dies_with_loader_workers() -> None:
    import torch

    others_wait()
    if is_last():
        loader = torch.utils.data.DataLoader(list(range(1000)), num_workers=2, persistent_workers=True)
        next(iter(loader))
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Expected:
    kind: type[BaseException]
    text: str
    check: Callable[[Any], bool] = lambda _: True
    overdue: Callable[[Request], bool] = lambda _: False


def hangs_now(request: Request) -> bool:
    return HANGS in log_of(request, len(request.ranks) - 1)


WAYS: dict[Callable[[], object], Expected] = {
    raises: Expected(Odd, "1 and 2"),
    raises_on_import: Expected(ImportError, "broken on import"),
    exits: Expected(RankDiedError, r"called sys.exit\(7\)", lambda e: e.exitcode == 7),
    exits_at_once: Expected(RankDiedError, "exit code 8", lambda e: e.exitcode == 8),
    segfaults: Expected(RankDiedError, r"SIGSEGV \(segmentation fault\)", lambda e: e.signal is signal.SIGSEGV),
    is_killed: Expected(RankDiedError, "SIGKILL", lambda e: e.signal is signal.SIGKILL),
    is_aborted: Expected(RankDiedError, "SIGABRT", lambda e: e.signal is signal.SIGABRT),
    is_terminated: Expected(RankDiedError, "SIGTERM", lambda e: e.signal is signal.SIGTERM),
    hangs_in_c: Expected(DeadlineError, "timeout", lambda e: "hangs_in_c" in str(e.stacks), hangs_now),
    hangs_in_a_collective: Expected(DeadlineError, "timeout", lambda e: "hangs_in_a_coll" in str(e.stacks), hangs_now),
    ignores_signals: Expected(Odd, "1 and 2"),
    returns_rows: Expected(ShippingError, "the returned value", lambda e: e.results == dict(enumerate_others(e))),
    raises_what_refuses_to_be_pickled: Expected(Stubborn, "no way out"),
    raises_what_cannot_be_pickled: Expected(RemoteError, r"raised .*Hopeless: no way out"),
    floods: Expected(Odd, "1 and 2"),
    dies_with_loader_workers: Expected(RankDiedError, "SIGKILL"),
}


def enumerate_others(error: Any) -> list[tuple[int, int]]:
    return [(rank, rank) for rank in error.results]


def table() -> list[Any]:
    """Every way on two ranks is in the fast suite; one rank alone, and more than two, are in the slow one.

    Each rank of ``spawn`` is an interpreter that starts and imports torch: there, ranks wait for the one that ends in
    the first way, in a death and in a hang.
    """
    sizes = {"forkserver": (1, 2, 4), "fork": (1, 4), "spawn": (1,)}
    more = {("spawn", raises): (1, 4), ("spawn", is_killed): (1, 4), ("fork", is_killed): (1, 2, 4)}
    more["spawn", hangs_in_a_collective] = (2,)
    rows = []
    for way in WAYS:
        for method, usual in sizes.items():
            for world_size in more.get((method, way), usual):
                fast = (method, world_size) == ("forkserver", 2) and way not in (hangs_in_c, hangs_in_a_collective)
                fast |= (method, world_size) == ("fork", 2) and way is is_killed
                name = f"{way.__name__}-{method}-{world_size}"
                rows.append(pytest.param(way, method, world_size, id=name, marks=[pytest.mark.slow] * (not fast)))
    return rows


@pytest.mark.parametrize(("way", "method", "world_size"), table())
def test_a_bad_end_is_the_right_error_and_the_machine_is_clean(
    run_ranks: RunRanks, way: Callable[[], object], method: str, world_size: int
) -> None:
    expected, before = WAYS[way], started_by(psutil.Process())
    with (
        overdue_when(expected.overdue),
        every_rank_is_heard(),
        pytest.raises(expected.kind, match=expected.text) as caught,
    ):
        run_ranks(way, world_size=world_size, start_method=method)
    assert expected.check(caught.value), caught.value
    left = [process for process in started_by(psutil.Process()) if process not in before]
    assert left == []  # neither a rank nor a loader's worker
    assert run_ranks(my_rank, world_size=world_size) == list(range(world_size))


def test_the_output_before_a_segfault_is_there(run_ranks: RunRanks) -> None:
    def prints_and_crashes() -> None:
        print("to stdout", end="")
        os.write(2, b"from C to stderr\n")
        ctypes.string_at(0)

    with pytest.raises(RankDiedError) as caught:
        run_ranks(prints_and_crashes, world_size=1)
    assert "to stdout" in caught.value.output
    assert "from C to stderr" in caught.value.output


def test_the_first_cause_wins_over_its_consequences(run_ranks: RunRanks) -> None:
    def one_dies_and_the_other_notices() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if my_rank() == 1:
            os._exit(5)
        dist.all_reduce(torch.ones(1))  # gloo: connection closed by peer, a moment later

    for _ in range(5):
        with pytest.raises(RankDiedError) as caught:
            run_ranks(one_dies_and_the_other_notices)
        assert (caught.value.rank, caught.value.exitcode) == (1, 5)


def test_an_error_is_not_held_back_once_every_rank_has_answered(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_raise() -> None:
        raise Odd(1, 2)

    monkeypatch.setattr(Launch, "timeouts", Timeouts(ask=55.0))
    began = time.monotonic()
    with pytest.raises(Odd):
        run_ranks(all_raise)
    assert time.monotonic() - began < 40.0


def test_where_a_rank_was_on_the_way_to_its_own_end_is_not_told(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def one_fails_first(folder: str) -> None:
        here = Path(folder)
        here.joinpath(f"begun-{my_rank()}").touch()
        while len(list(here.glob("begun-*"))) < 3 or (my_rank() and not here.joinpath("fails").exists()):
            time.sleep(0.01)
        here.joinpath("fails").touch()
        time.sleep(0.3 * my_rank())
        if my_rank() < 2:
            raise Odd(1, 2)

    monkeypatch.setattr(Launch, "timeouts", Timeouts(ask=55.0))
    with pytest.raises(Odd) as caught:
        run_ranks(one_fails_first, str(tmp_path), world_size=3)
    (note,) = caught.value.__notes__
    # Of both, but for a machine that was too busy to let the second one raise in time.
    assert re.fullmatch(r"Raised by (rank [01]|ranks 0-1) of 3\.", note)


@pytest.mark.slow
def test_where_a_rank_waits_is_told_and_not_where_it_was_on_the_way_there(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def on_the_way(folder: str) -> None:
        while not Path(folder, "fails").exists():
            time.sleep(0.01)
        time.sleep(0.2)

    def stays() -> None:
        time.sleep(600)

    def one_fails(folder: str) -> None:
        if my_rank() == 1:
            Path(folder, "fails").touch()
            os._exit(5)
        on_the_way(folder)
        stays()

    monkeypatch.setattr(Launch, "timeouts", Timeouts(ask=6.0))
    with pytest.raises(RankDiedError) as caught:
        run_ranks(one_fails, str(tmp_path))
    assert "Meanwhile rank 0" in caught.value.__notes__[-1]


def test_ranks_are_nudged_after_an_interrupt_and_not_interrupted_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def counts(folder: str) -> None:
        seen: list[int] = []
        for number in (signal.SIGINT, NUDGE):
            signal.signal(number, lambda number, _: seen.append(number))
        Path(folder, "ready").touch()
        while seen.count(NUDGE) < 3:
            time.sleep(0.01)
        if seen.count(signal.SIGINT) == 1:
            Path(folder, "done").touch()

    monkeypatch.setattr(Launch, "timeouts", Timeouts(interrupt=50.0))
    handle = notebook_launcher(counts, (str(tmp_path),), num_processes=1, block=False, progress="off")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    handle.interrupt()
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    assert (tmp_path / "done").exists()


def test_an_interrupt_leaves_a_save_in_the_background_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def saves_and_trains(path: str) -> None:
        from nb_accelerate.training.checkpoint.background import CheckpointHandle, SaveGroup, saves

        def write() -> None:
            time.sleep(0.5)
            Path(path, "saved").touch()

        saves.start(CheckpointHandle(Path(path)), write, SaveGroup("alone", 1))
        Path(path, "ready").touch()
        while True:
            time.sleep(0.001)

    monkeypatch.setattr(Launch, "timeouts", Timeouts(interrupt=0.1, unwind=0.1, terminate=0.02))
    handle = notebook_launcher(saves_and_trains, (str(tmp_path),), num_processes=1, block=False, progress="off")
    while not (tmp_path / "ready").exists():
        assert not handle.wait(0.01), repr(handle)
    handle.interrupt()
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    assert (tmp_path / "saved").exists()
    assert "rank 0 is saving" in capfd.readouterr().err


def test_a_late_abort_after_the_answer_is_no_failure(run_ranks: RunRanks) -> None:
    def leaves_badly() -> int:
        import atexit

        atexit.register(os.abort)
        return my_rank()

    assert run_ranks(leaves_badly) == [0, 1]


def test_exit_handlers_of_users_run(run_ranks: RunRanks, tmp_path: Any) -> None:
    def registers(path: str) -> None:
        import atexit
        import pathlib

        atexit.register(pathlib.Path(path, str(my_rank())).touch)

    run_ranks(registers, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_exit_handlers_have_their_time_also_if_a_value_could_not_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registers(path: str) -> object:
        import atexit
        import pathlib

        def ends_slowly() -> None:
            time.sleep(0.3)
            pathlib.Path(path, str(my_rank())).touch()

        atexit.register(ends_slowly)
        return returns_rows()

    monkeypatch.setattr(Launch, "timeouts", Timeouts(unwind=0.02))
    with pytest.raises(ShippingError):
        notebook_launcher(registers, (str(tmp_path),), num_processes=2, progress="off")
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@pytest.mark.slow
def test_a_rank_that_does_not_leave_is_ended(run_ranks: RunRanks) -> None:
    def will_not_leave() -> int:
        import atexit

        atexit.register(threading.Event().wait)
        return my_rank()

    assert run_ranks(will_not_leave) == [0, 1]


def _only_in_ranks(rank: int) -> int:
    if "RANK" not in os.environ:
        raise LookupError(f"the value of rank {rank} is for ranks only")
    return rank


class _Homesick:
    """A value that can be pickled in a rank, and not be unpickled anywhere else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_in_ranks, (int(os.environ["RANK"]),)


def _returns_what_only_rank_1_can_read() -> Any:
    return _Homesick() if os.environ["RANK"] == "1" else [0, 1, 2]


def test_values_that_can_be_unpickled_are_kept_beside_one_that_cannot() -> None:
    with pytest.raises(LookupError, match="value of rank 1") as caught:
        notebook_launcher(_returns_what_only_rank_1_can_read, (), 3, progress="off")
    results = caught.value.results  # type: ignore[attr-defined]
    assert [*results] == [0, 2]
    assert results[2] == [0, 1, 2]
