"""``run_ranks`` and the kernel fixture, seen failing."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from fixtures.deadlines import every_rank_is_heard, log_of, overdue_when

from nb_accelerate.errors import DeadlineError

if TYPE_CHECKING:
    from fixtures.kernels import Kernel
    from fixtures.ranks import RunRanks


def test_ranks_are_other_processes_and_their_values_come_in_order(run_ranks: RunRanks) -> None:
    values = run_ranks(lambda: (int(os.environ["RANK"]), os.getpid()), world_size=3)
    assert [rank for rank, _ in values] == [0, 1, 2]
    assert len({os.getpid(), *(pid for _, pid in values)}) == 4


def test_a_deadline_shows_the_stacks_of_every_rank(run_ranks: RunRanks, capfd: pytest.CaptureFixture[str]) -> None:
    def a_function_that_hangs() -> None:
        import threading

        print("here", flush=True)
        threading.Event().wait()

    both_hang = overdue_when(lambda request: all("here" in log_of(request, rank) for rank in (0, 1)))
    with both_hang, every_rank_is_heard(), pytest.raises(DeadlineError):
        run_ranks(a_function_that_hangs)
    _, first, second = re.split(r"--- rank [01] at its deadline\n", capfd.readouterr().err)
    assert "in a_function_that_hangs" in first  # perhaps twice: they are asked again after a moment
    assert "in a_function_that_hangs" in second


def test_a_cell_that_raises_is_seen_to_raise(shared_kernel: Kernel) -> None:
    cell = shared_kernel.run("print('before')\n1 / 0")
    assert cell.error == "ZeroDivisionError"
    assert cell.stdout == "before\n"
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        cell.ok()


def test_a_cell_that_does_not_end_is_a_timeout(kernel: Kernel) -> None:
    # One long wait may begin just after the interrupt has come, and never hear of it.
    cell = kernel.start("import time; print('here')\nwhile True: time.sleep(0.1)")
    kernel.wait_for_output(cell, "here")
    with pytest.raises(TimeoutError):
        kernel.finish(cell, timeout=0.2)
    kernel.interrupt()
    assert kernel.finish(cell).error == "KeyboardInterrupt"
