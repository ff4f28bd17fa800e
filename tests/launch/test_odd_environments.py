"""Environments in which a launch cannot work say so in time; forks of a rank are not ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fixtures.ranks import RunRanks
from fixtures.refusals import place_without, why_no_place

from nb_accelerate import notebook_launcher
from nb_accelerate.base.devices import cuda
from nb_accelerate.errors import StartError


def test_a_working_directory_that_was_deleted_is_named_and_another_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StartError, match=r"working directory.*os\.chdir"):
        notebook_launcher(os.getcwd, (), 2, progress="off", timeout=45)
    monkeypatch.chdir(tmp_path)
    assert notebook_launcher(os.getcwd, (), 2, progress="off", timeout=45) == [str(tmp_path)] * 2


IN_A_DELETED_FOLDER = """
import os, sys
from nb_accelerate import notebook_launcher
from nb_accelerate.errors import StartError
os.rmdir(os.getcwd())
try:
    notebook_launcher(print, (), 2, progress="off", timeout=40)
except StartError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_server_is_started_in_a_folder_that_exists(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-c", IN_A_DELETED_FOLDER]
    ran = subprocess.run(command, cwd=gone, capture_output=True, text=True, timeout=50, check=True)
    assert "it has been deleted" in ran.stdout


WITHOUT_LOOPBACK = """
from nb_accelerate import notebook_launcher
def add():
    import torch
    from nb_accelerate import Accelerator
    return Accelerator(cpu=True).reduce(torch.ones(1)).item()
print(notebook_launcher(add, (), 1, progress="off", timeout=40))
"""


def can_unshare() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True, timeout=20, check=False).returncode == 0


@pytest.mark.slow
def test_without_the_loopback_interface_one_rank_works() -> None:
    if not can_unshare():
        pytest.skip("needs a network of its own")
    command = ["unshare", "-n", sys.executable, "-c", WITHOUT_LOOPBACK]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert ran.stdout == "[1.0]\n"


def test_a_process_that_a_function_forks_ends_with_it_and_answers_nothing(run_ranks: RunRanks) -> None:
    def fork(end: str) -> tuple[int, int]:
        rank = os.getpid()
        child = os.fork()
        if child == 0 and end == "raises":
            raise ValueError("in the child")
        if child == 0 and end == "exits":
            sys.exit(7)
        if child == 0 and end == "exits below zero":
            sys.exit(-1)
        if child == 0:
            return 0, 0
        _, status = os.waitpid(child, 0)
        return os.getpid() - rank, os.waitstatus_to_exitcode(status)

    assert run_ranks(fork, "returns") == [(0, 0)] * 2
    assert run_ranks(fork, "raises") == [(0, 1)] * 2
    assert run_ranks(fork, "exits") == [(0, 7)] * 2
    assert run_ranks(fork, "exits below zero") == [(0, 255)] * 2


def test_ranks_meet_where_the_owners_of_connections_are_not_told(run_ranks: RunRanks) -> None:
    def meet() -> float:
        import torch

        from nb_accelerate import Accelerator
        from nb_accelerate.training.process import loopback

        loopback._uid_of = lambda *_: loopback._UNKNOWN
        return Accelerator(cpu=True).reduce(torch.ones(1)).item()

    assert run_ranks(meet) == [2.0] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="root can become somebody who may not look")
def test_a_driver_that_may_not_be_looked_for_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(cuda, "_DRIVERS", (str(closed / "driver"),))
    os.seteuid(65534)
    try:
        assert cuda.visible_devices("", False) == ()
    finally:
        os.seteuid(0)


CHILD = """
import os, time
from nb_accelerate.notebook.worker.server.process_tree import die_with_parent
parent = os.getpid()
if os.fork() == 0:
    die_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(60)
os.wait()
"""


def test_a_rank_ends_with_its_parent_where_the_system_refuses_to_end_it() -> None:
    if reason := why_no_place("prctl"):
        pytest.skip(reason)
    command = [*place_without("prctl"), sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=20)[1] == []


def test_the_command_line_says_where_no_processes_are_listed() -> None:
    if reason := why_no_place("/proc"):
        pytest.skip(reason)
    command = [*place_without("/proc"), sys.executable, "-m", "nb_accelerate", "status"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    # psutil before 6 has printed a traceback by then.
    assert re.match(r"nb-accelerate: .*/proc\b", ran.stderr.splitlines()[-1])
