"""Hosts that stay between launches: who takes them, and when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch import close, notebook_launcher
from nb_accelerate.notebook.launch.engines.command import CommandEngine

if TYPE_CHECKING:
    from fixtures.engines import Machines
    from fixtures.kernels import Kernel


def parents() -> tuple[int, int]:
    """Return the process ids of the host of this rank, and of this rank."""
    return psutil.Process().parent().ppid(), os.getpid()


def launched(**options: object) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = notebook_launcher(parents, progress="off", **options)
    return found


def hosts_of(launch: list[tuple[int, int]]) -> list[int]:
    return [host for host, _ in launch]


@pytest.mark.slow
def test_the_next_launch_has_the_same_hosts_and_other_ranks(machines: Machines) -> None:
    first, second = launched(), launched()
    assert hosts_of(first) == hosts_of(second) == [host.pid for host in machines.hosts()[:1] + machines.hosts()[1:] * 2]
    assert {pid for _, pid in first}.isdisjoint(pid for _, pid in second)
    with pytest.raises(ConfigError):
        launched(num_processes=7)
    assert hosts_of(launched()) == hosts_of(first)
    close()
    assert machines.hosts() == []


@pytest.mark.slow
def test_other_options_have_other_hosts_and_those_before_end(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {*hosts_of(launched())}
    monkeypatch.setenv("NB_ACCELERATE_HOSTS", "a:1")
    second = {*hosts_of(launched())}
    assert first.isdisjoint(second)
    assert {host.pid for host in machines.hosts()} == second


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_has_died_or_is_silent_is_replaced_without_a_word(
    machines: Machines, signum: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if signum == signal.SIGSTOP:  # Linux wakes and ends a stopped child of sshd when sshd ends
        monkeypatch.setenv("NB_ACCELERATE_REMOTE_PYTHON", sys.executable)
    monkeypatch.setattr("nb_accelerate.notebook.launch.hosts._ANSWER_TIMEOUT", 1.0)
    monkeypatch.setattr("nb_accelerate.notebook.remote.link._CLOSE_TIMEOUT", 1.0)
    first = launched()
    machines.kill(machines.hosts()[1], signum)
    second = launched()
    assert {*hosts_of(first)}.isdisjoint(hosts_of(second))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_hosts_end_when_no_launch_has_come_for_long(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommandEngine, "idle_limit", 0.2)
    launched()
    psutil.wait_procs(machines.hosts(), timeout=20)
    assert machines.hosts() == []
    assert len(launched()) == 3


@pytest.mark.slow
def test_distributed_stop_ends_them(machines: Machines, kernel: Kernel) -> None:
    kernel.run("%load_ext nb_accelerate\nfrom nb_accelerate import notebook_launcher").ok()
    kernel.run("notebook_launcher(print, progress='off')").ok()
    assert len(machines.hosts()) == 2
    assert (
        kernel.run("%distributed stop").ok().stdout
        == "no ranks are running; the machines of the last launch are free\n"
    )
    psutil.wait_procs(machines.hosts(), timeout=20)
    assert machines.hosts() == []
    assert kernel.run("%distributed stop").ok().stdout == "no ranks are running\n"


@pytest.mark.slow
def test_none_are_kept_where_nothing_is_to_be_kept(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NB_ACCELERATE_KEEP_WARM", "0")
    launched()
    assert machines.hosts() == []


KERNEL = """
from nb_accelerate import notebook_launcher
import psutil
def host(): return psutil.Process().parent().ppid()
if __name__ == "__main__":
    for _ in range(2):
        print(*notebook_launcher(host, progress="off"))
"""


@pytest.mark.slow
def test_hosts_end_with_the_kernel(machines: Machines) -> None:
    ran = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, check=True)
    first, second = (line.split() for line in ran.stdout.splitlines()[-2:])
    assert first == second
    assert not any(psutil.pid_exists(int(pid)) for pid in first)
