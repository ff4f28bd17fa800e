"""Several machines by hand: the same cell on each.

Two processes play two machines over loopback addresses; where root and iproute2 are at hand, two network namespaces
do, with a cable between them and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from fixtures.hosts import HOSTS
from fixtures.python_template import python_program

from nb_accelerate.base.config.launch import LaunchOptions
from nb_accelerate.errors import DeadlineError, MachineError, StartError
from nb_accelerate.notebook.launch import notebook_launcher, rendezvous_store
from nb_accelerate.notebook.launch.rendezvous_store import FAILED, INTERRUPTED, Machines


@pytest.fixture(scope="module", autouse=True)
def libuv_has_its_pipe() -> None:
    """Make a store, as launches do: libuv keeps a pipe from the first one on, as long as the process lives."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


SCRIPT = """
import json, os, sys
from nb_accelerate import notebook_launcher

def train():
    import torch, torch.distributed as dist
    from nb_accelerate import Accelerator
    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor([float(accelerator.process_index)]), "sum")
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return total.item(), accelerator.is_local_main_process, *(int(os.environ[name]) for name in names)

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    for _ in range(options.pop("times", 1)):
        values = notebook_launcher(train, num_processes=2, timeout=40, progress="off", **options)
    print(json.dumps(values))
"""

EXPECTED = [
    [[6.0, True, 0, 0, 0, 4, 2], [6.0, False, 1, 1, 0, 4, 2]],
    [[6.0, True, 2, 0, 1, 4, 2], [6.0, False, 3, 1, 1, 4, 2]],
]


def run_on_two(
    tmp_path: Path, options: Callable[[int], dict[str, object]], prefix: Callable[[int], list[str]] = lambda _: []
) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    machines = [
        subprocess.Popen(
            [*prefix(node), python_program(), str(script), json.dumps(options(node))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    answers = []
    for machine in machines:
        out, err = machine.communicate(timeout=55)
        assert machine.returncode == 0, err
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def free_port() -> int:
    with socket.create_server(("127.0.0.2", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
def test_two_machines_meet_by_number_and_address_again_and_again(tmp_path: Path) -> None:
    port = free_port()
    found = run_on_two(
        tmp_path,
        lambda node: {"num_nodes": 2, "node_rank": node, "master_addr": "127.0.0.2", "use_port": port, "times": 3},
    )
    assert found == EXPECTED


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
@pytest.mark.limit(150)
def test_a_machine_that_was_started_for_another_number_of_them_says_so_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = {"master_addr": "127.0.0.2", "use_port": free_port(), "rdzv_conf": {"join_timeout": 1000}}
    command = [python_program(), str(script)]
    first = subprocess.Popen([*command, json.dumps({**options, "num_nodes": 2, "node_rank": 0})])
    try:
        other = [*command, json.dumps({**options, "num_nodes": 3, "node_rank": 2})]
        ran = subprocess.run(other, capture_output=True, text=True, timeout=100, check=False)
    finally:
        first.terminate()
        first.wait(20)
    assert re.search(r"3 machines\b.*127\.0\.0\.2:\d+ for 2", ran.stderr)


HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
"""What a client of torch's store begins with."""

STRANGERS = [
    b"",  # says nothing, and stays
    b"GET / HTTP/1.0\r\n\r\n",
    bytes(range(256)) * 40,
    HELLO + b"\xff" * 1000,
    *(HELLO + struct.pack("<BQ", query, 1 << 60) for query in range(1, 20)),
]


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
def test_bytes_of_strangers_end_nothing(tmp_path: Path) -> None:
    port, is_over, count = free_port(), threading.Event(), 0

    def intrude() -> None:
        nonlocal count
        with contextlib.ExitStack() as stack:
            for said in itertools.cycle(STRANGERS):
                # The store writes where it stood for each: more of them would leave it no time on a busy machine.
                if is_over.wait(0.02 if count < len(STRANGERS) else 0.2):
                    return
                with contextlib.suppress(OSError):  # nobody listens yet, or any more
                    stranger = stack.enter_context(socket.create_connection(("127.0.0.2", port), timeout=5))
                    stranger.sendall(said)
                    count += 1

    intruder = threading.Thread(target=intrude)
    intruder.start()
    try:
        found = run_on_two(
            tmp_path, lambda node: {"num_nodes": 2, "node_rank": node, "master_addr": "127.0.0.2", "use_port": port}
        )
    finally:
        is_over.set()
        intruder.join()
    assert found == EXPECTED
    assert count >= len(STRANGERS)


def machines_here(
    endpoint: tuple[str, int], listener: socket.socket | None = None, own: str = "127.0.0.2", **given: Any
) -> Machines:
    options = LaunchOptions(function=print, **{"num_nodes": 2, "master_addr": endpoint[0], **given})
    return Machines(options, endpoint, own, listener, num_processes=1, check=lambda: None)


@pytest.fixture
def first() -> Iterator[tuple[Machines, tuple[str, int]]]:
    """Machine 0, and where its store is."""
    listener = socket.create_server(("127.0.0.2", 0))
    endpoint: tuple[str, int] = listener.getsockname()
    machines = machines_here(endpoint, listener)
    yield machines, endpoint
    machines.close(FAILED)


def test_a_machine_whose_launch_was_killed_comes_again_in_another_round(
    first: tuple[Machines, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machines, endpoint = first
    killed = machines_here(endpoint, node_rank=1)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(machines.meet)
        assert killed.meet() == (1, "nb_accelerate none 0")
        assert met.result() == (0, "nb_accelerate none 0")
        monkeypatch.setattr(os, "getpid", lambda: 0)
        again = pool.submit(machines_here(endpoint, node_rank=1).meet)
        while int(machines._store.get("round")) == 0:  # the store tells nobody when a value changes
            time.sleep(0.01)
        assert machines.meet() == (0, "nb_accelerate none 1")
        assert again.result() == (1, "nb_accelerate none 1")


def test_a_launch_that_only_waited_leaves_its_number_to_another(first: tuple[Machines, tuple[str, int]]) -> None:
    machines, endpoint = first
    waits = machines_here(endpoint, num_nodes=2, node_rank=1, rdzv_conf={"join_timeout": 0})
    with pytest.raises(StartError, match="number 0 is missing"):
        waits.meet()
    waits.close(INTERRUPTED)
    assert not machines._store.check(["0/1"])
    assert not machines._store.check(["closed"])


def test_a_round_in_which_all_have_met_is_not_left_out_though_another_machine_has_begun_the_next(
    first: tuple[Machines, tuple[str, int]],
) -> None:
    machines, endpoint = first
    store = machines._store
    for key in ("0/0", "0/0/there"):  # as machine 0 does, which then begins again
        store.set(key, "machine 0")
    store.set("round", "1")
    late = machines_here(endpoint, node_rank=1)
    late._round, late._node_rank = 0, 1
    store.set("0/1", "machine 1")
    assert late._all_have_come()


@pytest.mark.parametrize("node_rank", [0, 1])
@pytest.mark.parametrize(("how", "status"), [("stop", "stopped"), ("interrupt", "interrupted")])
def test_a_launch_that_waits_for_machines_is_ended_at_once(node_rank: int, how: str, status: str) -> None:
    place = {"num_nodes": 2, "master_addr": "127.0.0.2", "use_port": free_port()}
    launch = notebook_launcher(print, num_processes=1, node_rank=node_rank, block=False, progress="off", **place)
    began = time.monotonic()
    getattr(launch, how)()
    with pytest.raises(KeyboardInterrupt, match=f"was {status} before its ranks"):
        launch.result(20)
    assert time.monotonic() < began + 10
    assert launch.status() == status


def stay(folder: str) -> None:
    Path(folder, os.environ["RANK"]).touch()
    while True:
        time.sleep(0.05)


def test_a_launch_that_is_interrupted_ends_those_on_other_machines_and_says_so(tmp_path: Path) -> None:
    place = {"num_nodes": 2, "master_addr": "127.0.0.2", "use_port": free_port()}
    launches = [
        notebook_launcher(stay, (str(tmp_path),), 1, node_rank=node, block=False, progress="off", **place)
        for node in (0, 1)
    ]
    while len([*tmp_path.iterdir()]) < 2:
        time.sleep(0.01)
    launches[0].interrupt()
    with pytest.raises(KeyboardInterrupt):
        launches[0].result(20)
    with pytest.raises(MachineError, match="was interrupted"):
        launches[1].result(20)


def test_the_time_of_a_launch_is_over_also_while_it_waits_for_machines() -> None:
    place = {"num_nodes": 2, "master_addr": "127.0.0.2", "use_port": free_port()}
    with pytest.raises(DeadlineError, match=r"took longer than timeout=0\.5"):
        notebook_launcher(print, num_processes=1, timeout=0.5, progress="off", **place)


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
def test_two_machines_are_numbered_as_they_come(tmp_path: Path) -> None:
    endpoint = f"127.0.0.2:{free_port()}"
    found = run_on_two(
        tmp_path,
        lambda node: {
            "num_nodes": 2,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": endpoint,
            "rdzv_id": "job",
            "rdzv_conf": {"is_host": node == 0, "join_timeout": 30},
        },
    )
    assert sorted(found) == EXPECTED


AGAIN = """
import os, sys
from nb_accelerate import notebook_launcher

def fails_first():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0:
        raise ValueError("on purpose")
    return attempt

for _ in range(3):
    machines = dict(num_nodes=2, node_rank=int(sys.argv[3]), master_addr="127.0.0.2", use_port=int(sys.argv[2]))
    ranks = dict(num_processes=2, start_method=sys.argv[1], max_restarts=1, progress="off")
    print(notebook_launcher(fails_first, **ranks, **machines))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "forkserver"])
def test_the_place_where_machines_met_is_free_for_the_next_attempt_and_launch(method: str) -> None:
    command = [python_program(), "-c", AGAIN, method, str(free_port())]
    machines = [
        subprocess.Popen([*command, str(node)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for node in (0, 1)
    ]
    for machine in machines:
        out, err = machine.communicate(timeout=55)
        assert machine.returncode == 0, err
        assert out == "[1, 1]\n" * 3


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
def test_machines_that_do_not_come_are_counted(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"1 of 2 .*127\.0\.0\.2:\d+ "):
        notebook_launcher(
            print,
            num_processes=1,
            num_nodes=2,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.2:{free_port()}",
            rdzv_conf={"join_timeout": 2, "is_host": True},
            progress="off",
        )


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
def test_the_time_that_torch_takes_to_be_imported_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "_GRACE", 3.0)
    monkeypatch.setattr(rendezvous_store, "importlib", SimpleNamespace(import_module=lambda _: time.sleep(5)))
    place = {"master_addr": "127.0.0.2", "use_port": free_port(), "rdzv_conf": {"join_timeout": 1}}
    with pytest.raises(StartError, match="number 1 is missing"):
        notebook_launcher(print, num_processes=1, num_nodes=2, progress="off", **place)


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
@pytest.mark.parametrize("two_hosts", ["", "ipv6"], indirect=True)
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_hosts_meet_across_a_cable(tmp_path: Path, two_hosts: list[str], backend: str) -> None:
    def options(node: int) -> dict[str, object]:
        if backend == "static":
            return {"num_nodes": 2, "node_rank": node, "master_addr": two_hosts[0]}
        return {
            "num_nodes": 2,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"[{two_hosts[0]}]:29400",
            "rdzv_conf": {"join_timeout": 30},
        }

    found = run_on_two(tmp_path, options, lambda node: ["ip", "netns", "exec", HOSTS[node]])
    assert sorted(found) == EXPECTED


WAITS = """
import json, sys, time
from pathlib import Path
from nb_accelerate import notebook_launcher

def wait(gate):
    import os
    Path(f"{gate}.{os.environ['RANK']}").touch()
    while not Path(gate).exists():
        time.sleep(0.01)

options = json.loads(sys.argv[1])
notebook_launcher(wait, (sys.argv[2],), num_processes=1, progress="off", **options)
"""


@contextlib.contextmanager
def waiting(
    folder: Path, options: Callable[[int], dict[str, object]], *nodes: int, prefix: Callable[[int], list[str]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start launches whose ranks wait for the file gate in the folder. What they say goes to files said.NODE."""
    machines = []
    with contextlib.ExitStack() as stack:
        for node in nodes:
            said = stack.enter_context((folder / f"said.{node}").open("w"))
            words = [*prefix(node), python_program(), "-c", WAITS, json.dumps(options(node)), str(folder / "gate")]
            machines.append(subprocess.Popen(words, stdout=said, stderr=said, text=True))
        try:
            yield machines
        finally:
            for machine in machines:
                machine.terminate()
                machine.wait(20)


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
@pytest.mark.limit(120)
def test_a_machine_that_is_killed_while_it_waits_leaves_its_number_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_store, "_GRACE", 1.0)
    listener = socket.create_server(("127.0.0.2", 0))
    endpoint: tuple[str, int] = listener.getsockname()
    options = {"num_nodes": 3, "rdzv_backend": "c10d", "rdzv_endpoint": "{}:{}".format(*endpoint)}
    machines = machines_here(endpoint, listener, **options)
    not_here = {**options, "rdzv_conf": {"is_host": False}}
    with waiting(tmp_path, lambda _: not_here, 1, prefix=lambda _: []) as [killed]:
        wait_for(lambda: machines._store.check(["0/1"]), killed)
        killed.kill()
        killed.wait()
        others = [machines_here(endpoint, own=f"127.0.0.{number}", **options) for number in (3, 4)]
        with ThreadPoolExecutor(3) as pool:
            met = [pool.submit(one.meet) for one in (machines, *others)]
            names = sorted(one.result(60) for one in met)
    assert names == [(number, "nb_accelerate none 1") for number in range(3)]
    for one in (*others, machines):
        one.close(FAILED)


def wait_for(is_there: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    """Wait for what processes bring about that send this one no event."""
    while not is_there():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("python_template")
@pytest.mark.limit(150)
def test_a_cut_between_machines_whose_ranks_go_on_is_told_on_both(tmp_path: Path, two_hosts: list[str]) -> None:
    def options(node: int) -> dict[str, object]:
        return {"num_nodes": 2, "node_rank": node, "master_addr": two_hosts[0]}

    def said(node: int) -> list[str]:
        return re.findall(r"nothing has been heard of the machine at (\S+)", (tmp_path / f"said.{node}").read_text())

    with waiting(tmp_path, options, 0, 1, prefix=lambda node: ["ip", "netns", "exec", HOSTS[node]]) as machines:
        wait_for(lambda: len([*tmp_path.glob("gate.*")]) == 2, *machines)
        subprocess.run(["ip", "-n", HOSTS[1], "link", "set", "nbveth1", "down"], check=True)
        wait_for(lambda: said(0) and said(1), *machines)
        subprocess.run(["ip", "-n", HOSTS[1], "link", "set", "nbveth1", "up"], check=True)
        (tmp_path / "gate").touch()
        assert [machine.wait(60) for machine in machines] == [0, 0]
    assert said(0) == [two_hosts[1]]
    assert said(1) == [f"{two_hosts[0]}:29500"]
