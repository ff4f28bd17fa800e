"""Waits of correct programs are neither ended nor blamed; those that cannot end are told with the lines of both ranks.

The thresholds are a small part of the real ones, and each wait is several times as long.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from fixtures.actor_ranks import SOON, ActorRank

from nb_accelerate.errors import DeadlockError
from nb_accelerate.notebook.launch import Launch, notebook_launcher
from nb_accelerate.notebook.ranks.failing import hang
from nb_accelerate.notebook.ranks.failing.hang import HangWatch
from nb_accelerate.notebook.ranks.failing.incidents import Wording
from nb_accelerate.notebook.ranks.proxy import RankProxy
from nb_accelerate.notebook.ranks.request import Request
from nb_accelerate.notebook.ranks.steps import call_steps
from nb_accelerate.notebook.ranks.timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.ranks.loop import RankLoop

QUICK = Timeouts(quiet=0.1, told=0.3, deadlock=0.6)
LONG = 1.6
"""Seconds for which rank 0 waits."""


def later(action: Callable[[], object]) -> None:
    """Do something in another thread of this rank, when the other one has waited for long."""
    threading.Timer(LONG, action).start()


def sleeps() -> None:
    time.sleep(LONG)


def sorts() -> None:
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        sorted(range(100_000, 0, -1), key=str)


def holds_the_interpreter() -> None:
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        sum(range(30_000_000))


def writes_a_file() -> None:
    end = time.monotonic() + LONG
    with open(f"/tmp/nb-waits-{os.getpid()}", "wb") as file:
        os.unlink(file.name)
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())


def runs_a_program() -> None:
    subprocess.run(["sleep", str(LONG)], check=True)


def is_stopped() -> None:
    subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep {LONG}; kill -CONT {os.getpid()}"]).wait()


def waits_for_a_lock_of_a_file() -> None:
    with open(f"/tmp/nb-waits-{os.getpid()}", "wb") as file, open(file.name, "wb") as other:
        os.unlink(file.name)
        fcntl.flock(other, fcntl.LOCK_EX)
        later(lambda: fcntl.flock(other, fcntl.LOCK_UN))
        fcntl.flock(file, fcntl.LOCK_EX)


def waits_for_a_socket() -> None:
    ours, others = socket.socketpair()
    later(lambda: others.send(b"!"))
    ours.recv(1)


def waits_for_a_queue() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: (time.sleep(LONG), queue.put(1)))
    child.start()
    queue.get()
    child.join()


def waits_for_a_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, LONG)
    signal.sigwait({signal.SIGALRM})


def waits_for_a_coroutine() -> None:
    import asyncio

    asyncio.run(asyncio.sleep(LONG))


def waits_for_an_event_of_a_thread() -> None:
    event = threading.Event()
    later(event.set)
    event.wait()


def reads_a_slow_dataset() -> None:
    class Slow(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            time.sleep(LONG / 2)
            return index

    assert len(list(torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))) == 2


BEFORE_A_BARRIER = [
    sleeps,
    sorts,
    holds_the_interpreter,
    writes_a_file,
    runs_a_program,
    is_stopped,
    waits_for_a_lock_of_a_file,
    waits_for_a_socket,
    waits_for_a_queue,
    waits_for_a_signal,
    waits_for_a_coroutine,
    waits_for_an_event_of_a_thread,
    reads_a_slow_dataset,
]


def one_is_late(rank: int, wait: Callable[[], None]) -> None:
    if rank == 1:
        wait()
    dist.barrier()


def threads_bring_what_main_threads_wait_for(rank: int) -> None:
    later(lambda: dist.send(torch.ones(1), 1 - rank))
    dist.recv(torch.ones(1), 1 - rank)


def a_thread_of_one_that_has_returned_brings_it(rank: int) -> None:
    if rank == 1:
        later(lambda: dist.send(torch.ones(1), 0))
    else:
        dist.recv(torch.ones(1), 1)


def a_simulator_in_a_thread_goes_first(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank == 0:
        later(lambda: dist.send(torch.ones(1), 1, group=group))
        dist.recv(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0, group=group)
        dist.send(torch.ones(1), 0)


def one_is_in_a_group_of_its_own(rank: int) -> None:
    groups = [dist.new_group([one]) for one in (0, 1)]
    dist.barrier(group=groups[rank])
    if rank == 1:
        time.sleep(LONG)
        dist.barrier(group=groups[1])
    dist.barrier()


def groups_are_nested(rank: int) -> None:
    outer, inner = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        work = dist.barrier(group=outer, async_op=True)
        dist.barrier(group=inner)
    else:
        time.sleep(LONG)
        dist.barrier(group=inner)
        work = dist.barrier(group=outer, async_op=True)
    assert work is not None
    work.wait()


def a_barrier_is_monitored(rank: int) -> None:
    if rank == 1:
        time.sleep(LONG)
    dist.monitored_barrier()


def a_communication_hook_is_slow(rank: int) -> None:
    def hook(_: Any, bucket: Any) -> Any:
        if rank == 1:
            time.sleep(LONG)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0] / 2)

    hook.__annotations__.clear()  # torch compares them with types, and here they are strings
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 2)).sum().backward()


OF_THEIR_OWN = [
    threads_bring_what_main_threads_wait_for,
    a_thread_of_one_that_has_returned_brings_it,
    a_simulator_in_a_thread_goes_first,
    one_is_in_a_group_of_its_own,
    groups_are_nested,
    a_barrier_is_monitored,
    a_communication_hook_is_slow,
]


def in_a_group(function: Callable[..., None], *args: object) -> str:
    dist.init_process_group("gloo")
    function(dist.get_rank(), *args)
    return "went on"


@pytest.mark.slow
@pytest.mark.parametrize(
    "called",
    [*((one_is_late, one) for one in BEFORE_A_BARRIER), *((one,) for one in OF_THEIR_OWN)],
    ids=lambda called: called[-1].__name__,
)
def test_a_wait_that_ends_is_neither_ended_nor_told_to_interrupt(
    called: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Launch, "timeouts", QUICK)
    assert notebook_launcher(in_a_group, called, 2, progress="off") == ["went on"] * 2
    said = capfd.readouterr().err
    assert "nterrupt" not in said
    assert "by itself" not in said


def other_collectives(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))


def both_receive(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)


def one_waits_for_nothing(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        threading.Event().wait()


def one_has_a_batch_more(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        model(torch.ones(1, 2)).sum().backward()
    else:
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("wait", [other_collectives, both_receive, one_waits_for_nothing, one_has_a_batch_more])
def test_a_wait_that_cannot_end_is_told_with_both_lines(
    wait: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Launch, "timeouts", QUICK)
    launch = notebook_launcher(in_a_group, (wait,), 2, block=False, progress="off")
    assert isinstance(launch, Launch)
    said, deadline = "", time.monotonic() + 30.0
    while "so far" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        launch.wait(0.05)
    launch.stop()
    first = wait.__code__.co_firstlineno
    told = {int(line) - first for line in re.findall(rf"{wait.__name__}, [^;]*:(\d+)", said)}
    last = max(line for _, _, line in wait.__code__.co_lines() if line) - first
    assert len(told) == 2, said
    assert all(0 < line <= last for line in told)


def one_has_returned(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def one_has_left_a_loop_with_a_bar_and_workers(rank: int) -> None:
    from tqdm import tqdm

    for batch in tqdm(torch.utils.data.DataLoader(list(range(8)), num_workers=1, multiprocessing_context="fork")):
        if rank == 1 and batch == 2:
            return
        dist.barrier()


@pytest.mark.parametrize("wait", [one_has_returned, one_has_left_a_loop_with_a_bar_and_workers])
def test_a_wait_for_a_rank_that_has_returned_is_told_and_ends_by_itself(
    wait: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Launch, "timeouts", QUICK)
    with pytest.raises(DeadlockError, match=r"rank 0\b.*1 has finished"):
        notebook_launcher(in_a_group, (wait,), 2, progress="off")
    assert "by itself after 0.6" in capfd.readouterr().err


def test_a_wait_is_told_within_fifteen_seconds(loop: RankLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now))
    ranks = [RankProxy(ActorRank(rank, None)) for rank in range(2)]
    for rank, line in zip(ranks, ("/torch/distributed/distributed_c10d.py", "train.py"), strict=True):
        loop.add(rank)
        rank.stacks[:] = f'Stack (most recent call first):\n  File "{line}", line 9 in barrier\n'.encode()
        monkeypatch.setattr(rank, "ask_for_stacks", lambda: None)
    said: list[str] = []
    request = Request(
        ranks=ranks, send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=2, say=said.append
    )
    watch = HangWatch(request, Timeouts())
    began = now
    while not said and now < began + 60.0:
        now = watch.due
        watch.act()
    assert now - began <= 15.0
