"""Interrupting a cell: the kernel's stop button, whatever the ranks are doing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.kernels import Kernel

from nb_accelerate.notebook.ranks.timeouts import Timeouts

SETUP = """
import functools, os, signal, threading, time
import torch, torch.distributed  # as a notebook has: a forked rank then need not import it
from nb_accelerate import notebook_launcher
launch = functools.partial(notebook_launcher, progress="off")

def rank():
    return int(os.environ["RANK"])

def say_here():
    print("here", rank(), flush=True)

def in_python():
    say_here()
    while True:
        pass

def in_sleep():
    say_here()
    time.sleep(600)

def in_c():
    say_here()
    sum(range(10**13))

def in_a_collective():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    say_here()
    if rank() == 0:
        dist.barrier()
    time.sleep(600)

class Endless:
    def __len__(self):
        return 10
    def __getitem__(self, index):
        time.sleep(600)

def in_a_loader():
    import torch
    loader = torch.utils.data.DataLoader(Endless(), num_workers=2)
    iterator = iter(loader)
    say_here()
    next(iterator)

def deaf():
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    say_here()
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernel, and what is forked from it, writes its stacks when SIGUSR1 comes."""
    return tmp_path_factory.mktemp("stacks") / "of-all"


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel, stacks: Path) -> Kernel:
    shared_kernel.warm_up()
    shared_kernel.run(SETUP).ok()
    shared_kernel.run(
        f"import faulthandler; stacks = open({str(stacks)!r}, 'w')\n"
        "faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)"
    ).ok()
    shared_kernel.run("launch(rank, (), 2)").ok()
    return shared_kernel


def start_two(notebook: Kernel, function: str, options: str = "") -> str:
    cell = notebook.start(f"launch({function}, (), 2{options})")
    seen = notebook.wait_for_output(cell, "here")
    for number in (0, 1):
        if f"here {number}" not in seen:
            seen += notebook.wait_for_output(cell, f"here {number}")
    return cell


def show_stacks(notebook: Kernel, stacks: Path) -> None:
    """Print where the kernel and every process forked from it is."""
    kernel = psutil.Process(notebook.pid)
    for process in (kernel, *notebook.processes()):
        if process.cmdline() != kernel.cmdline():
            continue  # not forked from it, so without its handler: the signal would end it
        print(f"--- {process.pid} {process.name()}, {process.status()}")
        begin, deadline = stacks.stat().st_size, time.monotonic() + 1.0
        process.send_signal(signal.SIGUSR1)
        while stacks.stat().st_size == begin and time.monotonic() < deadline:
            time.sleep(0.02)  # there is no event for what another process writes into a file
        print(stacks.read_bytes()[begin:].decode() or "no answer")


@pytest.fixture
def _clean(notebook: Kernel, stacks: Path) -> Iterator[None]:
    before = notebook.counts()
    yield
    if not notebook.settles_at(before):
        left = before, notebook.counts(), notebook.processes()
        show_stacks(notebook, stacks)
        for _ in range(2):  # or the tests after this one would wait for its cell
            notebook.interrupt()
        pytest.fail(f"before, after, processes: {left}")
    assert notebook.run("launch(rank, (), 2)").ok().displays[0]["text/plain"] == "[0, 1]"


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("way", ["in_python", "in_sleep", "in_c", "in_a_collective", "in_a_loader"])
@pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fork", "spawn"))]
)
def test_an_interrupt_is_a_keyboard_interrupt(notebook: Kernel, way: str, method: str) -> None:
    cell = start_two(notebook, way, f", start_method={method!r}")
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"


def test_ranks_that_do_not_react_to_an_interrupt_are_killed_within_two_seconds() -> None:
    # Not by a clock: on a busy machine it would say how busy that is.
    assert Timeouts().interrupt + Timeouts().terminate < 2.0


@pytest.mark.usefixtures("_clean")
def test_a_second_interrupt_kills_at_once(notebook: Kernel) -> None:
    cell = start_two(notebook, "deaf")
    notebook.interrupt()
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"


@pytest.mark.usefixtures("_clean")
def test_ranks_that_ignore_every_signal_are_killed_after_the_first(notebook: Kernel) -> None:
    cell = start_two(notebook, "deaf")
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"


@pytest.fixture
def _patient(notebook: Kernel) -> Iterator[None]:
    """A kernel whose ranks are given half a minute to react to an interrupt."""
    notebook.set_timeouts("nb_accelerate.notebook.launch.Launch", interrupt=30.0)
    yield
    notebook.set_timeouts("nb_accelerate.notebook.launch.Launch", interrupt=Timeouts.interrupt)


@pytest.mark.usefixtures("_clean", "_patient")
def test_users_code_may_handle_the_interrupt_and_clean_up(notebook: Kernel) -> None:
    notebook.run(
        "def tidy():\n"
        "    try:\n"
        "        in_sleep()\n"
        "    except KeyboardInterrupt:\n"
        "        print('tidied', rank())\n"
        "        raise\n"
    ).ok()
    cell = start_two(notebook, "tidy")
    notebook.interrupt()
    ended = notebook.finish(cell)
    assert ended.error == "KeyboardInterrupt"
    assert sorted(ended.stdout.split("\n")[:-1]) == ["[rank 0] tidied 0", "[rank 1] tidied 1"]


LATE_RANK = """
from nb_accelerate.notebook.launch import Launch
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.timeouts import Timeouts
Launch.timeouts = Timeouts(interrupt=30.0)
forks, gate = 0, os.pipe()

def count():
    global forks
    forks += 1

def wait():
    if forks == 3:  # the server, rank 0, rank 1
        os.read(gate[0], 1)

os.register_at_fork(before=count, after_in_child=wait)
def open_when_interrupted(loop):
    if any(request.was_interrupted for request in loop.requests):
        os.write(gate[1], b".")

RankLoop.observers.append(open_when_interrupted)

def leaves_a_trace(folder):
    open(os.path.join(folder, str(rank())), "x").close()
    in_sleep()
"""


@pytest.mark.slow
def test_a_rank_that_is_not_ready_when_the_interrupt_comes_never_runs_the_function(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run(SETUP).ok()
    kernel.run(LATE_RANK).ok()
    cell = kernel.start(f"launch(leaves_a_trace, ({str(tmp_path)!r},), 2, start_method='fork')")
    kernel.wait_for_output(cell, "here 0")
    kernel.interrupt()
    assert kernel.finish(cell).error == "KeyboardInterrupt"
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.usefixtures("_clean")
def test_an_interrupt_between_launches_reaches_neither_the_warm_server_nor_the_next_launch(notebook: Kernel) -> None:
    server = notebook.server().pid
    for _ in range(3):
        os.kill(server, signal.SIGINT)
        notebook.interrupt()
    notebook.run("launch(rank, (), 2)").ok()
    assert notebook.server().pid == server


@pytest.mark.usefixtures("_clean")
def test_a_launch_in_the_background_is_not_hit_by_the_interrupt_of_another_cell(notebook: Kernel) -> None:
    notebook.run(
        "def waits_for(path):\n"
        "    say_here()\n"
        "    while not os.path.exists(path):\n"
        "        time.sleep(0.01)\n"
        "    return rank()\n"
        "import tempfile\nflag = tempfile.mktemp()\n"
        "background = launch(waits_for, (flag,), 2, block=False)"
    ).ok()
    cell = start_two(notebook, "in_sleep")
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"
    assert notebook.run("background.status()").ok().value == "'running'"
    assert notebook.run("open(flag, 'w').close(); print(background.result()); os.remove(flag)").stdout == "[0, 1]\n"


@pytest.mark.parametrize(
    ("way", "method"),
    [
        ("in_c", "forkserver"),
        pytest.param("in_a_loader", "fork", marks=pytest.mark.slow),
        pytest.param("in_a_loader", "forkserver", marks=pytest.mark.slow),
        pytest.param("in_c", "fork", marks=pytest.mark.slow),
        pytest.param("in_c", "spawn", marks=pytest.mark.slow),
        pytest.param("in_a_loader", "spawn", marks=pytest.mark.slow),
    ],
)
def test_no_rank_outlives_a_kernel_that_was_killed(kernel: Kernel, way: str, method: str) -> None:
    kernel.run(SETUP).ok()
    start_two(kernel, way, f", start_method={method!r}")
    family = kernel.processes()
    assert len(family) >= 3  # a server and two ranks; the ranks' loader workers come on top
    os.kill(kernel.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30.0  # nothing else would end them
    while (alive := [process for process in family if not has_ended(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)  # there is no event for the end of somebody else's process
    assert alive == []


def has_ended(process: psutil.Process) -> bool:
    try:
        # Who became its parent may take its time to read how it ended.
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
