"""Who is killed on a machine of Ray while a cell runs, what users read, and how long that takes."""

from __future__ import annotations

import time

import psutil
import pytest
from fixtures.engines import Machines
from fixtures.ray_nodes import NODES
from with_ray.test_cluster import actors

from nb_accelerate.errors import PoolError
from nb_accelerate.notebook.pool.options import CellOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell


def node_of(process: psutil.Process) -> str:
    return process.environ()["OWN"]


def raylets() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if one.name() == "raylet"]


@pytest.mark.parametrize(
    "who", ["actor", "raylet"]
)  # of the cluster that all tests here have, the last one to be killed
def test_the_machine_is_named_at_once_and_nothing_stays_there(machines: Machines, who: str) -> None:
    pool = Pool()
    pool.start()
    try:
        [host] = [host for host in machines.hosts() if node_of(host) == "b"]
        there = [host, *host.children(recursive=True)]
        running = pool.begin(read_cell("import time\ntime.sleep(60)"), CellOptions(progress="off"))
        while not all(rank.handle.page.read().request > 1 for rank in running.ranks):
            time.sleep(0.01)  # there is no event for "all ranks have begun"
        [victim] = [one for one in (actors() if who == "actor" else raylets()) if node_of(one) == "b"]
        victim.kill()
        began = time.monotonic()
        how = "has ended" if who == "actor" else "(has ended|cannot be reached)"
        said = rf"rank [12] is lost: machine {NODES[1]} is lost: the actor of Ray that keeps its host {how}"
        with pytest.raises(PoolError, match=said) as caught:
            pool.finish(running)
        told = time.monotonic() - began
        _, alive = psutil.wait_procs(there, timeout=20)
        print(f"{who}: told after {told:.2f} s, all ended after {time.monotonic() - began:.2f} s: {caught.value}")
        assert alive == []
        assert told < 15
    finally:
        pool.stop()
