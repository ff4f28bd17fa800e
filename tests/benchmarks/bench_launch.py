"""Launching: from the call to the values, against accelerate's launcher and against bare operating system calls."""

from __future__ import annotations

import functools
import inspect
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable

import cloudpickle
import torch
from turns import medians, ratios

from nb_accelerate.notebook.launch import close, notebook_launcher

launch = functools.partial(notebook_launcher, progress="off")


def meets() -> float:
    """What every distributed function does at least: join a group, and add something up."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return ones.item()


def bare_fork(ranks: int = 2) -> None:
    """The least there is: fork, meet, exit. No output, no values, no ownership, nothing said when it fails."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            torch.set_num_threads(1)
            meets()
            os._exit(0)
        children.append(pid)
    for pid in children:
        _, status = os.waitpid(pid, 0)
        assert status == 0


def nothing() -> None:
    """The launch alone."""


PROGRAM = """
import os, socket, sys, time
os.environ["ACCELERATE_USE_CPU"] = "true"
from {package} import notebook_launcher
{function}
taken = []
for _ in range(8):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    time.sleep({pause})
    began = time.perf_counter()
    notebook_launcher({name}, num_processes=2, use_port=str(port))
    taken.append(time.perf_counter() - began)
print(*taken, file=sys.stderr)
"""
# The function belongs to the program, as a cell's does to its notebook.


def in_a_new_process(package: str, function: Callable[[], object], pause: float) -> list[float]:
    text = inspect.getsource(function)
    program = PROGRAM.format(package=package, function=text, name=function.__name__, pause=pause)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return [float(word) for word in ran.stderr.splitlines()[-1].split()]


def against_accelerate() -> list[str]:
    lines = []
    for what, function, pause in (
        ("launch alone", nothing, 0.0),
        ("launch alone, 50 ms after the last one", nothing, 0.05),
        ("launch, gloo, all_reduce", meets, 0.0),
    ):
        runs = {package: [in_a_new_process(package, function, pause) for _ in range(2)] for package in PACKAGES}
        seconds = {}
        for package in PACKAGES:
            seconds[f"{what}: {package}"] = statistics.median(second for run in runs[package] for second in run[1:])
            seconds[f"  the first in a process: {package}"] = statistics.median(run[0] for run in runs[package])
        lines += ratios(seconds, base=f"{what}: accelerate")
    return lines


PACKAGES = ("accelerate", "nb_accelerate")


def start_methods(ranks: int, *, rounds: int) -> list[str]:
    # As a cell's functions are: a rank that has to import this file imports half of Jupyter with it.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    launch(meets, (), ranks)
    base = f"{ranks} ranks: bare fork and gloo"
    actions: dict[str, Callable[[], object]] = {
        base: lambda: bare_fork(ranks),
        "fork": lambda: launch(meets, (), ranks, start_method="fork"),
        "forkserver": lambda: launch(meets, (), ranks),
    }
    return ratios(medians(actions, rounds=rounds, pause=0.05), base=base)


def floods(lines: int) -> None:
    for number in range(lines):
        print(f"line {number} of quite ordinary length, as a log has them")


def output() -> list[str]:
    command = [sys.executable, "-c", f"{inspect.getsource(floods)}\nfloods(100_000)"]

    def pipe() -> None:
        subprocess.run(command, stdout=subprocess.PIPE, check=True)

    def ours() -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        kept = os.dup(1)
        os.dup2(devnull, 1)
        try:
            launch(floods, (100_000,), 2)
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            os.close(devnull)

    return ratios(
        medians({"one process, a pipe": pipe, "2 ranks, 100,000 lines each": ours}, rounds=3),
        base="one process, a pipe",
    )


def large_result() -> list[str]:
    size = 1 << 27
    big = torch.zeros(size, dtype=torch.float64)

    def copy() -> None:
        big.clone()

    def result() -> None:
        launch(lambda: torch.zeros(size, dtype=torch.float64), (), 1)

    def argument() -> None:
        launch(len, (big,), 1)

    return ratios(
        medians({"copying 1 GB in memory": copy, "1 GB result": result, "1 GB argument": argument}, rounds=3),
        base="copying 1 GB in memory",
    )


def measure() -> list[str]:
    try:
        few, many = functools.partial(start_methods, 2, rounds=40), functools.partial(start_methods, 32, rounds=10)
        parts = (against_accelerate, few, many, output, large_result)
        return [line for part in parts for line in [*part(), ""]]
    finally:
        close()
