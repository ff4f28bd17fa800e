"""Cells on 4 ranks of two machines, which are two processes of this one, beside 4 ranks of a pool here: in turns."""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from nb_accelerate.notebook.launch import servers
from nb_accelerate.notebook.pool.options import CellOptions, PoolOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell
from nb_accelerate.notebook.ranks.output.sinks import Sink

LINES = 20_000
MEGABYTES = 100
ROUNDS = 5
FIRST = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
FLOOD = f"for i in range({LINES}): print(f'{{rank}}: line {{i}} of ordinary length, as a log has them')"

OPTIONS = {
    "here": PoolOptions(num_processes=4, engine="auto"),
    "two machines": PoolOptions(
        engine="command",
        hosts=["a:2", "b:2"],
        command_template="env MACHINE={host} {command}",
        remote_python=sys.executable,
    ),
}


class Kept(Sink):
    """Keeps the lines of each rank."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._rest = ""

    @override
    def write(self, stream: str, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        self.lines += lines

    @override
    def display(self, kind: str, content: Any) -> None:
        raise AssertionError(kind)


def run(pool: Pool, text: str, sink: Sink | None = None, **variables: Any) -> float:
    """Run a cell, and return its seconds."""
    began = time.perf_counter()
    pool.run(read_cell(text), CellOptions(progress="off", quiet=sink is None), variables=variables, sink=sink)
    return time.perf_counter() - began


def started(options: PoolOptions) -> tuple[float, Pool]:
    """Start a pool, and run a cell; returns the seconds, and the pool."""
    began = time.perf_counter()
    pool = Pool()
    pool.start(options)
    run(pool, FIRST)
    return time.perf_counter() - began, pool


def check_lines(lines: list[str]) -> None:
    """Check that no line is lost, and that those of each rank are in order."""
    for rank in range(4):
        numbers = [int(line.split(": line ")[1].split()[0]) for line in lines if f"{rank}: line " in line]
        assert numbers == list(range(LINES)), (rank, len(numbers))


def socket_copy(size: int) -> float:
    """Return the seconds of a copy over a socket, to another thread that reads it."""
    here, there = socket.socketpair()
    data, buffer = bytes(size), bytearray(1 << 20)

    def read() -> None:
        left = size
        while left:
            left -= there.recv_into(buffer)

    began = time.perf_counter()
    reader = threading.Thread(target=read)
    reader.start()
    here.sendall(data)
    reader.join()
    seconds = time.perf_counter() - began
    here.close()
    there.close()
    return seconds


def measure() -> Iterator[str]:
    """Give lines of the table."""
    taken: dict[str, dict[str, list[float]]] = {name: {"start and first cell": []} for name in OPTIONS}
    pools = {}
    copies = []
    for is_last in (False, False, True):
        for name, options in OPTIONS.items():
            if not pools:  # the ranks of a pool here end with what is kept warm
                servers.close_warm_server()
            seconds, pool = started(options)
            taken[name]["start and first cell"].append(seconds)
            if is_last:
                pools[name] = pool
            else:
                pool.stop()
    for _ in range(ROUNDS):
        for name, pool in pools.items():
            found = taken[name]
            found.setdefault("empty cell", []).append(statistics.median(run(pool, "pass") for _ in range(20)))
            kept = Kept()
            found.setdefault(f"{LINES} lines of each", []).append(run(pool, FLOOD, kept))
            check_lines(kept.lines)
            big = torch.rand(MEGABYTES << 18)
            found.setdefault(f"{MEGABYTES} MB to all", []).append(run(pool, "big[0]", big=big))
        copies.append(socket_copy(2 * MEGABYTES << 20))
    for pool in pools.values():
        pool.stop()
    yield "4 ranks here, and on two machines"
    for what in taken["here"]:
        here, there = (statistics.median(taken[name][what]) for name in OPTIONS)
        yield f"{what:<24} {1000 * here:9.1f} ms {1000 * there:9.1f} ms   {there / here:.2f} x"
    there = statistics.median(taken["two machines"][f"{MEGABYTES} MB to all"])
    copy = statistics.median(copies)
    yield f"{2 * MEGABYTES} MB over a socket:      {1000 * copy:9.1f} ms {1000 * there:9.1f} ms   {there / copy:.2f} x"


if __name__ == "__main__":
    print("\n".join(measure()))
