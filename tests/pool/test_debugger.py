"""`%debug` and `breakpoint()` on a rank, in a real kernel with somebody at the keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.kernels import BLOCKED_RANKS, Kernel


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    # Seconds. A rank that was off the CPU for a while says the same as the other nevertheless.
    shared_kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", fold=30.0)
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run(BLOCKED_RANKS).ok()
    shared_kernel.run(
        "%%distributed\nimport torch, torch.distributed as dist\n"
        "def step(x, folder):\n    secret = x + rank\n    if rank:\n        until_blocked(folder, 1)\n"
        "        raise ValueError(secret)\n    say_that_it_waits(folder)\n    dist.barrier()"
    ).ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()
    assert shared_kernel.processes() == []


@pytest.fixture(autouse=True)
def _ranks_go_on(notebook: Kernel) -> Iterator[None]:
    yield
    cell = notebook.run("%%distributed\n_sum = torch.ones(1)\ndist.all_reduce(_sum)\nprint(_sum.item())").ok()
    assert cell.stdout == "2.0\n"


@pytest.fixture
def failed(notebook: Kernel, tmp_path: Path) -> Kernel:
    assert notebook.run(f"%%distributed\nstep(41, {str(tmp_path)!r})").error == "ValueError"
    return notebook


def test_before_any_failure_there_is_nothing_to_debug(notebook: Kernel):
    cell = notebook.run("%distributed debug")
    assert (cell.error, "no cell has failed" in cell.message) == ("PoolError", True)
    assert re.fullmatch("No cell has failed.*\n", notebook.run("%%rank 0\n%debug").ok().stderr)


class TestPostMortem:
    @pytest.mark.contract("cells: debug")
    def test_it_begins_on_the_rank_that_failed_and_sees_its_variables(self, failed: Kernel):
        cell = failed.run("%distributed debug", answers=["p secret", "up", "p step.__name__", "q"]).ok()
        assert cell.questions == ["rank 1 ipdb> "] * 4
        assert "raise ValueError(secret)" in cell.stdout
        assert "42\n" in cell.stdout
        assert "'step'\n" in cell.stdout

    def test_a_rank_that_waited_shows_where(self, failed: Kernel):
        cell = failed.run("%distributed debug 0", answers=["bt", "q"]).ok()
        assert cell.questions == ["rank 0 ipdb> "] * 2
        assert "dist.barrier()" in cell.stdout
        assert "nb_accelerate" not in cell.stdout

    def test_the_magic_of_an_ordinary_notebook_works_in_a_cell_for_one_rank(self, failed: Kernel):
        cell = failed.run("%%rank 1\n%debug", answers=["p secret * 2", "q"]).ok()
        assert "84\n" in cell.stdout

    def test_in_auto_mode_it_is_what_it_is_in_an_ordinary_notebook(self, failed: Kernel):
        failed.run("%distributed auto on").ok()
        cell = failed.run("%debug", answers=["p secret", "q"]).ok()
        failed.run("%distributed auto off").ok()
        assert (cell.questions, "42\n" in cell.stdout) == (["rank 1 ipdb> "] * 2, True)

    def test_the_magic_of_a_plain_cell_looks_into_the_rank_if_a_rank_failed_last(self, failed: Kernel):
        cell = failed.run("%debug", answers=["p secret", "q"]).ok()
        assert (cell.questions, "42\n" in cell.stdout) == (["rank 1 ipdb> "] * 2, True)

    def test_the_magic_of_a_plain_cell_looks_into_the_notebook_if_it_failed_last(self, failed: Kernel):
        assert failed.run("here = 7\n1 / 0").error == "ZeroDivisionError"
        cell = failed.run("%debug", answers=["p here", "q"]).ok()
        assert (cell.questions, "7\n" in cell.stdout) == (["ipdb> "] * 2, True)

    def test_code_can_be_stepped_through(self, notebook: Kernel):
        notebook.run("%%distributed\ndef twice(x):\n    y = 2 * x\n    return y").ok()
        cell = notebook.run("%%rank 0\n%debug twice(21)", answers=["s", "n", "n", "p y", "c"]).ok()
        assert "42\n" in cell.stdout

    def test_where_nobody_can_be_asked_it_says_so_and_ends(self, failed: Kernel):
        cell = failed.run("%distributed debug").ok()
        assert "raise ValueError(secret)" in cell.stdout
        assert "rank 1 asks" in cell.stderr

    def test_a_rank_is_a_number(self, failed: Kernel):
        assert "no rank 7" in failed.run("%distributed debug 7").message
        assert "invalid int value: 'one'" in failed.run("%distributed debug one").message

    def test_an_interrupt_ends_it_and_the_cell(self, failed: Kernel):
        cell = failed.start("%distributed debug", allow_stdin=True)
        failed.client.get_stdin_msg(timeout=20)
        failed.interrupt()
        assert failed.finish(cell, 20).error == "KeyboardInterrupt"


class TestBreakpoints:
    def test_ranks_are_asked_about_one_after_the_other(self, notebook: Kernel):
        cell, prompts = notebook.talk("%%distributed\nx = rank + 10\nbreakpoint()\ny = x", ["p x", "c"])
        assert sorted(prompts) == ["rank 0 ipdb> "] * 2 + ["rank 1 ipdb> "] * 2
        assert prompts[0] == prompts[1]
        assert "[rank 0] 10\n" in cell.stdout
        assert "[rank 1] 11\n" in cell.stdout

    def test_an_interrupt_of_the_notebook_reaches_no_idle_rank_afterwards(self, notebook: Kernel):
        notebook.talk("%%distributed\nbreakpoint()\nx = 1", ["c"])
        cell = notebook.start("import time\nprint('waits', flush=True)\ntime.sleep(600)")
        notebook.wait_for_output(cell, "waits")
        notebook.interrupt()
        assert notebook.finish(cell, 20).error == "KeyboardInterrupt"
        assert notebook.run("%%distributed\nprint(x)").ok().stdout == "1\n"

    def test_one_interrupt_at_a_prompt_ends_the_cell_although_another_rank_asks_too(
        self, notebook: Kernel, tmp_path: Path
    ):
        cell = notebook.start(
            f"%%distributed\nsay_that_it_waits({str(tmp_path)!r})\nbreakpoint()\nx = 1", allow_stdin=True
        )
        notebook.client.get_stdin_msg(timeout=20)
        functions: dict[str, Any] = {}
        exec(BLOCKED_RANKS, functions)
        functions["until_blocked"](tmp_path, 2)  # both have asked
        notebook.interrupt()
        assert notebook.finish(cell, 20).error == "KeyboardInterrupt"

    def test_in_the_background_nobody_is_asked(self, notebook: Kernel):
        notebook.run("%%rank 1 --background\nbreakpoint()\nx = 1").ok()
        notebook.run("handle = _\nhandle.result(20)").ok()  # IPython shows no traceback of who left a debugger
        assert "rank 1 failed: BdbQuit" in notebook.run("handle").ok().value
