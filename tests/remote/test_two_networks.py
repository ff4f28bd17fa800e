"""Ranks on two machines with a cable between them and nothing else: network namespaces."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from fixtures import relay
from fixtures.hosts import HOSTS
from remote.test_cells import FOUND, KEPT, advised
from remote.test_launches import wait_for, waits

from nb_accelerate.errors import DeadlineError, LaunchError, RankDiedError, StartError
from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.notebook.pool.options import CellOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fixtures.kernels import Kernel
    from fixtures.python_template import PythonTemplate

SUM = "import torch, torch.distributed as dist\nx = torch.ones(1) * 2**rank\ndist.all_reduce(x)\nx.item()"


@pytest.fixture
def networks(two_hosts: list[str], monkeypatch: pytest.MonkeyPatch, python_template: PythonTemplate) -> list[str]:
    """Choose the two namespaces as machines; gives their addresses."""
    monkeypatch.setenv("NB_ACCELERATE_ENGINE", "command")
    monkeypatch.setenv("NB_ACCELERATE_HOSTS", f"{HOSTS[0]}:1,{HOSTS[1]}:2")
    monkeypatch.setenv("NB_ACCELERATE_COMMAND_TEMPLATE", "ip netns exec {host} {command}")
    monkeypatch.setenv("NB_ACCELERATE_REMOTE_PYTHON", str(python_template.program))
    return two_hosts


@pytest.fixture
def over_the_cable(networks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the bytes between the kernel and the second machine go over the cable too."""
    relayed = f"{sys.executable} {relay.__file__} {HOSTS[1]} {networks[1]}"
    monkeypatch.setenv(
        "NB_ACCELERATE_COMMAND_TEMPLATE",
        f"sh -c 'test {{host}} = {HOSTS[0]} || relay=\"{relayed}\"; exec ip netns exec {HOSTS[0]} $relay {{command}}'",
    )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def cable(state: str) -> None:
    ip("-n", HOSTS[1], "link", "set", "nbveth1", state)


def listeners() -> list[str]:
    found = []
    for name in HOSTS:
        said = subprocess.run(["ip", "netns", "exec", name, "ss", "-Hltn"], check=True, capture_output=True, text=True)
        found += [line.split()[3] for line in said.stdout.splitlines()]
    return found


@pytest.fixture
def pool(networks: list[str]) -> Iterator[Pool]:
    """Ranks that stay: rank 0 on the first machine, ranks 1 and 2 on the second."""
    started = Pool()
    started.start()
    yield started
    started.stop()


def run(pool: Pool, text: str, *, timeout: float | None = None) -> list[Any]:
    options = CellOptions(wants_values=True, progress="off", timeout=timeout)
    return pool.run(read_cell(text), options, variables={})


@pytest.mark.slow
@pytest.mark.parametrize("two_hosts", ["", "ipv6"], indirect=True)
def test_a_launch_meets_at_the_address_that_the_other_machine_reaches(networks: list[str]) -> None:
    def train() -> tuple[float, str, str]:
        import os

        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        total = accelerator.reduce(torch.tensor([2.0**accelerator.process_index]), "sum").item()
        return total, os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]

    assert notebook_launcher(train, progress="off") == [
        (7.0, networks[0], "nbveth0"),
        (7.0, networks[0], "nbveth1"),
        (7.0, networks[0], "nbveth1"),
    ]


def test_a_machine_that_the_other_does_not_reach_is_told_before_ranks_start(networks: list[str]) -> None:
    cable("down")
    with pytest.raises(
        StartError, match=rf"machine {HOSTS[1]}: cannot reach {HOSTS[0]} at {networks[0]}:\d+: .* Open the"
    ):
        notebook_launcher(time.time, progress="off")


@pytest.mark.slow
def test_an_address_of_a_bridge_that_both_machines_have_is_not_the_one_where_ranks_meet(networks: list[str]) -> None:
    for name in HOSTS:
        ip("-n", name, "link", "add", "docker0", "type", "bridge")  # before the cable's, by name
        ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        ip("-n", name, "link", "set", "docker0", "up")
    assert notebook_launcher(master, progress="off") == [networks[0]] * 3


def master() -> str:
    import os

    return os.environ["MASTER_ADDR"]


@pytest.mark.slow
def test_the_address_that_is_given_is_the_only_one_that_is_tried(networks: list[str]) -> None:
    ip("-n", HOSTS[0], "addr", "add", "10.77.7.77/24", "dev", "nbveth0")
    assert notebook_launcher(master, progress="off", master_addr="10.77.7.77") == ["10.77.7.77"] * 3
    with pytest.raises(StartError, match=rf"machine {HOSTS[0]}: .*10\.0\.0\.9:"):
        notebook_launcher(master, progress="off", master_addr="10.0.0.9")


@pytest.mark.slow
def test_a_firewall_in_one_direction_is_found_and_named(networks: list[str]) -> None:
    port = "29555"
    # Nothing that is for TCP leaves the second machine, but what goes to the store: as if SYN packets were dropped.
    ip("-n", HOSTS[1], "rule", "add", "pref", "10", "ipproto", "tcp", "dport", port, "lookup", "main")
    ip("-n", HOSTS[1], "rule", "add", "pref", "20", "ipproto", "tcp", "blackhole")
    said = rf"machine {HOSTS[0]}: cannot reach {HOSTS[1]} at {networks[1]}:\d+: timed out. Ranks connect .* in both"
    began = time.monotonic()
    with pytest.raises(StartError, match=said):
        notebook_launcher(master, progress="off", use_port=port)
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_ranks_are_taken_out_of_a_collective_while_the_cable_is_cut_and_meet_again(pool: Pool) -> None:
    assert run(pool, SUM) == [7.0] * 3
    pids = run(pool, "import os\nos.getpid()")
    cable("down")
    with pytest.raises(DeadlineError, match=r"longer than 0\.5 s"):
        run(pool, "dist.all_reduce(torch.ones(1))", timeout=0.5)
    cable("up")
    assert run(pool, f"{SUM}\nos.getpid()") == pids


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_cable_that_is_cut_between_ranks_is_told_and_ranks_go_on_when_it_is_back(
    networks: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def exchange(gate: str) -> int:
        from pathlib import Path

        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        rounds, is_over = 0, torch.zeros(1)
        while not is_over.any():
            is_over = accelerator.reduce(torch.tensor([float(Path(gate).exists())]))
            rounds += 1
            Path(f"{gate}.{accelerator.process_index}").touch()
        return rounds

    launch, _ = started(tmp_path, exchange)
    cable("down")
    began, said = time.monotonic(), ""
    while "cannot reach" not in said:
        assert time.monotonic() - began < 40
        assert not launch.wait(0.1)
        said += "".join(capfd.readouterr())
    assert f"cannot reach {HOSTS[0]} at {networks[0]}" in said
    assert "when the network does" in said
    print(f"told after {time.monotonic() - began:.1f} s")
    cable("up")
    (tmp_path / "gate").touch()
    assert len(launch.result(timeout=60)) == 3
    assert "hostname" not in said


@pytest.mark.slow
@pytest.mark.parametrize("two_hosts", ["", "ipv6"], indirect=True)
def test_only_the_store_and_connections_between_ranks_of_cells_listen(pool: Pool, networks: list[str]) -> None:
    assert run(pool, SUM) == [7.0] * 3
    assert {address.rpartition(":")[0].strip("[]") for address in listeners()} <= set(networks)
    with pytest.raises(RankDiedError):
        run(pool, "import os\nif rank == 2:\n    os.kill(os.getpid(), 9)\ndist.barrier()")
    assert pool.restart(2) == [2]
    assert run(pool, SUM) == [7.0] * 3


def started(tmp_path: Path, function: Callable[[str], Any] = waits) -> tuple[Any, list[psutil.Process]]:
    """Launch a function; returns when all ranks run it, also the processes of the second machine, its host first."""
    launch = notebook_launcher(function, (str(tmp_path / "gate"),), progress="off", block=False)
    wait_for(lambda: launch.status() not in ("starting", "running") or len([*tmp_path.glob("gate.*")]) == 3)
    host = next(one for one in psutil.Process(launch.ranks[1].pid).parents() if one.name() == "nb-host")
    return launch, [host, *host.children(recursive=True)]


@pytest.mark.slow
def test_a_cut_of_some_seconds_is_not_noticed(over_the_cable: None, tmp_path: Path) -> None:
    launch, _ = started(tmp_path)
    cable("down")
    time.sleep(3)  # of silence, while nothing is to be seen
    cable("up")
    (tmp_path / "gate").touch()
    assert launch.result(timeout=60) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut off", "switched off", "frozen"])
def test_a_machine_that_goes_away_is_told_after_15_seconds_and_nothing_stays(
    over_the_cable: None, tmp_path: Path, how: str
) -> None:
    launch, there = started(tmp_path)
    assert len(there) >= 4  # host, server, two ranks
    if how != "frozen":
        cable("down")
    if how != "cut off":
        for process in there:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with the one before
                process.send_signal(signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(LaunchError, match=f"machine {HOSTS[1]} is lost:.* 15 s") as caught:
        launch.result(timeout=60)
    told = time.monotonic() - began
    if how == "frozen":
        there[0].resume()  # the system resumes the server when this one has ended
    _, alive = psutil.wait_procs(there, timeout=10)
    ended = time.monotonic() - began
    print(f"{how}: told after {told:.1f} s, ended after {ended:.1f} s")
    assert alive == []
    assert 13 < told < 17.5  # at most 16, and what a busy machine adds
    assert ended < 20
    assert "0 was in waits" in "".join(caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut off", "started again"])
def test_each_line_that_a_machine_behind_a_cut_cable_is_told_with_does_what_it_says(
    over_the_cable: None, kernel: Kernel, how: str
) -> None:
    kernel.run(
        "%load_ext nb_accelerate\nfrom nb_accelerate.notebook.remote import sender\nsender.SILENCE_LIMIT = 3"
    ).ok()
    kernel.run(KEPT).ok()
    there = [one for one in psutil.process_iter() if one.name() == "nb-host" and is_behind_the_cable(one)]
    cable("down")
    if how == "started again":  # its end of the connection is gone, which the kernel's does not know
        for process in [*there[0].children(recursive=True), *there]:
            with contextlib.suppress(psutil.NoSuchProcess):  # its server's end has ended it
                process.kill()
        cable("up")
    told = kernel.run("%%distributed\nimport time\ntime.sleep(60)")
    assert f"1 and 2 are lost: machine {HOSTS[1]}" in told.message or f"machine {HOSTS[1]} is lost" in told.message
    told = kernel.run("%%distributed\nrank")
    assert "--ranks 0" in told.message
    assert kernel.run("%%distributed --ranks 0 --out found\nkept").ok()
    assert kernel.run("%distributed pull kept\nkept, found").ok().value == "(10, [10])"
    [line] = advised(told.message)
    if how == "cut off":
        failed = kernel.run(line)
        assert failed.error == "StartError"
        assert f"machine {HOSTS[1]} cannot be reached: " in failed.message
        line = advised(failed.message)[0]
        cable("up")
    assert "ranks 1, 2 are new" in kernel.run(line).ok().stdout
    kernel.run(FOUND).ok()
    assert kernel.run("found").ok().value == "[(7.0, 10), (7.0, None), (7.0, None)]"
    psutil.wait_procs(there, timeout=20)
    assert not any(one.is_running() for one in there)


def is_behind_the_cable(process: psutil.Process) -> bool:
    said = subprocess.run(["ip", "netns", "identify", str(process.pid)], check=True, capture_output=True, text=True)
    return said.stdout.strip() == HOSTS[1]
