"""Ranks on the nodes of a cluster of Ray: two of them, on two addresses of this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fixtures.engines import Machines
from fixtures.ray_nodes import NODES

from nb_accelerate.base.config.engine import EngineOptions
from nb_accelerate.errors import LaunchError, StartError
from nb_accelerate.notebook.launch import close, notebook_launcher
from nb_accelerate.notebook.launch.engines.ray import RayEngine

LINES = 2000
HOST = ("-m", "nb_accelerate.notebook.launch.host")


def actors() -> list[psutil.Process]:
    """The actors of this engine on this machine, by the node that they are of."""
    found = []
    for process in psutil.process_iter():
        try:
            if " ".join(process.cmdline()).startswith("ray::Keeper"):
                found.append(process)
        except psutil.Error:  # it has just ended
            continue
    return found


def wait_for(is_there: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():  # other processes, that send this one no event
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_launches_in_turn_have_the_same_hosts_and_nothing_of_ray_is_seen(
    machines: Machines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values_and_output_come_from_both_nodes(capfd)
    kept = actors()
    assert len(kept) == 2
    an_exception_comes_with_its_type_and_its_rank()
    capfd.readouterr()
    an_actor_that_is_killed_is_a_lost_machine_of_which_nothing_stays(tmp_path, capfd)
    assert set(actors()) < set(kept)
    close()
    assert actors() == []


def values_and_output_come_from_both_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    sent = torch.arange(100_000)

    def train(tensor: torch.Tensor) -> tuple[Any, ...]:
        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        for line in range(LINES):
            print(f"line {line}")
        total = accelerator.reduce(torch.tensor([2.0**accelerator.process_index]), "sum")
        numbers = tuple(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return total.item(), numbers, tensor * 2, os.environ.get("OMP_NUM_THREADS")

    values = notebook_launcher(train, (sent,), progress="off")
    assert [value[0] for value in values] == [7.0] * 3
    assert [value[1] for value in values] == [(0, 0, 1), (1, 0, 2), (2, 1, 2)]
    assert all(torch.equal(value[2], sent * 2) for value in values)
    printed = capfd.readouterr()
    assert printed.out.splitlines() == [f"line {line}" for line in range(LINES)]
    assert printed.err == ""


def an_exception_comes_with_its_type_and_its_rank() -> None:
    def train() -> None:
        if os.environ["RANK"] == "2":
            raise KeyError("no such key")

    with pytest.raises(KeyError, match="no such key") as caught:
        notebook_launcher(train, progress="off")
    assert "rank 2" in "".join(caught.value.__notes__)


def waits(gate: str) -> None:
    Path(f"{gate}.{os.environ['RANK']}").touch()
    while not Path(gate).exists():
        time.sleep(0.01)


def an_actor_that_is_killed_is_a_lost_machine_of_which_nothing_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = notebook_launcher(waits, (str(tmp_path / "gate"),), progress="off", block=False)
    wait_for(lambda: len([*tmp_path.glob("gate.*")]) == 3)
    [actor] = [actor for actor in actors() if actor.environ()["OWN"] == "b"]
    started = actor.children(recursive=True)
    actor.kill()
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match=rf"machine {NODES[1]} is lost: the actor of Ray that keeps its host has ended"
    ):
        launch.result(timeout=30)
    assert time.monotonic() - began < 10
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "the actor of Ray that keeps its host has ended, because its worker process has died" in printed.err
    assert printed.err.count("\n") == 1


def test_nobody_listens_once_all_hosts_have_come_and_none_is_taken_twice(cluster: str) -> None:
    options = EngineOptions(engine="ray", address=cluster, hosts=[f"{NODES[0]}:1", f"{NODES[1]}:1"])
    engine = RayEngine(options)
    try:
        machines = engine.machines()
        assert [(machine.name, machine.num_ranks) for machine in machines] == [(NODES[0], 1), (NODES[1], 1)]
        assert [engine.address(machine) for machine in machines] == list(NODES)
        listener = engine._listener
        assert listener is not None
        first, second = (engine.start(machine, [*options.python, *HOST]) for machine in machines)
        listener._thread.join(10)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((listener.address, listener.port))
        first.close()
        assert re.search("its host, .* ended with exit code [01]", first.why_ended())
        assert os.read(second.reads, 24).startswith(b"\n--nb-accelerate-host")
        second.close()
    finally:
        engine.close()
    assert actors() == []


def test_a_command_that_ends_at_once_is_told_with_what_it_wrote(cluster: str) -> None:
    engine = RayEngine(EngineOptions(engine="ray", address=cluster, hosts=[f"{NODES[0]}:1"]))
    try:
        [machine] = engine.machines()
        with pytest.raises(StartError, match=rf"{NODES[0]}: its host, .* exit code 1: .*No module named not_there"):
            engine.start(machine, ["python3", "-m", "not_there"])
    finally:
        engine.close()


def test_what_the_cluster_does_not_have_is_named(cluster: str) -> None:
    engine = RayEngine(EngineOptions(engine="ray", address=cluster, hosts=["127.0.0.2:3"]))
    with pytest.raises(StartError, match=r"127.0.0.2 .*has 2 CPUs"):
        engine.machines()
    engine.close()


def test_no_more_is_reserved_than_is_asked_for_and_what_others_use_is_not_waited_for_long(cluster: str) -> None:
    first, second, third = (
        RayEngine(EngineOptions(engine="ray", address=cluster, hosts=hosts))
        for hosts in ([], [f"{NODES[1]}:1"], [f"{NODES[0]}:1"])
    )
    try:
        machines = first.machines(3)
        assert [(first.address(machine), machine.num_ranks) for machine in machines] == [(NODES[0], 2), (NODES[1], 1)]
        assert [machine.num_ranks for machine in second.machines()] == [1]
        with pytest.raises(StartError, match=r"others use.*1 CPUs were"):
            third.machines()
    finally:
        first.close()
        second.close()
        third.close()


def test_another_version_of_ray_is_named(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import ray; ray.__version__ = '2.0.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine = RayEngine(EngineOptions(engine="ray", address=cluster))
    with pytest.raises(StartError, match=r"(?s)Version mismatch.*Ray: 2\.[^0].*Ray: 2\.0\.0"):
        engine.machines()


def test_an_address_where_nothing_answers_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    engine = RayEngine(EngineOptions(engine="ray", address=address))
    began = time.monotonic()
    with pytest.raises(StartError, match=f"no cluster of Ray answers at address='{address}': Connection refused"):
        engine.machines()
    assert time.monotonic() - began < 30


def test_the_process_that_talks_to_ray_may_be_killed(cluster: str) -> None:
    options = EngineOptions(engine="ray", address=cluster, hosts=[f"{NODES[0]}:1"])
    engine = RayEngine(options)
    try:
        [machine] = engine.machines()
        stream = engine.start(machine, [*options.python, *HOST])
        assert engine._driver is not None
        os.kill(engine._driver._process.pid, signal.SIGKILL)
        assert "the process that talks to Ray has ended" in stream.why_ended()
        stream.close()
    finally:
        engine.close()
    wait_for(lambda: actors() == [])
