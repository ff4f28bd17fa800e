"""What launches and cells do on any machines holds on the nodes of a cluster of Ray.

The contracts of launches come in turn in one test, and those of cells in another, because hosts and ranks take ten
processor seconds to start there. Those that end a machine come last. Left out are those of what the link to a machine
does by itself, whatever the engine: commands to training loops, silence.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from fixtures.ray_nodes import NODES, start_node
from remote import test_cells as cells, test_launches as launches

from nb_accelerate.errors import PoolError, StartError
from nb_accelerate.notebook.launch import close
from nb_accelerate.notebook.pool.options import CellOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell

if TYPE_CHECKING:
    from fixtures.engines import Machines


@pytest.mark.limit(300)
def test_launches(machines: Machines, tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    launches.test_ranks_are_started_again(machines)
    launches.test_an_interrupt_ends_all_ranks(machines, folder("interrupt"))
    launches.test_a_rank_that_is_killed_is_named(machines, folder("killed"))
    launches.test_a_host_or_its_server_that_is_killed_is_told(machines, folder("host"), "host")
    close()  # the processor cores are reserved for the hosts that are kept
    nothing_stays_of_a_kernel_that_is_killed(machines, folder("kernel") / "gate")


def nothing_stays_of_a_kernel_that_is_killed(machines: Machines, gate: Path) -> None:
    program = launches.KERNEL.format(tests=str(Path(__file__).parents[1]), gate=str(gate))
    kernel = subprocess.Popen([sys.executable, "-c", program])
    launches.wait_for(lambda: len([*gate.parent.glob("gate.*")]) == 3, seconds=60)
    hosts = {psutil.Process(kernel.pid), *machines.hosts()}
    started = hosts.union(*(process.children(recursive=True) for process in hosts))
    assert len(started) >= 1 + 2 + 2 + 3 + 3  # kernel, hosts, servers, ranks, loaders
    kernel.kill()
    kernel.wait()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.limit(300)
def test_cells(machines: Machines, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pool = Pool()
    pool.start()
    try:
        cells.test_cells_share_variables_collectives_and_output(pool, capfd)
        cells.test_displays_stand_where_they_were_made_among_the_output(pool)
        cells.test_a_cell_that_fails_leaves_ranks_that_meet_again(pool)
        cells.test_a_rank_is_taken_out_of_a_collective_that_another_never_joins(pool)
        cells.test_an_interrupt_ends_a_cell_and_no_rank(pool)
        for rank in (0, 2):
            cells.test_a_rank_that_died_is_replaced_and_others_keep_their_variables(pool, machines, rank)
        a_machine_that_is_lost_is_named_and_its_ranks_are_replaced(pool, machines)
        a_raylet_that_is_killed_is_named_at_once_and_nothing_stays_there(pool, machines, tmp_path / "gate")
    finally:
        pool.stop()


def a_machine_that_is_lost_is_named_and_its_ranks_are_replaced(pool: Pool, machines: Machines) -> None:
    cells.run(pool, "kept = rank")
    host = machines.hosts()[1]
    ranks = host.children(recursive=True)
    machines.kill(host)
    with pytest.raises(PoolError, match=f"rank [12] is lost: machine {NODES[1]} is lost") as caught:
        cells.run(pool, "import time\ntime.sleep(30)")
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert alive == []
    [number] = re.findall(r"%distributed restart (\d)", str(caught.value))
    assert pool.restart(int(number)) == [1, 2]
    assert cells.run(pool, cells.SUM) == [7.0] * 3
    assert cells.run(pool, "globals().get('kept')") == [0, None, None]


def node_of(process: psutil.Process) -> str:
    return process.environ()["OWN"]


def a_raylet_that_is_killed_is_named_at_once_and_nothing_stays_there(
    pool: Pool, machines: Machines, gate: Path
) -> None:
    """Kill that of the second machine, which all tests have: this is the last of them."""
    [host] = [host for host in machines.hosts() if node_of(host) == "b"]
    there = [host, *host.children(recursive=True)]
    text = f"import time\nopen(f'{gate}.{{rank}}', 'w').close()\ntime.sleep(60)"
    running = pool.begin(read_cell(text), CellOptions(progress="off"))
    launches.wait_for(lambda: len([*gate.parent.glob(f"{gate.name}.*")]) == 3)
    raylets = [one for one in psutil.Process().children(recursive=True) if one.name() == "raylet"]
    [raylet] = [one for one in raylets if node_of(one) == "b"]
    raylet.kill()
    began = time.monotonic()
    # The actor says it, unless Ray notices first that the actor cannot be reached.
    how = "its raylet, the process of Ray on that node, has ended|the actor of Ray .* (has ended|cannot be reached)"
    said = rf"rank [12] is lost: machine {NODES[1]} is lost: ({how})"
    with pytest.raises(PoolError, match=said) as caught:
        pool.finish(running)
    told = time.monotonic() - began
    _, alive = psutil.wait_procs(there, timeout=20)
    print(f"told after {told:.2f} s, all ended after {time.monotonic() - began:.2f} s: {caught.value}")
    assert alive == []
    assert told < 15
    with pytest.raises(StartError, match=r"When it is back: %distributed restart"):
        pool.restart(1)
    assert cells.run(pool, "kept", ranks=(0,)) == [0]
    again = start_node("--address", os.environ["NB_ACCELERATE_ADDRESS"], node=NODES[1], name="b")
    try:
        assert pool.restart() == [1, 2]
        assert cells.run(pool, cells.SUM) == [7.0] * 3
        a_head_that_is_killed_is_named_and_not_waited_for(pool)
        pool.stop()
        close()
    finally:
        started = psutil.Process(again.pid).children(recursive=True)
        again.terminate()
        for process in psutil.wait_procs(started, timeout=5)[1]:  # which wait for the head
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        again.wait(30)


def a_head_that_is_killed_is_named_and_not_waited_for(pool: Pool) -> None:
    running = pool.begin(read_cell("import time\ntime.sleep(60)"), CellOptions(progress="off"))
    [head] = [one for one in psutil.Process().children(recursive=True) if one.name() == "gcs_server"]
    head.kill()
    began = time.monotonic()
    with pytest.raises(PoolError, match=f"rank 0 is lost: machine {NODES[0]} is lost"):
        pool.finish(running)
    with pytest.raises(StartError, match=r"no cluster of Ray answers at address='.*Start one there with: ray start"):
        pool.restart(0)
    assert time.monotonic() - began < 30
    assert cells.run(pool, "rank", ranks=(1, 2)) == [1, 2]
