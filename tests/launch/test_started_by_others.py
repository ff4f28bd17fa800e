"""Scripts that MPI and SLURM have started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nb_accelerate.base.topology import read_topology
from nb_accelerate.base.topology.master_address import first_node, master_address, node_in_step

SAY_WHO = """
import torch
from nb_accelerate import Accelerator
accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.tensor([1.0 + accelerator.process_index]), "sum")
print("rank %d of %d: %d\\n" % (accelerator.process_index, accelerator.num_processes, total), end="", flush=True)
"""

STARTERS = {
    "mpirun": ["--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "srun": ["--ntasks=2", "--overcommit", "--quiet", "--immediate=10"],
}


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
def test_processes_of_a_cluster_find_one_another(starter: str, tmp_path: Path) -> None:
    program = shutil.which(starter)
    if program is None or (
        starter == "srun" and subprocess.run(["sinfo"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"needs {starter} and what belongs to it")
    script = tmp_path / "train.py"
    script.write_text(SAY_WHO)
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environ |= {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [program, *STARTERS[starter], sys.executable, str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split("\n")) == ["", *(f"rank {rank} of 2: 3" for rank in (0, 1))]


@pytest.mark.slow
@pytest.mark.limit(90)
def test_processes_on_two_nodes_of_slurm_find_one_another(
    on_two_nodes: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAY_WHO)
    expected = ["", *(f"rank {rank} of 4: 10" for rank in range(4))]
    started = on_two_nodes("srun", "-N2", "-n4", "--immediate=10", sys.executable, str(script))
    assert sorted(started.stdout.split("\n")) == expected, started.stderr
    # One launch on each node: SLURM says which is which, and where the first one is.
    launch = [sys.executable, "-m", "nb_accelerate", "launch", "--cpu", "--quiet"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ["--num_machines=2", "--num_processes=4", f"--main_process_port={port}", str(script)]
    launched = on_two_nodes("srun", "-N2", "-n2", "--immediate=10", *launch, *flags)
    assert sorted(launched.stdout.split("\n")) == expected, launched.stderr


FROM_A_NOTEBOOK = """
import os, sys
import torch
from nb_accelerate import Accelerator, notebook_launcher

def total():
    accelerator = Accelerator(cpu=True)
    sum = accelerator.reduce(torch.tensor([1.0 + accelerator.process_index]), "sum").item()
    return os.environ["SLURMD_NODENAME"], accelerator.process_index, sum

template = "srun -u --overlap --cpu-bind=none -N1 -n1 -w {host} {command}"
how = dict(command_template=template, remote_python=sys.executable, progress="off")
print(notebook_launcher(total, engine="command", hosts=["nbnode0:2", "nbnode1:1"], **how))
"""


@pytest.mark.slow
@pytest.mark.limit(90)
def test_one_process_has_ranks_on_two_nodes_of_slurm(
    on_two_nodes: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(FROM_A_NOTEBOOK)
    started = on_two_nodes("salloc", "-N2", "--immediate=10", sys.executable, str(script))
    assert eval(started.stdout) == [("nbnode0", 0, 6.0), ("nbnode0", 1, 6.0), ("nbnode1", 2, 6.0)], started.stderr


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (1, "gpu07")),
        ({"SLURM_STEP_NUM_TASKS": "4"}, None),
        ({"SLURM_STEP_NUM_NODES": "1"}, None),
        ({"SLURM_NODEID": ""}, None),
    ],
)
def test_a_step_with_a_task_on_each_node_numbers_the_machines(
    variables: dict[str, str], place: tuple[int, str] | None
) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
    assert node_in_step({**step, "SLURM_STEP_NODELIST": "gpu[07-08]", **variables}, 2) == place
    assert node_in_step(step | {"SLURM_STEP_NODELIST": "gpu[07-08]"}, 3) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12]-x,login", "gpu07-x"), ("one", "one"), ("one,two", "one"), ("n[3,5]", "n3")],
)
def test_the_first_node_of_a_list_is_where_processes_meet(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
    variables = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_ID": "0"}
    place = master_address(variables, read_topology(variables))
    other_step = master_address(variables | {"SLURM_STEP_ID": "1"}, read_topology(variables))
    assert place is not None
    assert other_step is not None
    assert place[0] == first
    assert place[1] != other_step[1]


def test_processes_of_mpi_meet_on_one_machine_only() -> None:
    variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    place = master_address(variables, read_topology(variables))
    assert place is not None
    assert place[0] == "127.0.0.1"
    spread = variables | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert master_address(spread, read_topology(spread)) is None
    by_hand = {"RANK": "0", "WORLD_SIZE": "4"}
    assert master_address(by_hand, read_topology(by_hand)) is None
