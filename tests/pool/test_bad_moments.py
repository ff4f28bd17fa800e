"""What comes at a moment when nobody expects it: an interrupt before the ranks are asked, a rank that ends while a
value is being packed, a kernel that is kept from reading until a deadline has passed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
from fixtures.kernels import Kernel

SUM = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nprint(int(total.item()))"


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", fold=30.0)
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run(
        "import os, signal, threading, time\nimport nb_accelerate.notebook.pool\n"
        "from nb_accelerate.notebook.ranks.loop import RankLoop\n"
        "from nb_accelerate.notebook.ranks.steps import StepKind"
    ).ok()
    shared_kernel.run("%%distributed\nimport time, torch, torch.distributed as dist").ok()
    shared_kernel.run("loop = nb_accelerate.notebook.pool.current().group.loop").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


@pytest.fixture(autouse=True)
def _the_ranks_go_on(notebook: Kernel) -> Iterator[None]:
    yield
    assert notebook.run(SUM).ok().stdout == "2\n"


def pid_of(notebook: Kernel, rank: int) -> int:
    value = notebook.run(f"nb_accelerate.notebook.pool.status()[{rank}].pid").ok().value
    assert value is not None
    return int(value)


def test_an_interrupt_just_before_the_ranks_are_asked_ends_the_cell(notebook: Kernel):
    notebook.run(
        "begin = RankLoop.begin\n"
        "def hit(*given, **options):\n"
        "    RankLoop.begin = begin\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    begin(*given, **options)\n"
        "RankLoop.begin = hit"
    ).ok()
    cell = notebook.run("%%distributed\ntime.sleep(600)")
    assert (cell.error, cell.message) == ("KeyboardInterrupt", "the cell was interrupted")


def test_an_interrupt_in_what_ipython_calls_around_a_cell_ends_the_cell(notebook: Kernel):
    notebook.run(
        "%%rank 0\ndef slow(*_):\n    get_ipython().events.unregister('pre_run_cell', slow)\n"
        "    print('here', flush=True)\n    while True: time.sleep(0.1)\n"
        "get_ipython().events.register('pre_run_cell', slow)"
    ).ok()
    cell = notebook.start("%%rank 0\ntime.sleep(600)")
    notebook.wait_for_output(cell, "here")
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"


class TestKernelsThatReadLate:
    """The pool's thread does not get to read until a deadline has passed: what came in time is in time."""

    @pytest.fixture(autouse=True)
    def _held_up(self, notebook: Kernel) -> Iterator[None]:
        notebook.run(
            "def hold(loop):\n"
            "    begun = time.monotonic()\n"
            "    ends = [one._step_ends if one.step else one._late_at for one in loop.requests]\n"
            "    while any(end < begun + 60 and time.monotonic() <= end for end in ends):\n"
            "        time.sleep(0.01)\n"
            "RankLoop.observers.append(hold)"
        ).ok()
        yield
        notebook.run("RankLoop.observers.remove(hold)").ok()

    def test_ranks_that_answered_in_time_are_not_late(self, notebook: Kernel):
        assert notebook.run("%%distributed --timeout 1\nprint('in time')").ok().stdout == "in time\n"

    def test_the_first_cause_is_the_first_although_it_was_read_last(self, notebook: Kernel):
        cell = notebook.run(
            "%%distributed\n"
            "class First(Exception):\n"
            "    def __reduce__(self):\n"
            "        time.sleep(0.1)  # it is raised first, and arrives last\n"
            "        return First, ()\n"
            "dist.barrier()\n"
            "if rank == 0: raise First\n"
            "time.sleep(0.05)\n"
            "{}['second']"
        )
        assert cell.error == "First"


def test_a_completion_that_comes_too_late_costs_the_process_group_and_nothing_else(notebook: Kernel):
    notebook.run("%%distributed\nclass Model:\n    def forward(self): pass\nnet = Model()").ok()
    pid = pid_of(notebook, 0)
    os.kill(pid, signal.SIGSTOP)
    notebook.run(
        "def go_on():\n"
        "    while not any(StepKind.CUT in one.steps_taken for one in loop.requests): time.sleep(0.01)\n"
        f"    os.kill({pid}, signal.SIGCONT)\n"
        "waiting = threading.Thread(target=go_on)\nwaiting.start()"
    ).ok()
    reply = notebook.client.complete("%%distributed\nnet.for", reply=True, timeout=30)
    assert reply["content"]["matches"] == []
    notebook.run("waiting.join(20)").ok()
    again = notebook.run(SUM).ok()
    assert (again.stdout, "group was made again" in str(again.displays)) == ("2\n", True)


@pytest.mark.may_leave("processes")  # a new rank
def test_a_rank_that_ends_after_a_cell_in_the_background_has_is_told_of(notebook: Kernel):
    cell = notebook.start("%%distributed --background\nprint('done')")
    notebook.finish(cell)
    notebook.run("handle = _\nassert handle.wait(20)").ok()
    os.kill(pid_of(notebook, 1), signal.SIGKILL)
    said, deadline = "", time.monotonic() + 30
    while "SIGKILL" not in said:
        said += str(notebook.next_message(cell, deadline)["content"])
    notebook.run("%distributed restart 1").ok()
    notebook.run("%%rank 1\nimport time, torch, torch.distributed as dist").ok()


@pytest.mark.may_leave("processes")  # a new rank
def test_a_rank_that_ends_while_a_value_is_packed_for_it_is_missed(notebook: Kernel):
    notebook.run(
        "class EndsIt:\n    def __reduce__(self):\n"
        f"        if not loop.ranks[1].handle.ended: os.kill({pid_of(notebook, 1)}, signal.SIGKILL)\n"
        "        while not loop.ranks[1].handle.ended: time.sleep(0.01)\n"
        "        return int, (3,)\nends_it = EndsIt()"
    ).ok()
    cell = notebook.run("%%distributed --out values\nends_it + rank")
    assert (cell.error, bool(re.search("rank 1 .*SIGKILL", cell.message))) == ("RankDiedError", True)
    notebook.run("%distributed restart 1\ndel ends_it").ok()
    notebook.run("%%rank 1\nimport time, torch, torch.distributed as dist").ok()
