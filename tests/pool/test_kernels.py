"""Ranks of `%%distributed` and the kernels they belong to."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from fixtures.kernels import Kernel


def alive_after(seconds: float, processes: list[psutil.Process]) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while (alive := [one for one in processes if is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.02)  # there is no event for the end of somebody else's children
    return alive


def is_alive(process: psutil.Process) -> bool:
    """One that has ended may still be listed: its parent is gone, and init buries it when it comes to that."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.contract("cells: a kernel that is killed")
def test_no_rank_outlives_a_kernel_that_was_killed(kernel: Kernel) -> None:
    kernel.run("%load_ext nb_accelerate").ok()
    kernel.run("%%distributed\nprint(rank)").ok()
    family = kernel.processes()
    assert len(family) >= 3
    os.kill(kernel.pid, signal.SIGKILL)
    assert alive_after(2.0 + max(0.0, os.getloadavg()[0] - 2), family) == []


def test_stopping_while_a_cell_runs_leaves_nothing(kernel: Kernel) -> None:
    kernel.run("%load_ext nb_accelerate").ok()
    before = kernel.counts()
    kernel.run("%%distributed --background\nimport time\ntime.sleep(600)").ok()
    kernel.run("%distributed stop").ok()
    assert kernel.run("%distributed status").ok().stdout == "no ranks are running\n"
    assert kernel.settles_at(before), (before, kernel.counts(), kernel.processes())


@pytest.mark.slow
def test_two_notebooks_do_not_meet(kernel: Kernel, shared_kernel: Kernel) -> None:
    for number, one in enumerate((kernel, shared_kernel)):
        one.set_timeouts(
            "nb_accelerate.notebook.pool.Pool", fold=30.0
        )  # equal output is one line, however late a rank is
        one.run("%load_ext nb_accelerate").ok()
        one.run(f"%%distributed\nnumber = {number}").ok()
    code = (
        "%%distributed\nimport torch, torch.distributed as dist\n"
        "t = torch.tensor([number])\ndist.all_reduce(t)\nprint(t)"
    )
    assert [one.run(code).ok().stdout for one in (kernel, shared_kernel)] == ["tensor([0])\n", "tensor([2])\n"]
    for one in (kernel, shared_kernel):
        one.run("%unload_ext nb_accelerate").ok()


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_thousand_cells_leave_a_kernel_and_its_ranks_as_they_were(kernel: Kernel) -> None:
    kernel.run("%load_ext nb_accelerate").ok()
    kernel.run("import numpy as np\nrun = get_ipython().run_cell_magic").ok()
    cells = (
        "for i in range({}):\n"
        "    data = np.full(20_000, i)\n"
        "    run('distributed', '--out back --quiet', 'print(rank)\\nx = data.sum()\\ndisplay(x)\\nint(x)')\n"
        "    assert back == [20_000 * i] * 2\n"
    )
    kernel.run(cells.format(100), timeout=100).ok()
    before = kernel.counts(), memory(kernel)
    kernel.run(cells.format(1000), timeout=200).ok()
    assert kernel.settles_at(before[0]), (before[0], kernel.counts())
    growth = {pid: now - before[1][pid] for pid, now in memory(kernel).items()}
    assert max(growth.values()) < 10 << 20, growth
    kernel.run("%unload_ext nb_accelerate").ok()


def memory(kernel: Kernel) -> dict[int, int]:
    return {one.pid: one.memory_info().rss for one in (psutil.Process(kernel.pid), *kernel.processes())}


@pytest.mark.slow
def test_the_number_of_ranks_that_is_set_in_a_notebook_is_that_of_its_launches_too(kernel: Kernel) -> None:
    kernel.run("%load_ext nb_accelerate").ok()
    kernel.run("%distributed config -n 2").ok()
    launch = "import os, nb_accelerate\nnb_accelerate.notebook_launcher(lambda: os.environ['WORLD_SIZE']"
    cell = kernel.run(f"{launch})").ok()
    assert "num_processes=2: from %distributed config\n" in cell.stdout
    assert cell.displays == [{"text/plain": "['2', '2']"}]
    assert kernel.run(f"{launch}, num_processes=1)").ok().displays == [{"text/plain": "['1']"}]
    kernel.run("%unload_ext nb_accelerate").ok()
    assert kernel.run(f"{launch})").ok().displays == [{"text/plain": "['1']"}]
