"""Sessions where the system refuses what the package uses elsewhere: sandboxes, containers without ``/proc``."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.kernels import Kernel
from fixtures.refusals import place_without, why_no_place

SUM = """%%distributed
import torch
from nb_accelerate import Accelerator
acc = Accelerator(cpu=True)
print(int(acc.reduce(torch.ones(1)).item()))
"""
LIMIT = 15.0
"""Seconds for what takes one or two here, and minutes where ranks miss one another."""


def kernel_without(what: str) -> Iterator[Kernel]:
    if reason := why_no_place(what):
        pytest.skip(reason)
    one = Kernel(within=place_without(what))
    one.run("%load_ext nb_accelerate\nfrom nb_accelerate import notebook_launcher").ok()
    yield one
    one.close()


@pytest.fixture(
    scope="module",
    params=["/proc", *(pytest.param(call, marks=pytest.mark.slow) for call in ("memfd_create", "pidfd_open", "prctl"))],
)
def notebook(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    yield from kernel_without(request.param)


@pytest.mark.may_leave("processes", "files")  # of ranks that stay; the last test looks
class TestSession:
    """One notebook for each place, and in it what people do."""

    @pytest.mark.slow
    def test_a_launch_returns_values_and_its_ranks_exchange_tensors(self, notebook: Kernel) -> None:
        notebook.run(
            "def train(a):\n"
            "    import torch\n"
            "    from nb_accelerate import Accelerator\n"
            "    return int(Accelerator(cpu=True).reduce(torch.full((1,), a)).item())"
        ).ok()
        notebook.run("assert notebook_launcher(train, (21,), 2, progress='off') == [42, 42]").ok()

    def test_cells_take_names_along(self, notebook: Kernel) -> None:
        notebook.run("import numpy as np\nnumbers = np.arange(1_000_000)\nword = 'shipped'").ok()
        assert "shipped 499999500000" in notebook.run("%%distributed -n 2\nprint(word, numbers.sum())").ok().stdout
        assert notebook.run(SUM).ok().stdout == "2\n"

    def test_an_error_takes_the_others_out_of_their_collective_and_they_keep_their_variables(
        self, notebook: Kernel
    ) -> None:
        failed = notebook.run(
            "%%distributed\nkept = 5\nif rank == 1: raise ValueError('mine')\nacc.reduce(torch.ones(1))", timeout=LIMIT
        )
        assert (failed.error, failed.message) == ("ValueError", "mine")
        assert notebook.run("%%distributed\nprint(kept)").ok().stdout == "5\n"

    def test_an_interrupt_ends_the_cell(self, notebook: Kernel) -> None:
        cell = notebook.start("%%distributed\nimport time\nprint('waits', flush=True)\ntime.sleep(100)")
        notebook.wait_for_output(cell, "waits")
        notebook.interrupt()
        assert notebook.finish(cell, LIMIT).error == "KeyboardInterrupt"

    def test_a_new_rank_meets_the_others(self, notebook: Kernel) -> None:
        assert "rank 1 is new" in notebook.run("%distributed restart 1", timeout=LIMIT).ok().stdout
        assert notebook.run(SUM).ok().stdout == "2\n"
        died = notebook.run("%%distributed\nif rank == 1: import os; os.kill(os.getpid(), 9)")
        assert died.error == "RankDiedError"
        assert "rank 1 is new" in notebook.run("%distributed restart 1", timeout=LIMIT).ok().stdout
        assert notebook.run(SUM).ok().stdout == "2\n"

    @pytest.mark.slow
    def test_the_panel_is_printed_and_a_checkpoint_read_again(self, notebook: Kernel) -> None:
        notebook.put("nb_accelerate.notebook.display.drawing.lines._FIRST", 0.2)
        notebook.run("import tempfile\nfolder = tempfile.mkdtemp()").ok()
        assert notebook.run(SUM).ok().stdout.endswith("2\n")
        trained = notebook.run(
            "%%distributed --progress text\n"
            "import time\n"
            "model = torch.nn.Linear(2, 2)\n"
            "rows = torch.utils.data.DataLoader(torch.ones(80, 2), batch_size=2, num_workers=1)\n"
            "model, optimizer, rows = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), rows)\n"
            "for batch in rows:\n"
            "    acc.backward(model(batch).sum())\n"
            "    optimizer.step()\n"
            "    time.sleep(0.1)\n"  # for more than the second after which a panel appears
            "acc.save_state(folder)\n"
            "acc.load_state(folder)"
        ).ok()
        assert "/20 (" in trained.stdout
        notebook.run("import shutil\nshutil.rmtree(folder)").ok()

    def test_status_lists_the_ranks_and_nothing_is_left_after_the_end(self, notebook: Kernel) -> None:
        listed = notebook.run("%distributed status").ok().stdout
        assert [line.split()[0] for line in listed.splitlines()[2:]] == ["0", "1"]
        assert "the ranks have ended" in notebook.run("%distributed stop").ok().stdout
        notebook.run("%unload_ext nb_accelerate").ok()
        assert psutil.wait_procs(notebook.processes(), LIMIT)[1] == []
        assert list(Path(tempfile.gettempdir()).glob("nb-*")) == []


@pytest.fixture(scope="module")
def without_netlink() -> Iterator[Kernel]:
    yield from kernel_without("netlink")


@pytest.mark.slow
def test_without_netlink_ranks_run_and_what_connects_them_says_what_is_missing(without_netlink: Kernel) -> None:
    without_netlink.run("assert notebook_launcher(abs, (-3,), 2, progress='off') == [3, 3]").ok()
    without_netlink.run(
        "def train():\n"
        "    import torch\n"
        "    from nb_accelerate import Accelerator\n"
        "    return int(Accelerator(cpu=True).reduce(torch.ones(1)).item())"
    ).ok()
    without_netlink.run("assert notebook_launcher(train, (), 1, progress='off') == [1]").ok()
    for code in ("notebook_launcher(train, (), 2, progress='off')", "%%distributed -n 2\npass"):
        failed = without_netlink.run(code)
        assert failed.error == "DistBackendError"
        assert "sandbox refuses that (Operation" in failed.message
        assert "num_processes=1" in failed.message
    without_netlink.run("%unload_ext nb_accelerate").ok()


def test_a_new_rank_meets_the_others_over_a_socket(kernel: Kernel) -> None:
    """As on macOS, where torch cannot open a file without a name."""
    kernel.run("import nb_accelerate.notebook.launch.rendezvous as here\nhere._file_without_name = lambda: -1").ok()
    kernel.run("%load_ext nb_accelerate").ok()
    assert kernel.run(SUM.replace("distributed", "distributed -n 2", 1)).ok().stdout.endswith("2\n")
    for rank in (1, 0):  # the second serves the store
        assert f"rank {rank} is new" in kernel.run(f"%distributed restart {rank}", timeout=LIMIT).ok().stdout
        assert kernel.run(SUM, timeout=LIMIT).ok().stdout == "2\n"
    kernel.run("%distributed stop").ok()


def test_a_suspended_rank_does_not_stop_the_kernel_where_sockets_have_small_buffers(kernel: Kernel) -> None:
    """8 kB, as on macOS."""
    kernel.run(
        "import socket\n"
        "pair = socket.socketpair\n"
        "def with_small_buffers(*kind):\n"
        "    ends = pair(*kind)\n"
        "    for end in ends: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)\n"
        "    return ends\n"
        "socket.socketpair = with_small_buffers"
    ).ok()
    kernel.run("%load_ext nb_accelerate").ok()
    kernel.run("%%distributed -n 2 --progress text\nimport os").ok()
    os.kill(int(kernel.run("%%rank 1\nprint(os.getpid())").ok().stdout), signal.SIGSTOP)
    cell = kernel.start(f"%%distributed --progress text\nlong = '{'x' * 13_000}'\nprint('rank', rank, 'goes on')")
    kernel.wait_for_output(cell, "rank 0 goes on")
    kernel.interrupt()
    kernel.wait_for_output(cell, "Interrupt once more to kill the rank")
    kernel.interrupt()
    assert kernel.finish(cell).error == "KeyboardInterrupt"
    kernel.run("%distributed stop").ok()
