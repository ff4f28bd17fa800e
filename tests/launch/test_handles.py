"""``block=False``: a launch as a handle, from cells, threads, coroutines, scripts and other front ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.kernels import Kernel

SETUP = """
import asyncio, functools, os, pathlib, tempfile, threading, time
from nb_accelerate import notebook_launcher
launch = functools.partial(notebook_launcher, progress="off")

def rank():
    return int(os.environ["RANK"])

class Gate:
    '''Something ranks wait for and a cell opens.'''
    def __init__(self):
        self.path = tempfile.mktemp()
    def wait(self):
        while not os.path.exists(self.path):
            time.sleep(0.005)
    def open(self):
        pathlib.Path(self.path).touch()
    def remove(self):
        os.remove(self.path)

def waits(gate, text="here"):
    print(text, rank())
    gate.wait()
    print("goes on", rank())
    return rank()
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.warm_up()
    shared_kernel.run(SETUP).ok()
    shared_kernel.run("launch(rank)").ok()  # the warm server can be used from here on
    return shared_kernel


@pytest.mark.contract("a launch: in the background")
def test_a_handle_tells_its_ranks_its_state_and_its_values(notebook: Kernel) -> None:
    first = notebook.start("gate = Gate(); handle = launch(waits, (gate,), 2, block=False)")
    notebook.finish(first).ok()
    seen = notebook.run(
        "while any(r.state != 'running' for r in handle.ranks) or not handle.ranks: time.sleep(0.01)\n"
        "alive = all(os.path.exists(f'/proc/{r.pid}') for r in handle.ranks)\n"
        "print(handle.status(), [r.rank for r in handle.ranks], alive)\n"
        "print(handle.wait(0.01))\n"
        "try:\n    handle.result(timeout=0.01)\nexcept TimeoutError as error:\n    print(error)\n"
        "handle"
    ).ok()
    assert seen.stdout.splitlines() == [
        "running [0, 1] True",
        "False",
        "waits has not ended within 0.01 s; it goes on",
    ]
    assert seen.value is not None
    assert seen.value.startswith("<Launch of waits on 2 ranks: running after ")
    done = notebook.run("gate.open(); print(handle.result(), handle.status()); gate.remove(); print(handle.output(1))")
    assert done.ok().stdout == "[0, 1] done\nhere 1\ngoes on 1\n\n"
    assert notebook.run("handle.output(5)").error == "LookupError"


def test_output_in_the_background_stays_in_the_cell_that_launched(notebook: Kernel) -> None:
    launching = notebook.start("gate = Gate(); handle = launch(waits, (gate, 'mine'), 1, block=False)")
    later = notebook.start("print('another cell'); gate.open(); handle.wait(); gate.remove()")
    texts: dict[str, str] = {launching: "", later: ""}
    idle = 0
    while idle < 2 or "goes on" not in texts[launching]:
        message = notebook.client.get_iopub_msg(timeout=30)
        parent = message["parent_header"].get("msg_id")
        if message["msg_type"] == "stream":
            texts[parent] += message["content"]["text"]
        elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            idle += 1
    assert texts == {launching: "mine 0\ngoes on 0\n", later: "another cell\n"}


def test_two_launches_run_at_once(notebook: Kernel) -> None:
    cell = notebook.run(
        "gate = Gate()\n"
        "one, two = (launch(waits, (gate,), n, block=False) for n in (1, 2))\n"
        "gate.open(); print(one.result(), two.result()); gate.remove()"
    ).ok()
    assert "[0] [0, 1]" in cell.stdout


def test_a_handle_can_be_awaited_and_the_loop_goes_on(notebook: Kernel) -> None:
    cell = notebook.run(
        "async def ticking(handle):\n"
        "    gate_opened = False\n"
        "    task = asyncio.ensure_future(asyncio.sleep(0.01))\n"
        "    await task\n"
        "    gate.open()\n"
        "    return await handle\n"
        "gate = Gate()\n"
        "print(await ticking(launch(waits, (gate,), 2, block=False))); gate.remove()"
    ).ok()
    assert cell.stdout.endswith("[0, 1]\n")


def test_interrupt_and_stop_end_a_handle(notebook: Kernel) -> None:
    for verb, status in (("interrupt", "interrupted"), ("stop", "stopped")):
        cell = notebook.run(
            f"handle = launch(waits, (Gate(),), 2, block=False)\nhandle.{verb}(); handle.wait()\n"
            "print(handle.status(), [r.state for r in handle.ranks])\nhandle.result()"
        )
        assert cell.error == "KeyboardInterrupt"
        assert cell.stdout.splitlines()[-1].startswith(f"{status} [")  # ranks may have begun, and printed


INTERRUPTED_WAIT = """
class Interrupted(threading.Event):
    def wait(self, timeout=None):
        raise KeyboardInterrupt

kept, handle._done = handle._done, Interrupted()
try:
    handle.{wait}()
finally:
    handle._done = kept
"""


def test_a_wait_that_is_interrupted_says_in_one_line_that_the_launch_goes_on(notebook: Kernel) -> None:
    notebook.run("gate = Gate(); handle = launch(waits, (gate,), 2, block=False)").ok()
    for wait in ("result", "wait"):
        left = notebook.run(INTERRUPTED_WAIT.format(wait=wait))
        assert left.error == "KeyboardInterrupt"
        assert re.search(r"waits goes on.*\.stop\(\)", left.message)
        assert len(left.traceback.splitlines()) == 1
    assert notebook.run("gate.open(); print(handle.result()); gate.remove()").ok().stdout == "[0, 1]\n"


def test_a_failure_in_the_background_is_said_and_raised_by_result(notebook: Kernel) -> None:
    notebook.run("def fails():\n    if rank() == 1: raise ValueError('no good')\n    time.sleep(60)").ok()
    cell = notebook.run("handle = launch(fails, (), 2, block=False); handle.wait(); handle").ok()
    assert "rank 1 failed: ValueError:" in cell.stderr
    assert "failed after" in str(cell.value)
    assert notebook.run("handle.result()").error == "ValueError"


def test_launching_from_a_thread_prints_into_its_cell(notebook: Kernel) -> None:
    cell = notebook.run(
        "found = []\n"
        "def work():\n    found.extend(launch(lambda: print('from', rank()) or rank(), (), 2))\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join(); print(found)"
    ).ok()
    assert sorted(cell.stdout.splitlines()) == ["[0, 1]", "[rank 0] from 0", "[rank 1] from 1"]


def test_launching_in_a_coroutine_works(notebook: Kernel) -> None:
    cell = notebook.run("async def main():\n    return launch(rank, (), 2)\nprint(await main())").ok()
    assert cell.stdout == "[0, 1]\n"


@pytest.mark.contract("a launch: restarts")
def test_restarts_start_all_ranks_again_and_tell_the_function(notebook: Kernel) -> None:
    notebook.run(
        "def works_at_last(needed):\n"
        "    count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "    if rank() == 1 and count < needed: raise OSError(f'not yet, {count}')\n"
        "    return count, os.environ['TORCHELASTIC_MAX_RESTARTS']\n"
    ).ok()
    cell = notebook.run("print(launch(works_at_last, (2,), 2, max_restarts=3))").ok()
    assert cell.stdout == "[(2, '3'), (2, '3')]\n"
    assert cell.stderr.splitlines() == [
        "rank 1 failed: OSError: not yet, 0; start 2 of 4",
        "rank 1 failed: OSError: not yet, 1; start 3 of 4",
    ]
    assert notebook.run("launch(works_at_last, (9,), 2, max_restarts=1)").message == "not yet, 1"


def test_the_timeout_is_for_all_attempts_together(notebook: Kernel) -> None:
    notebook.run("def fails():\n    time.sleep(0.2)\n    raise OSError('again')").ok()
    cell = notebook.run("launch(fails, (), 1, max_restarts=1000, timeout=1.5)")
    assert cell.error == "DeadlineError"
    assert "took longer than timeout=1.5" in cell.message
    assert 1 <= cell.stderr.count("OSError: again; start ") < 8


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("nb_accelerate.errors.ConfigError('no such precision')", "ConfigError"),
        ("nb_accelerate.errors.MissingDependencyError('wandb', needed_for='log_with')", "MissingDependencyError"),
    ],
)
def test_an_error_that_would_come_back_starts_nothing_again(notebook: Kernel, line: str, error: str) -> None:
    notebook.run(f"import nb_accelerate.errors\ndef fails():\n    raise {line}").ok()
    cell = notebook.run("launch(fails, (), 2, max_restarts=2)")
    assert cell.error == error
    assert re.fullmatch(rf".*not started again: .* {error} .*\n", cell.stderr)
    assert notebook.run("launch(lambda: (_ for _ in ()), (), 2, max_restarts=2)").error == "ShippingError"


SCRIPT = """
import os, threading
from nb_accelerate import notebook_launcher

class Mine:
    def __init__(self, rank): self.rank = rank

def train():
    print("in rank", os.environ["RANK"])
    return Mine(int(os.environ["RANK"]))

if __name__ == "__main__":
    print([value.rank for value in notebook_launcher(train, num_processes=2)])
"""


@pytest.mark.contract("a launch: from a script")
@pytest.mark.parametrize("method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_plain_script_launches_without_being_imported_again(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("num_processes=2", f"num_processes=2, start_method={method!r}"))
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50, check=True)
    lines = ran.stdout.splitlines()
    assert sorted(lines[:2]) == [f"[rank {rank}] in rank {rank}" for rank in (0, 1)]
    assert lines[2:] == ["[0, 1]"]  # and nothing else, for whoever pipes it
    assert ran.stderr.splitlines()[0] == "2 processes on CPU"


@pytest.mark.contract("a launch: from a terminal's IPython")
def test_a_terminal_ipython_launches(tmp_path: Path) -> None:
    script = tmp_path / "session.ipy"
    script.write_text(SCRIPT + "\nget_ipython().run_line_magic('time', '1')\n")
    env = {**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "dumb"}
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True, env=env)
    assert "[0, 1]" in ran.stdout


@pytest.mark.slow
def test_a_launch_inside_a_rank_works(notebook: Kernel) -> None:
    cell = notebook.run(
        "def outer():\n"
        "    from nb_accelerate import notebook_launcher\n"
        "    return notebook_launcher(lambda: rank() + 10, (), 2, progress='off')\n"
        "print(launch(outer, (), 1))"
    ).ok()
    assert cell.stdout == "[[10, 11]]\n"


IDLE = """
def idle(others):
    while True:
        children = psutil.Process(servers.warm_server().pid).children()
        found = {child.pid for child in children if child.name() == "nb-idle"}
        if len(found) == 2 and not found & set(others):
            return found
        time.sleep(0.05)  # there is no event for what another process forks

def has_what_can_wait():
    return "torch._dynamo" in sys.modules
"""


@pytest.mark.slow
def test_idle_processes_are_there_before_what_can_wait_is_imported_and_others_afterwards(notebook: Kernel) -> None:
    notebook.run("import psutil, sys, time\nfrom nb_accelerate.notebook.launch import close, servers\nclose()").ok()
    notebook.run(f"servers.PRELOAD += servers.LATER\n{IDLE}").ok()
    # The rank waits for the server, so that it has not imported the rest when the rank runs.
    first = "print(launch(has_what_can_wait, (), 1))\nearly = idle(())\nlate = idle(early)"
    assert notebook.run(first).ok().stdout == "[False]\n"
    assert notebook.run("print(launch(has_what_can_wait, (), 2))").ok().stdout == "[True, True]\n"


@pytest.mark.slow
def test_what_stays_can_be_ended_and_a_setting_keeps_nothing(notebook: Kernel) -> None:
    notebook.run("from nb_accelerate.notebook.launch import close\nclose()").ok()
    assert notebook.processes() == []
    notebook.run("os.environ['NB_ACCELERATE_KEEP_WARM'] = '0'").ok()
    assert notebook.run("print(launch(rank, (), 2))").ok().stdout == "[0, 1]\n"
    assert notebook.processes() == []
    notebook.run("del os.environ['NB_ACCELERATE_KEEP_WARM']").ok()
