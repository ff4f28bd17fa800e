"""Cells on 4 ranks of two nodes of Ray, beside a pool here and bare actors, in turns: `make bench-ray`."""

from __future__ import annotations

import contextlib
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from bench_machines import run, started

sys.path.append(str(Path(__file__).parents[1]))

from fixtures.ray_nodes import NODES, fast_imports, two_nodes

from nb_accelerate.notebook.launch import servers
from nb_accelerate.notebook.pool.options import PoolOptions
from nb_accelerate.notebook.pool.pool import Pool

STARTS, ROUNDS, CALLS = 3, 10, 50

ACTORS = f"""
import sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
nodes = {{node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}}

@ray.remote(num_cpus=0)
class Rank:
    def first(self):
        import torch
        return torch.ones(1).item()
    def noop(self):
        pass

def on(node):
    return Rank.options(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[node], soft=False)).remote()

actors = [on(node) for node in {NODES} for _ in range(2)]
ray.get([actor.first.remote() for actor in actors])
print("started", flush=True)
for _ in sys.stdin:
    taken = []
    for _ in range({CALLS}):
        began = time.perf_counter()
        ray.get([actor.noop.remote() for actor in actors])
        taken.append(time.perf_counter() - began)
    print(sorted(taken)[{CALLS} // 2], flush=True)
"""
"""A program that has actors which import torch, and calls them for each line of its stdin."""


class Actors:
    """Four bare actors, in a program of their own: a process with Ray in it is slower at other things too."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-c", ACTORS, address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._heard() == "started\n"

    def _heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def call(self) -> float:
        """Return the median seconds of a call of all of them."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._heard())

    def stop(self) -> None:
        self._process.communicate()


def options(address: str) -> dict[str, PoolOptions]:
    hosts = [f"{node}:2" for node in NODES]
    return {
        "a pool here": PoolOptions(num_processes=4, engine="auto"),
        "a pool on Ray": PoolOptions(engine="ray", address=address, hosts=hosts),
    }


def _starts(address: str) -> dict[str, Callable[[], tuple[float, Pool | Actors]]]:
    def start_actors() -> tuple[float, Actors]:
        began = time.perf_counter()
        actors = Actors(address)
        return time.perf_counter() - began, actors

    pools = {name: functools.partial(started, chosen) for name, chosen in options(address).items()}
    return {**pools, "bare actors": start_actors}


def measured(address: str) -> Iterator[str]:
    starts = _starts(address)
    first: dict[str, list[float]] = {name: [] for name in starts}
    empty: dict[str, list[float]] = {name: [] for name in starts}
    with contextlib.ExitStack() as running:
        there: dict[str, Pool | Actors] = {}
        for number in range(STARTS):
            for name, start in starts.items():
                if not there:
                    servers.close_warm_server()
                seconds, one = start()
                first[name].append(seconds)
                if number == STARTS - 1:
                    there[name] = one
                    running.callback(one.stop)
                else:
                    one.stop()
        for _ in range(ROUNDS):
            for name, one in there.items():
                empty[name].append(one.call() if isinstance(one, Actors) else _cells(one))
    yield from _table("start, and a first cell with torch", first)
    yield from _table("an empty cell, a call of all", empty)


def _cells(pool: Pool) -> float:
    return statistics.median(run(pool, "pass") for _ in range(CALLS))


def _table(what: str, taken: dict[str, list[float]]) -> Iterator[str]:
    yield what
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    base = medians["bare actors"]
    for name, seconds in medians.items():
        low, high = min(taken[name]), max(taken[name])
        yield f"  {name:<14} {1000 * seconds:9.1f} ms ({1000 * low:.1f} to {1000 * high:.1f})   {seconds / base:.2f} x"


def measure() -> Iterator[str]:
    """Give lines of the table."""
    if find_spec("ray") is None:
        yield "Ray is not installed here: run `make bench-ray`"
        return
    with tempfile.TemporaryDirectory() as folder, fast_imports(Path(folder)), two_nodes() as (address, _):
        yield "4 ranks on 2 nodes of Ray, on this machine"
        yield from measured(address)


if __name__ == "__main__":
    print("\n".join(measure()))
