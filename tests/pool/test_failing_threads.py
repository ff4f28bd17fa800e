"""A helper thread that fails is the answer for whoever waits: no kernel waits in vain."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fixtures.kernels import BLOCKED_RANKS, Kernel, message_until
from fixtures.ranks import RunRanks

from nb_accelerate import notebook_launcher
from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import LaunchError, RemoteError
from nb_accelerate.notebook.worker.connections import connections

LIMIT = 5.0
"""Seconds in which there is an answer."""

FAIL = """%%distributed
import importlib, os, time, torch
import torch.distributed as dist
def fails(*_):
    raise AttributeError("on purpose")
importlib.import_module({module!r}).{name} = fails
"""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.run("%load_ext nb_accelerate\nimport os, time, torch\nimport torch.distributed as dist").ok()
    shared_kernel.run(BLOCKED_RANKS).ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()
    assert shared_kernel.processes() == []


@pytest.fixture
def ranks(notebook: Kernel) -> Iterator[Kernel]:
    """Two new ranks in the notebook."""
    notebook.run("%distributed start -n 2").ok()
    yield notebook
    notebook.run("%distributed stop").ok()


@pytest.mark.slow
def test_the_users_error_ends_a_cell_whose_alarm_fails(ranks: Kernel, tmp_path: Path) -> None:
    ranks.run(FAIL.format(module="nb_accelerate.notebook.worker.alarm", name="cut_connections")).ok()
    folder = repr(str(tmp_path))
    cell = ranks.run(
        f"%%distributed\nif rank == 1:\n    until_blocked({folder}, 1)\n    raise KeyError('mine')\n"
        f"say_that_it_waits({folder})\ndist.barrier()"
    )
    assert (cell.error, cell.message) == ("KeyError", "'mine'")
    assert cell.seconds < LIMIT
    lost = "rank 0 is lost: its thread nb_accelerate-alarm has failed (AttributeError: on purpose), so it was killed"
    assert lost in plain(cell.traceback).replace("Rank", "rank")
    assert "cut_connections(message.peers, message.addresses)" in cell.stderr  # its traceback, for a report
    assert lost in ranks.run("%%distributed\nprint('on')").message
    ranks.run("%distributed restart 0").ok()
    ranks.run("%%distributed --out total\n_one = torch.ones(1); dist.all_reduce(_one); int(_one)").ok()
    assert ranks.run("total").value == "[2, 2]"


def test_a_thread_that_fails_between_cells_is_told_at_once(ranks: Kernel, tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    os.mkfifo(trigger)
    cell = ranks.start(
        "%%distributed\nfrom nb_accelerate.base.helper_threads import HelperThread\n"
        f"if rank == 1:\n    HelperThread(lambda: (open({str(trigger)!r}).read(), 1 / 0), name='idle').start()\n"
        "print('last')"
    )
    ranks.finish(cell).ok()
    trigger.write_text("go")
    began = time.monotonic()
    said = "rank 1 is lost: its thread nb_accelerate-idle has failed (ZeroDivisionError: division by zero)"
    message_until(ranks, lambda message: said in str(message["content"]))
    assert time.monotonic() - began < LIMIT


def test_stacks_come_from_ranks_whose_thread_for_them_has_failed(ranks: Kernel) -> None:
    ranks.run(FAIL.format(module="nb_accelerate.notebook.worker.stack_writer", name="_listed")).ok()
    cell = ranks.start("%%distributed --background\nprint('begun', flush=True); time.sleep(600)")
    ranks.finish(cell)
    ranks.run("handle = _").ok()
    for _ in range(2):
        said = ranks.run("%distributed status").ok()
        assert re.search(r"running +in .*line 2", said.stdout), said
        assert said.seconds < LIMIT
    ranks.run("handle.interrupt()").ok()
    assert ranks.run("handle.result(20)").error == "KeyboardInterrupt"


def test_a_call_ends_although_its_main_thread_is_blocked(tmp_path: Path) -> None:
    def call(trigger: str) -> None:
        import torch.distributed as dist

        from nb_accelerate import Accelerator
        from nb_accelerate.base.helper_threads import HelperThread

        if Accelerator(cpu=True).process_index == 0:
            HelperThread(lambda: (Path(trigger).read_text(), 1 / 0), name="blocked").start()
            dist.barrier()
        else:
            Path(trigger).write_text("go")
            threading.Event().wait()

    trigger = tmp_path / "trigger"
    os.mkfifo(trigger)
    with pytest.raises(LaunchError, match="lost: its thread nb_accelerate-blocked") as caught:
        notebook_launcher(call, (str(trigger),), 2, progress="off", timeout=30)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.type_name == "ZeroDivisionError"
    assert "1 / 0" in str(cause)


def test_whatever_a_save_in_the_background_raises_ends_it_on_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    def save(where: str) -> str:
        from nb_accelerate import Accelerator
        from nb_accelerate.training.checkpoint import state

        def leaves(*_: Any) -> Any:
            raise SystemExit(3)

        accelerator = Accelerator(cpu=True)
        if accelerator.process_index == 1:
            state.write_content = leaves
        try:
            accelerator.save_state(where, async_save=True).wait(LIMIT)
        except BaseException as error:
            with pytest.raises(type(error)):  # once more, and then no more
                accelerator.wait_for_checkpoint()
            return f"{type(error).__name__}: {error}"
        return "saved"

    told = run_ranks(save, str(tmp_path / "state"))
    assert told == ["CheckpointError: on rank 1: SystemExit: 3", "SystemExit: 3"]


def test_whoever_awaits_a_launch_learns_of_its_end_although_another_event_loop_is_closed() -> None:
    launch: Any = notebook_launcher(time.sleep, (600,), 1, block=False, progress="off")
    closed = asyncio.new_event_loop()
    waiting = launch.__await__()
    asyncio.events._set_running_loop(closed)
    next(waiting)
    asyncio.events._set_running_loop(None)
    closed.close()

    async def wait() -> None:
        asyncio.get_running_loop().call_soon(HelperThread(launch.stop, name="stop").start)
        with pytest.raises(KeyboardInterrupt):
            await launch

    asyncio.run(asyncio.wait_for(wait(), 20))


def test_a_failing_thread_of_another_process_is_printed_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_value))
    thread = HelperThread(lambda: 1 // 0, name="test")
    thread.start()
    thread.join(20)
    assert [type(one) for one in printed] == [ZeroDivisionError]


def test_connections_are_read_with_any_psutil() -> None:
    old = SimpleNamespace(connections=lambda kind: [kind])  # psutil before 6
    assert connections(old) == ["tcp"]  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname() in [one.laddr for one in connections(psutil.Process())]
