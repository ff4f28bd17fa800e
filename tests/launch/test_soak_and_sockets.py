"""Again and again in one kernel; and what listens meanwhile."""

from __future__ import annotations

import re

import psutil
import pytest
from fixtures.kernels import Kernel

from nb_accelerate.notebook.worker.connections import connections

SETUP = """
import functools, os, torch
from nb_accelerate import Accelerator, notebook_launcher
launch = functools.partial(notebook_launcher, progress="off")

def works(fail=False):
    accelerator = Accelerator()
    total = accelerator.reduce(torch.ones(1), "sum").item()
    if fail:
        raise ValueError("on purpose")
    return total

def again(times):
    for number in range(times):
        try:
            values = launch(works, (number % 10 == 9,), 1 + number % 3)
            assert values == [1 + number % 3] * (1 + number % 3), values
        except ValueError:
            assert number % 10 == 9
"""


def memory_of(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)


@pytest.mark.slow
@pytest.mark.limit(400)
def test_two_hundred_launches_in_one_kernel_leave_it_as_it_was(kernel: Kernel) -> None:
    kernel.run(SETUP).ok()
    kernel.run("again(10)").ok()
    before = kernel.counts()
    server = kernel.server().pid
    memory = memory_of(kernel.pid), memory_of(server)
    kernel.run("again(200)", timeout=380).ok()
    assert kernel.settles_at(before), (before, kernel.counts())
    assert kernel.server().pid == server
    grown = [now - then for now, then in zip((memory_of(kernel.pid), memory_of(server)), memory, strict=True)]
    assert max(grown) < 10 << 20, grown  # 50 KB a launch would be a leak


def listeners(kernel: Kernel) -> dict[tuple[str, int], set[int]]:
    """By address and port that the kernel or a process of its listens on, the process ids."""
    found: dict[tuple[str, int], set[int]] = {}
    for process in (psutil.Process(kernel.pid), *kernel.processes()):
        for connection in connections(process, "inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.setdefault(connection.laddr, set()).add(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", pytest.param("fork", marks=pytest.mark.slow)])
def test_of_a_launch_only_ranks_listen_and_not_beyond_loopback(kernel: Kernel, method: str) -> None:
    kernel.run(SETUP).ok()
    kernels_own = listeners(kernel)
    cell = kernel.start(
        "import time\n"
        "def stays():\n    works(); print(f'rank={os.getpid()}.', flush=True); time.sleep(600)\n"
        f"launch(stays, (), 2, start_method={method!r})"
    )
    seen = ""
    while len(ranks := re.findall(r"rank=(\d+)\.", seen)) < 2:
        seen += kernel.wait_for_output(cell, "rank=")
    found = {address: pids for address, pids in listeners(kernel).items() if address not in kernels_own}
    kernel.interrupt()
    kernel.finish(cell)
    assert {host for host, _ in found} == {"127.0.0.1"}
    # A socket that somebody else held too would still be open when the store behind it has gone.
    assert set().union(*found.values()) == set(map(int, ranks)), (found, ranks)
