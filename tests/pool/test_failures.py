"""What goes wrong in a `%%distributed` cell loses nothing: variables stay, and the next cell works."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.kernels import BLOCKED_RANKS, Kernel
from fixtures.leaks import name_of
from fixtures.old_torch import SHARDS_ON_CPUS

from nb_accelerate.notebook.pool import Pool

SETUP = """
%load_ext nb_accelerate
import os, signal, sys, time, threading
import torch
import torch.distributed as dist
"""

CHECK = """%%distributed --out checked
_sum = torch.ones(1, device=device)
dist.all_reduce(_sum)
(kept, int(_sum.item()))
"""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def has_pending(pid: int, signum: int) -> bool:
    """Is a signal on its way to a process that does not run?"""
    (mask,) = re.findall(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signum - 1) & 1)


@pytest.fixture(
    scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel, ranks: int) -> Iterator[Kernel]:
    shared_kernel.wait_for_server()
    shared_kernel.run(SETUP).ok()
    shared_kernel.run(BLOCKED_RANKS).ok()
    shared_kernel.run(f"%distributed start -n {ranks}").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()
    assert shared_kernel.processes() == []


@pytest.fixture(autouse=True)
def _variables_stay_and_ranks_are_in_step(notebook: Kernel, ranks: int) -> Iterator[None]:
    notebook.run(
        "%%distributed\nkept = f'kept {rank}'\nimport torch, time, os, signal\nimport torch.distributed as dist"
    ).ok()
    before = notebook.counts()
    yield
    notebook.run(CHECK).ok()
    assert notebook.run("checked").ok().value == str([(f"kept {rank}", ranks) for rank in range(ranks)])
    assert notebook.settles_at(before), (before, notebook.counts())


def last(ranks: int) -> int:
    return ranks - 1


@contextlib.contextmanager
def timeouts(notebook: Kernel, **seconds: float) -> Iterator[None]:
    """Other timeouts of the pool for a while: the tests share the kernel."""
    notebook.set_timeouts("nb_accelerate.notebook.pool.Pool", **seconds)
    try:
        yield
    finally:
        usual = {name: getattr(Pool.timeouts, name) for name in seconds}
        notebook.set_timeouts("nb_accelerate.notebook.pool.Pool", **usual)


class TestExceptions:
    @pytest.mark.contract("cells: an exception")
    def test_one_rank_fails_while_the_others_wait_in_a_collective(self, notebook: Kernel, ranks: int, tmp_path: Path):
        folder = repr(str(tmp_path))
        with timeouts(notebook, ask=2.0):
            cell = notebook.run(
                f"%%distributed\nif rank == world_size - 1:\n    until_blocked({folder}, world_size - 1)\n"
                f"    raise KeyError('mine')\nsay_that_it_waits({folder})\ndist.barrier()"
            )
        assert (cell.error, cell.message) == ("KeyError", "'mine'")
        assert f"rank {last(ranks)} of {ranks}" in plain(cell.traceback)
        assert re.search(r"Cell In\[\d+\], line 4", plain(cell.traceback))
        assert "Meanwhile" not in plain(cell.traceback), "it says nothing of the cause"

    def test_that_the_group_was_made_anew_is_said_in_the_next_cell(self, notebook: Kernel, ranks: int, tmp_path: Path):
        if ranks == 1:
            pytest.skip("nobody waits for anybody")
        folder = repr(str(tmp_path))
        notebook.run(
            f"%%distributed\nif rank == 0:\n    until_blocked({folder}, world_size - 1)\n    raise KeyError('mine')\n"
            f"say_that_it_waits({folder})\ndist.barrier()"
        )
        cell = notebook.run("%%distributed\nprint('on')").ok()
        assert "group was made again" in cell.displays[0]["text/plain"]
        assert "process group" not in notebook.run("%%distributed\nprint('on')").ok().stderr

    def test_all_ranks_fail_the_same_way_and_it_is_shown_once(self, notebook: Kernel):
        with timeouts(notebook, ask=55.0):
            cell = notebook.run("%%distributed\n{}['all']")
        assert (cell.error, cell.stdout, cell.stderr) == ("KeyError", "", "")
        assert plain(cell.traceback).count("line 2") == 1

    def test_where_a_rank_was_on_the_way_to_its_own_failure_is_not_told(self, notebook: Kernel, ranks: int):
        if ranks == 1:
            pytest.skip("there are no others")
        with timeouts(notebook, ask=55.0):
            cell = notebook.run(
                "%%distributed\nimport time\nif rank > 0:\n    time.sleep(0.3)\nif rank < 3:\n    {}['all']"
            )
        assert cell.error == "KeyError"
        # Of those that the machine let raise in time.
        assert re.search(rf"(ranks? [0-9-]+ of|all) {ranks}", plain(cell.traceback))
        assert "Meanwhile" not in plain(cell.traceback)

    def test_a_model_goes_on_working_after_a_failure_that_touched_no_collective(self, notebook: Kernel):
        notebook.run(
            "%%distributed\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, device=device))\n"
            "def step(): model(torch.ones(1, 2, device=device)).sum().backward()\nstep()"
        ).ok()
        assert notebook.run("%%distributed\nundefined_name").error == "NameError"
        assert "process group" not in str(notebook.run("%%distributed\nstep()").ok())

    @pytest.mark.parametrize(
        ("make", "backward"),
        [
            (
                "model = torch.nn.parallel.DistributedDataParallel(linear)\n"
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
                "torch.Tensor.backward",
            ),
            (
                "from nb_accelerate import Accelerator\naccelerator = Accelerator()\n"
                "model, optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))",
                "accelerator.backward",
            ),
        ],
        ids=["DDP", "prepared"],
    )
    def test_models_go_on_working_after_a_failure_in_the_middle_of_a_step(
        self, notebook: Kernel, ranks: int, make: str, backward: str
    ):
        notebook.run(
            f"%%distributed\ntorch.manual_seed(0)\nlinear = torch.nn.Linear(2, 1, device=device)\n{make}\n"
            "def step():\n    optimizer.zero_grad()\n"
            f"    {backward}(model(torch.full((1, 2), rank + 1., device=device)).sum())\n"
            "    optimizer.step()\n    return linear.weight.grad[0, 0].item()\nstep()"
        ).ok()
        assert notebook.run("%%distributed\nif rank == world_size - 1: 1 / 0\nstep()").error == "ZeroDivisionError"
        notebook.run("%%distributed --quiet --out steps\n[step() for _ in range(3)]").ok()
        mean = sum(range(1, ranks + 1)) / ranks
        assert notebook.run("steps").ok().value == str([[mean] * 3] * ranks)

    def test_a_sharded_model_says_after_a_failure_in_the_middle_of_a_step_that_it_is_to_be_made_anew(
        self, notebook: Kernel, ranks: int
    ):
        if ranks == 1:
            pytest.skip("one rank is not sharded")
        if not SHARDS_ON_CPUS:
            pytest.skip("FSDP on CPUs is refused with PyTorch before 2.9")
        notebook.run(
            "%%distributed\nfrom nb_accelerate import Accelerator\n"
            "from nb_accelerate.utils import FullyShardedDataParallelPlugin\n"
            "accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())\n"
            "def make():\n    torch.manual_seed(0)\n    model = torch.nn.Linear(2, world_size)\n"
            "    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
            "def step():\n    accelerator.backward(model(torch.full((1, 2), rank + 1., device=device)).sum())\n"
            "    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()\n"
            "    optimizer.step(); optimizer.zero_grad()\n    return norm\n"
            "model, optimizer = make()\nstep()"
        ).ok()
        assert notebook.run("%%distributed\nif rank == world_size - 1: 1 / 0\nstep()").error == "ZeroDivisionError"
        cell = notebook.run("%%distributed\nstep()")
        assert cell.error == "ConfigError"
        assert "was sharded before" in plain(cell.traceback)
        notebook.run("%%distributed --quiet --out norms\nmodel, optimizer = make()\n[step() for _ in range(2)]").ok()
        mean = sum(range(1, ranks + 1)) / ranks
        norm = (ranks * (2 * mean**2 + 1)) ** 0.5
        values = eval(notebook.run("norms").ok().value)
        assert values == [pytest.approx([norm] * 2)] * ranks

    def test_accumulation_windows_of_all_ranks_begin_anew_after_a_failure(self, notebook: Kernel, ranks: int):
        notebook.run(
            "%%distributed\nfrom nb_accelerate import Accelerator\n"
            "accelerator = Accelerator(gradient_accumulation_steps=2)\nlinear = torch.nn.Linear(2, 1)\n"
            "rows = torch.utils.data.DataLoader(range(4 * world_size))\n"
            "model, rows = accelerator.prepare(linear, rows)\n"
            "def epoch(failing):\n    closed = []\n    for _ in rows:\n        with accelerator.accumulate(model):\n"
            "            if rank == failing: 1 / 0\n            closed.append(accelerator.sync_gradients)\n"
            "            accelerator.backward(model(torch.ones(1, 2, device=device)).sum())\n"
            "    return closed\nepoch(-1)"
        ).ok()
        assert notebook.run("%%distributed\nepoch(world_size - 1)").error == "ZeroDivisionError"
        if ranks > 1:
            notebook.run("%%distributed --quiet --out dropped\nlinear.weight.grad is None").ok()
            assert ast.literal_eval(notebook.run("dropped").ok().value) == [True] * ranks
        notebook.run("%%distributed --quiet --out closed\nepoch(-1)").ok()
        # A rank alone meets nobody, so that its window goes on.
        expected = [[False, True, False, True]] * ranks if ranks > 1 else [[True, False, True, True]]
        assert ast.literal_eval(notebook.run("closed").ok().value) == expected

    def test_an_exception_of_a_class_from_a_cell_arrives_as_it_is(self, notebook: Kernel):
        notebook.run("class Bad(Exception):\n    pass").ok()
        cell = notebook.run(
            "try:\n    get_ipython().run_cell_magic('distributed', '', 'raise Bad(7)')\nexcept Bad as e:\n"
            "    print(e.args)"
        ).ok()
        assert cell.stdout == "(7,)\n"

    def test_leaving_with_a_code_ends_the_cell_and_neither_rank_nor_kernel(self, notebook: Kernel):
        cell = notebook.run("%%distributed\nimport sys\nsys.exit(3)")
        assert (cell.error, "SystemExit: 3" in cell.message) == ("RemoteError", True)
        notebook.run("%%distributed\nsys.exit(0)").ok()

    def test_a_value_that_exits_as_it_arrives_fails_its_cell(self, notebook: Kernel):
        notebook.run("import sys\nclass Leaves:\n    def __reduce__(self):\n        return sys.exit, ()").ok()
        cell = notebook.run("leaves = Leaves()\nget_ipython().run_cell_magic('distributed', '', 'leaves')")
        assert (cell.error, "SystemExit" in cell.message) == ("RemoteError", True)
        notebook.run("del leaves\nget_ipython().run_cell_magic('distributed', '', '1 + 1')").ok()

    def test_a_failure_in_the_background_is_said_in_its_cell(self, notebook: Kernel):
        cell = notebook.start("%%distributed --background\ntime.sleep(0.3)\n1 / 0")
        notebook.finish(cell)
        notebook.run("handle = _").ok()
        assert notebook.run("handle.result()").error == "ZeroDivisionError"


class TestInterrupts:
    @pytest.mark.contract("cells: an interrupt")
    @pytest.mark.parametrize(
        "code",
        [
            "while True: pass",
            "time.sleep(600)",
            "if rank == 0 and world_size > 1:\n    dist.recv(torch.ones(1, device=device), world_size - 1)\n"
            "time.sleep(600)",
            "dist.barrier() if rank else dist.all_reduce(torch.ones(1, device=device))\ntime.sleep(600)",
            "import asyncio\nawait asyncio.sleep(600)",
        ],
        ids=["python", "sleep", "collective", "mixed collectives", "await"],
    )
    def test_an_interrupt_ends_the_cell_on_all_ranks(self, notebook: Kernel, code: str):
        cell = notebook.start(f"%%distributed\nprint('here', flush=True)\n{code}")
        notebook.wait_for_output(cell, "here")
        began = time.monotonic()
        notebook.interrupt()
        ended = notebook.finish(cell)
        assert (ended.error, ended.message) == ("KeyboardInterrupt", "the cell was interrupted")
        assert time.monotonic() - began < 4.0

    def test_an_awaited_task_does_not_go_on_in_the_next_cell(self, notebook: Kernel):
        cell = notebook.start(
            "%%rank 0\nimport asyncio\nticks = []\nasync def tick():\n    while True:\n        ticks.append(1)\n"
            "        await asyncio.sleep(0)\nprint('here', flush=True)\nawait tick()"
        )
        notebook.wait_for_output(cell, "here")
        notebook.interrupt()
        assert notebook.finish(cell).error == "KeyboardInterrupt"
        code = "%%rank 0\nbefore = len(ticks)\nfor _ in range(9): await asyncio.sleep(0)\nprint(len(ticks) - before)"
        assert notebook.run(code).ok().stdout == "0\n"

    @pytest.mark.parametrize("place", ["asyncio.Handle._run", "asyncio.BaseEventLoop._check_closed"])
    def test_an_interrupt_between_two_steps_of_a_task_loses_none(self, notebook: Kernel, place: str):
        cell = notebook.start(
            f"%%rank 0\nimport _signal, asyncio, signal, types\noriginal = {place}\ndef is_hit(self):\n"
            "    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])\n"
            "    _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGINT])\n"
            "    original(self)\n"
            "names = dict(__name__='asyncio.somewhere', _signal=_signal, original=original)\n"
            f"{place} = types.FunctionType(is_hit.__code__, names)\n"
            "try:\n    print('here', flush=True)\n    while True: await asyncio.sleep(0)\n"
            f"finally:\n    {place} = original\n"
            "    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])"
        )
        notebook.wait_for_output(cell, "here")
        notebook.interrupt()
        assert notebook.finish(cell).error == "KeyboardInterrupt"
        notebook.run("%%distributed\nprint(kept)").ok()

    def test_a_rank_that_has_not_begun_a_cell_is_interrupted_too(self, notebook: Kernel, ranks: int):
        if ranks == 1:
            pytest.skip("somebody has to say that the cell has begun")
        (late,) = (one for one in notebook.processes() if name_of(one) == f"nb-rank{last(ranks)}")
        late.suspend()
        try:
            cell = notebook.start("%%distributed\nprint('here', flush=True)\ntime.sleep(600)")
            notebook.wait_for_output(cell, "here")
            notebook.interrupt()
            while not has_pending(late.pid, signal.SIGINT):
                time.sleep(0.01)
        finally:
            late.resume()
        ended = notebook.finish(cell)
        assert (ended.error, ended.message) == ("KeyboardInterrupt", "the cell was interrupted")
        notebook.run("%%distributed\nprint(kept)").ok()

    def test_an_interrupt_that_comes_while_the_error_before_is_looked_at_ends_the_cell(
        self, notebook: Kernel, tmp_path: Path
    ):
        begun = tmp_path / "begun"
        os.mkfifo(begun)
        notebook.run(
            f"""%%rank 0
class Slow(Exception):
    waits = False
    def __str__(self):
        if Slow.waits:
            Slow.waits = False
            came, comes = os.pipe()
            os.set_blocking(comes, False)
            signal.set_wakeup_fd(comes)
            try:
                open({str(begun)!r}, "w").close()
                while os.read(came, 1)[0] != signal.SIGURG: pass  # it comes when all is said about the interrupt
            finally:
                signal.set_wakeup_fd(-1)
                os.close(came), os.close(comes)
        return "slow"
raise Slow"""
        )
        notebook.run("%%rank 0\nSlow.waits = True").ok()
        cell = notebook.start("%%rank 0\ntime.sleep(600)")
        begun.read_bytes()
        notebook.interrupt()
        ended = notebook.finish(cell)
        assert (ended.error, ended.message) == ("KeyboardInterrupt", "the cell was interrupted")
        notebook.run("%%distributed\nprint(kept)").ok()

    def test_an_interrupt_for_which_a_value_that_is_pulled_has_to_be_waited_for_is_told(
        self, notebook: Kernel, tmp_path: Path
    ):
        begun, gate = tmp_path / "begun", tmp_path / "gate"
        os.mkfifo(gate)
        notebook.run(
            f"""%%distributed --ranks 0
class Held:
    def __reduce__(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
        open({str(begun)!r}, "w").close()
        open({str(gate)!r}).close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGINT}})
        return int, ()
held = Held()"""
        ).ok()
        cell = notebook.start("%distributed pull held --ranks 0")
        while not begun.exists():
            time.sleep(0.01)
        notebook.interrupt()
        notebook.wait_for_output(cell, "rank 0 runs C code that cannot be interrupted")
        gate.open("w").close()
        assert notebook.finish(cell).error == "KeyboardInterrupt"
        notebook.run("%%distributed\nprint(kept)").ok()

    def test_an_interrupt_between_cells_reaches_no_rank(self, notebook: Kernel):
        notebook.interrupt()
        notebook.run("%%distributed\nprint(kept)").ok()

    def test_a_cell_in_the_background_is_not_hit_by_an_interrupt_of_another(self, notebook: Kernel, tmp_path: Path):
        flag = tmp_path / "flag"
        notebook.run(
            f"%%distributed --background\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\nprint('done')"
        ).ok()
        notebook.run("handle = _").ok()
        # Not flushed, it comes when the kernel is in the loop. A long wait that just begins would not hear of a signal.
        cell = notebook.start("import time\nprint('here')\nwhile True: time.sleep(0.01)")
        notebook.wait_for_output(cell, "here")
        notebook.interrupt()
        interrupted = notebook.finish(cell)
        assert interrupted.error == "KeyboardInterrupt", interrupted.stderr
        flag.touch()
        notebook.run("handle.result(20)").ok()

    def test_a_cell_in_the_background_can_be_interrupted(self, notebook: Kernel):
        notebook.run("%%distributed --background\ntime.sleep(600)").ok()
        notebook.run("handle = _").ok()
        notebook.run("%distributed interrupt").ok()
        assert notebook.run("handle.result(20)").error == "KeyboardInterrupt"

    def test_a_cell_that_takes_too_long_is_interrupted(self, notebook: Kernel, ranks: int):
        with timeouts(notebook, ask=2.0):
            cell = notebook.start(
                "%%distributed --background --timeout 600\n"
                "if rank == 0:\n    print('begun', flush=True); time.sleep(600)"
            )
            notebook.finish(cell)
        notebook.run("handle = _").ok()
        said_under(notebook, cell)
        for rank in range(1, ranks):
            wait_for_state(notebook, rank, "idle")
        notebook.run(
            "import nb_accelerate.notebook.pool\nnb_accelerate.pool.current().group.loop.post("
            "lambda: setattr(handle.request, '_late_at', 0.0))"
        ).ok()
        cell = notebook.run("handle.result(20)")
        assert cell.error == "DeadlineError"
        assert "rank 0 " in cell.message
        assert "was in cell " in plain(cell.traceback)


@pytest.mark.may_leave("processes", "files")  # the rank that takes the other's place lives as long as the notebook
class TestDeath:
    @pytest.mark.contract("cells: a killed rank is replaced")
    def test_a_killed_rank_is_named_and_can_be_replaced(self, notebook: Kernel, ranks: int):
        cell = notebook.run(
            "%%distributed\nif rank == world_size - 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
        )
        assert cell.error == "RankDiedError"
        assert re.search(rf"rank {last(ranks)} .*SIGKILL", cell.message)
        assert cell.seconds < 3.0
        refused = notebook.run("%%distributed\n1")
        assert (refused.error, f"%distributed restart {last(ranks)}" in refused.message) == ("PoolError", True)
        if ranks > 1:
            assert notebook.run("%%rank 0\nprint(kept)").ok().stdout == "kept 0\n"
        replace(notebook, last(ranks))

    def test_the_next_cell_asks_before_it_replaces_a_killed_rank(self, notebook: Kernel, ranks: int):
        kill(notebook, last(ranks))
        cell = notebook.run("%%distributed\nprint('ran')", answers=["n"])
        (question,) = cell.questions
        assert re.match(rf"rank {last(ranks)} .*SIGKILL.* variables are lost", question)
        assert (cell.error, f"%distributed restart {last(ranks)}" in cell.message) == ("PoolError", True)
        if ranks > 1:
            assert notebook.run("%%rank 0\nprint(kept)", answers=[]).ok().stdout == "kept 0\n"
        cell = notebook.run("%%distributed --quiet --out sizes\nworld_size", answers=[""]).ok()
        assert re.fullmatch(rf"rank {last(ranks)} is new.*\n", cell.stdout)
        assert notebook.run("sizes").ok().value == str([ranks] * ranks)
        settle(notebook, last(ranks))

    def test_all_that_were_killed_are_replaced_at_once(self, notebook: Kernel, ranks: int):
        if ranks == 1:
            pytest.skip("there are no others")
        for rank in range(1, ranks):
            kill(notebook, rank)
        kill(notebook, 0)
        began = time.monotonic()
        assert notebook.run("%distributed restart 0").ok().stdout.startswith("ranks 0, 1")
        assert time.monotonic() - began < 20
        for rank in range(ranks):
            settle(notebook, rank)

    def test_a_rank_that_dies_between_cells_is_reported_at_once(self, notebook: Kernel, ranks: int):
        pid = int(notebook.run(f"pool = __import__('nb_accelerate').pool\npool.status()[{last(ranks)}].pid").ok().value)
        cell = notebook.start("%%distributed\nprint('last')")
        notebook.finish(cell)
        end(pid)
        assert f"rank {last(ranks)} was ended by SIGKILL" in said_under(notebook, cell)
        replace(notebook, last(ranks))

    def test_a_rank_that_leaves_by_itself_says_with_what_code(self, notebook: Kernel, ranks: int):
        cell = notebook.run("%%distributed\nif rank == world_size - 1: os._exit(3)\ntime.sleep(600)")
        assert cell.error == "RankDiedError"
        assert re.search(rf"rank {last(ranks)} .*exit code 3", cell.message)
        replace(notebook, last(ranks))

    def test_a_rank_that_works_can_be_replaced_too(self, notebook: Kernel, ranks: int):
        replace(notebook, last(ranks))


def kill(notebook: Kernel, rank: int) -> None:
    pid = int(notebook.run(f"__import__('nb_accelerate').pool.status()[{rank}].pid").ok().value)
    end(pid)
    wait_for_state(notebook, rank, "ended")


def wait_for_state(notebook: Kernel, rank: int, state: str) -> None:
    deadline = time.monotonic() + 20
    while notebook.run(f"__import__('nb_accelerate').pool.status()[{rank}].state").ok().value != repr(state):
        assert time.monotonic() < deadline


def end(pid: int) -> None:
    process = psutil.Process(pid)  # made while it is there: afterwards it is reaped by who knows whom
    process.kill()
    process.wait(5)


def replace(notebook: Kernel, rank: int) -> None:
    cell = notebook.run(f"%distributed restart {rank}").ok()
    assert re.match(rf"rank {rank} is new(; it lacks [\w, ]*kept)?", cell.stdout)
    settle(notebook, rank)


def settle(notebook: Kernel, rank: int) -> None:
    """What a new rank needs for the tests that follow."""
    notebook.run(
        f"%%rank {rank}\nimport torch, time, os, signal\nimport torch.distributed as dist\nkept = f'kept {{rank}}'"
    ).ok()


def said_under(notebook: Kernel, cell: str) -> str:
    """What arrives in a cell after its end."""
    deadline = time.monotonic() + 10
    while True:
        message = notebook.next_message(cell, deadline)
        if message["msg_type"] == "stream":
            return message["content"]["text"]


class TestHangs:
    @pytest.mark.slow
    def test_a_hang_names_who_waits_and_who_has_not_come(self, notebook: Kernel, ranks: int):
        if ranks == 1:
            pytest.skip("nobody waits for anybody")
        cell = notebook.start("%%distributed\nif rank == 0:\n    dist.barrier()")
        seen = notebook.wait_for_output(cell, " in barrier")
        assert "nterrupt" not in seen
        # By the stacks of the ranks or, if the machine is busy, by their lines.
        assert re.search(r"[Rr]ank 0\b.* barrier\b.*line 3", seen), seen
        assert re.search(r"ranks? [\d-]+,? (which )?ha(s|ve) (finished|returned)", seen), seen
        notebook.interrupt()
        assert notebook.finish(cell).error == "KeyboardInterrupt"

    @pytest.mark.slow
    def test_ranks_that_wait_for_one_in_a_debugger_are_not_told_to_interrupt(self, notebook: Kernel, ranks: int):
        if ranks == 1:
            pytest.skip("nobody waits for anybody")
        with timeouts(notebook, quiet=0.3, told=0.3, deadlock=1.0):
            cell = notebook.start("%%distributed\nif rank == 0:\n    breakpoint()\ndist.barrier()", allow_stdin=True)
            notebook.client.get_stdin_msg(timeout=20)
            seen = notebook.wait_for_output(cell, " in barrier")
            notebook.client.input("c")
            notebook.finish(cell).ok()
        assert "nterrupt" not in seen

    @pytest.mark.slow
    def test_a_rank_that_waits_for_a_thread_of_one_that_has_ended_is_left_alone(self, notebook: Kernel, ranks: int):
        if ranks == 1:
            pytest.skip("nobody waits for anybody")
        with timeouts(notebook, quiet=0.3, deadlock=1.0):
            notebook.run(
                "%%distributed\n"
                "import threading, time\n"
                "received = torch.zeros(1, device=device)\n"
                "def serve():\n"
                "    end = time.monotonic() + 4\n"
                "    while time.monotonic() < end:\n"
                "        sum(range(1000))\n"
                "    dist.send(torch.ones(1, device=device), 0)\n"
                "if rank == 1:\n"
                "    threading.Thread(target=serve).start()\n"
                "if rank == 0:\n"
                "    dist.recv(received, 1)\n"
                "    assert received == 1\n"
            ).ok()

    @pytest.mark.slow
    def test_a_cell_whose_ranks_wait_for_one_that_has_ended_fails_by_itself_and_keeps_variables(
        self, notebook: Kernel, ranks: int
    ):
        if ranks == 1:
            pytest.skip("nobody waits for anybody")
        notebook.run("%%distributed\nheld = rank").ok()
        with timeouts(notebook, quiet=0.3, deadlock=1.0):
            cell = notebook.run("%%distributed\nif rank == 0:\n    dist.barrier()")
        assert cell.error == "DeadlockError"
        assert re.search(r"rank 0\b.* barrier\b.*line 3", cell.message)
        assert len(cell.traceback.splitlines()) <= 11
        cell = notebook.run(
            "%%distributed\nx = torch.tensor(held, device=device)\ndist.all_reduce(x)\n"
            "assert x == sum(range(world_size))"
        )
        cell.ok()

    @pytest.mark.slow
    def test_a_collective_in_a_cell_of_one_rank_names_those_that_do_not_run_it_and_ends(
        self, notebook: Kernel, ranks: int
    ):
        if ranks == 1:
            pytest.skip("nobody waits for anybody")
        with timeouts(notebook, quiet=0.3, told=0.3, deadlock=1.0):
            cell = notebook.run("%%rank 0\ndist.barrier()")
        assert cell.error == "DeadlockError"
        assert re.search(r"rank 0 waits in barrier, .* line 2; ranks? [\d-]+ do(es)? not run this", cell.message)
        notebook.run("%%distributed\nassert rank == dist.get_rank()").ok()

    @pytest.mark.slow
    def test_a_rank_whose_c_code_holds_the_interpreter_says_where_it_is(self, notebook: Kernel, tmp_path: Path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with timeouts(notebook, stacks=20.0):
            # Opened without letting go of the interpreter, until somebody writes.
            cell = notebook.start(
                "%%rank 0 --background\nimport ctypes; print('begun', flush=True)\n"
                f"os.close(ctypes.PyDLL(None).open({os.fsencode(pipe)!r}, os.O_RDONLY))"
            )
            notebook.finish(cell)
            notebook.run("handle = _").ok()
            said_under(notebook, cell)
            said = notebook.run("%distributed status").ok().stdout
            with pipe.open("r+b", buffering=0):
                notebook.run("handle.result(20)").ok()
        assert re.search(r"cell \d+ line 3", said), said

    def test_status_says_what_a_cell_in_the_background_does(self, notebook: Kernel):
        with timeouts(notebook, stacks=20.0):
            cell = notebook.start("%%rank 0 --background\nprint('begun', flush=True); time.sleep(600)")
            notebook.finish(cell)
            notebook.run("handle = _").ok()
            said_under(notebook, cell)
            said = notebook.run("%distributed status").ok().stdout
            assert re.search(r"running +in .*line 2", said), said
            notebook.run("handle.interrupt()").ok()
            assert notebook.run("handle.result(20)").error == "KeyboardInterrupt"
