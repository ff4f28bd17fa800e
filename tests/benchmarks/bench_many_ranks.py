"""What a notebook spends on 256 and on 1,000 ranks of other machines, whose hosts say what ranks would say."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from fixtures.kernels import Kernel

HERE = Path(__file__).parent
MACHINES = {32: (4, 8), 256: (8, 32), 1000: (10, 100)}
"""Machines, and ranks of each, by the number of ranks."""

CELLS = 20

MEASURE = f"""
import os, sys, threading, time, json, statistics, psutil
process = psutil.Process()

def cell(body, line=""):
    began = time.perf_counter(), time.process_time()
    try:
        get_ipython().run_cell_magic("distributed", line, body)
    except Exception as error:
        said = str(error)
    else:
        said = ""
    return time.perf_counter() - began[0], time.process_time() - began[1], said

def cells(line):
    found = [cell("pass", line) for _ in range({CELLS})]
    return [statistics.median(one[index] for one in found) for index in (0, 1)]

def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), process.memory_info().rss
"""


def measure() -> Iterator[str]:
    """Give lines of the table."""
    for ranks, (machines, each) in MACHINES.items():
        with_kernel = Kernel()
        try:
            yield from measured(with_kernel, ranks, machines, each)
        finally:
            with_kernel.close()


def measured(kernel: Kernel, ranks: int, machines: int, each: int) -> Iterator[str]:
    def values(code: str) -> list[float]:
        kernel.run(f"found = {code}", 300).ok()
        return list(json.loads(str(kernel.run("print(json.dumps(found))").ok().stdout)))

    hosts = ",".join(f"m{number}:{each}" for number in range(machines))
    program = shlex.quote(str(HERE / "simulated_host.py"))
    template = f"env MACHINE={{host}} {shlex.quote(sys.executable)} {program} {{command}}"
    kernel.run(f"%load_ext nb_accelerate\n{MEASURE}").ok()
    before = values("held()")
    began = time.perf_counter()
    kernel.run(f'%distributed start --engine command --hosts {hosts} --command-template "{template}"', 300).ok()
    yield f"{ranks} ranks on {machines} machines: started in {time.perf_counter() - began:.1f} s"
    cells = {
        name: values(f"cells({line!r})") for name, line in (("panel", "--progress widget"), ("none", "--progress off"))
    }
    held = [now - first for now, first in zip(values("held()"), before, strict=True)]
    yield f"  descriptors {held[0]:.0f}, threads {held[1]:.0f}, memory {held[2] / 2**20:.0f} MiB"
    for name, (seconds, cpu) in cells.items():
        yield f"  an empty cell, {name}: {1000 * seconds:.0f} ms, processor {1000 * cpu:.0f} ms"
    seconds, cpu, _ = values("cell('train', '--progress widget')")
    yield f"  the panel during {seconds:.1f} s of training: {100 * cpu / seconds:.0f} % of a processor"
    seconds, _, said = values("cell('die', '--progress off')")
    assert f"rank {ranks - 1}" in str(said), said
    yield f"  a dead rank is named after {1000 * seconds:.0f} ms"
    seconds = time.perf_counter()
    kernel.run("%distributed stop", 300).ok()
    yield f"  stopped in {time.perf_counter() - seconds:.1f} s"


if __name__ == "__main__":
    for line in measure():
        print(line, flush=True)
