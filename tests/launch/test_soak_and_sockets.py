"""Again and again in one kernel; and what listens meanwhile."""

from __future__ import annotations

import psutil
import pytest
from fixtures.kernels import Kernel

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


def listeners(processes: list[psutil.Process]) -> set[str]:
    found = set()
    for process in processes:
        found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_nothing_of_a_launch_listens_beyond_loopback(kernel: Kernel, method: str) -> None:
    kernel.run(SETUP).ok()
    cell = kernel.start(
        "import time\n"
        "def stays():\n    works(); print('here', flush=True); time.sleep(600)\n"
        f"launch(stays, (), 2, start_method={method!r})"
    )
    kernel.wait_for_output(cell, "here")
    found = listeners([psutil.Process(kernel.pid), *kernel.processes()])
    kernel.interrupt()
    kernel.finish(cell)
    assert found == {"127.0.0.1"}
