"""Several machines by hand: the same cell on each.

Two processes play two machines over loopback addresses; where root and iproute2 are at hand, two network namespaces
do, with a cable between them and nothing else.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
    print(json.dumps(notebook_launcher(train, num_processes=2, timeout=40, progress="off", **json.loads(sys.argv[1]))))
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
            [*prefix(node), sys.executable, str(script), json.dumps(options(node))],
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
def test_two_machines_meet_by_number_and_address(tmp_path: Path) -> None:
    port = free_port()
    found = run_on_two(
        tmp_path, lambda node: {"num_nodes": 2, "node_rank": node, "master_addr": "127.0.0.2", "use_port": port}
    )
    assert found == EXPECTED


def test_a_machine_that_was_started_for_another_number_of_them_says_so_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = {"master_addr": "127.0.0.2", "use_port": free_port(), "rdzv_conf": {"join_timeout": 30}}
    command = [sys.executable, str(script)]
    first = subprocess.Popen([*command, json.dumps({**options, "num_nodes": 2, "node_rank": 0})])
    try:
        other = [*command, json.dumps({**options, "num_nodes": 3, "node_rank": 2})]
        ran = subprocess.run(other, capture_output=True, text=True, timeout=25, check=False)
    finally:
        first.terminate()
        first.wait(20)
    assert "this machine was started for 3 machines, but the one at 127.0.0.2" in ran.stderr


@pytest.mark.slow
def test_two_machines_are_numbered_by_torch_elastic(tmp_path: Path) -> None:
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
from nb_accelerate.launch.rendezvous import RENDEZVOUS

RENDEZVOUS["local"] = RENDEZVOUS[sys.argv[3]]  # as several machines do it, with one

def fails_first():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0:
        raise ValueError("on purpose")
    return attempt

for _ in range(3):
    endpoint = dict(rdzv_backend=sys.argv[3], rdzv_endpoint=sys.argv[2])
    values = notebook_launcher(fails_first, (), 2, start_method=sys.argv[1], max_restarts=1, progress="off", **endpoint)
    print(values)
"""


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        pytest.param("fork", "c10d", marks=pytest.mark.slow),
        ("forkserver", "c10d"),
        pytest.param("forkserver", "static", marks=pytest.mark.slow),
    ],
)
def test_the_place_where_machines_met_is_free_for_the_next_attempt_and_launch(method: str, backend: str) -> None:
    command = [sys.executable, "-c", AGAIN, method, f"127.0.0.1:{free_port()}", backend]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[1, 1]\n" * 3


@pytest.mark.slow
@pytest.mark.may_leave("descriptors")  # of torch's store, which lives as long as the frames in the error
def test_machines_that_do_not_come_are_counted(tmp_path: Path) -> None:
    from nb_accelerate.errors import StartError
    from nb_accelerate.launch import notebook_launcher

    with pytest.raises(StartError, match=r"1 of 2 machines came to 127\.0\.0\.2:\d+ within 2 s; here is"):
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
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_hosts_meet_across_a_cable(tmp_path: Path, two_hosts: list[str], backend: str) -> None:
    def options(node: int) -> dict[str, object]:
        if backend == "static":
            return {"num_nodes": 2, "node_rank": node, "master_addr": two_hosts[0]}
        return {
            "num_nodes": 2,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{two_hosts[0]}:29400",
            "rdzv_conf": {"join_timeout": 30},
        }

    found = run_on_two(tmp_path, options, lambda node: ["ip", "netns", "exec", f"nbtest{node}"])
    assert sorted(found) == EXPECTED
