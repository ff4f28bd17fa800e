"""Cells on ranks that stay, beside ipyparallel and nbdistributed: two ranks, a real kernel each, in turns."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from fixtures.kernels import Cell, Kernel
from turns import Seconds, ratios

LOADED_BEFORE = 8.0
"""Seconds between loading the extension and the first cell, as when somebody writes that cell."""

LINES = 20_000
MEGABYTES = 100
FIRST = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item())"
FLOOD = f"for i in range({LINES}): print(f'{{rank}}: line {{i}} of ordinary length, as a log has them')"


@dataclass(frozen=True)
class System:
    """One way to run cells on ranks.

    Attributes:
        start: cells from a new kernel up to ranks that can do a collective; the first loads the extension.
        magic: runs a cell on all ranks.
        push: sends ``big`` to the ranks, if there is a way.
        pull: brings it back from one.
        stop: ends the ranks.
    """

    start: tuple[str, ...]
    magic: str
    stop: str
    push: str = ""
    pull: str = ""


OURS = "nb_accelerate"

SYSTEMS = {
    OURS: System(
        start=("%load_ext nb_accelerate",),
        magic="distributed",
        push="%distributed push big",
        pull="%distributed pull big --ranks 0",
        stop="%unload_ext nb_accelerate",
    ),
    "ipyparallel": System(
        start=(
            "import ipyparallel\ncluster = ipyparallel.Cluster(n=2, log_level=40)\n"
            "ranks = cluster.start_and_connect_sync(activate=True)\n"
            "ranks[:].scatter('rank', range(2), flatten=True, block=True)",
            "%%px\nimport torch.distributed, tempfile\ntorch.distributed.init_process_group('gloo', "
            "init_method=f'file://{tempfile.gettempdir()}/bench-PID', rank=rank, world_size=2)",
        ),
        magic="px",
        push="ranks[:].push({'big': big}, block=True)",
        pull="big = ranks[0].pull('big', block=True)",
        stop="cluster.stop_cluster_sync()",
    ),
    "nbdistributed": System(
        # A cell that is sent before the ranks listen is lost, and fails after 30 s; they say on their pipes when.
        start=(
            "%load_ext nbdistributed",
            "%dist_init -n 2",
            "%dist_mode --disable",
            "import time\nmagics = get_ipython().magics_manager.magics['line']['dist_init'].__self__\n"
            "for process in magics._process_manager.processes:\n"
            "    while 'initialized' not in process.stdout.readline(): pass\ntime.sleep(0.5)",
        ),
        magic="distributed",
        stop="%dist_shutdown",
    ),
}


@dataclass
class Session:
    """A kernel, and a system started in it."""

    system: System
    kernel: Kernel

    def first_cell(self, cells: tuple[str, ...]) -> float:
        """Seconds from the first of `cells` until the ranks have added something up together."""
        began = time.perf_counter()
        for cell in cells:
            self.kernel.run(cell.replace("PID", str(self.kernel.pid)), 120).ok()
        assert "2.0" in said(self.on_ranks(FIRST))
        return time.perf_counter() - began

    def on_ranks(self, code: str) -> Cell:
        return self.kernel.run(f"%%{self.system.magic}\n{code}", 120).ok()

    def repeated(self, body: str, times: int) -> list[float]:
        """Seconds of each of many cells in a row, inside the kernel: without what Jupyter takes to bring it there."""
        self.kernel.run(
            "import time\ntaken, events = [], get_ipython().events\n"
            "def begins(info): taken.append(-time.perf_counter())\n"
            "def ends(result):\n    if taken:\n        taken[-1] += time.perf_counter()\n"
            "events.register('pre_run_cell', begins)\nevents.register('post_run_cell', ends)"
        ).ok()
        for _ in range(times):
            self.on_ranks(body)
        end = "events.unregister('pre_run_cell', begins)\nevents.unregister('post_run_cell', ends)\ntaken[:-1]"
        return list(json.loads(str(self.kernel.run(end).ok().value)))

    def flood(self) -> tuple[float, int]:
        """Seconds for many lines, and how many of them are nowhere to be found."""
        cell = self.on_ranks(FLOOD)
        text = said(cell)
        whole = re.search(r"are in (\S+\.log)\.", text)
        if whole:  # what a browser could not draw is in a file that the cell names
            text = Path(whole[1]).read_text(encoding="utf-8")
            Path(whole[1]).unlink()
        there = set(re.findall(r"\b([01]): line (\d+) of", text))
        return cell.seconds, 2 * LINES - len(there)

    def timed(self, code: str) -> float:
        began = time.perf_counter()
        self.kernel.run(code, 120).ok()
        return time.perf_counter() - began

    def close(self) -> None:
        self.kernel.run(self.system.stop, 60)
        self.kernel.close()


def said(cell: Cell) -> str:
    return cell.stdout + cell.stderr + "".join(display.get("text/plain", "") for display in cell.displays)


def sessions() -> Iterator[tuple[str, Session]]:
    for name, system in SYSTEMS.items():
        yield name, Session(system, Kernel())


def starts(rounds: int) -> list[str]:
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, session in sessions():
            taken.setdefault(name, []).append(session.first_cell(session.system.start))
            session.close()
        loaded = Session(SYSTEMS[OURS], Kernel())
        loaded.kernel.run(SYSTEMS[OURS].start[0]).ok()
        time.sleep(LOADED_BEFORE)
        taken.setdefault(f"{OURS}, loaded {LOADED_BEFORE:g} s before", []).append(loaded.first_cell(()))
        loaded.close()
    return beside("from nothing to the end of the first cell", medians_of(taken))


def work(rounds: int) -> list[str]:
    open_sessions = dict(sessions())
    taken: dict[str, dict[str, list[float]]] = {}
    lost: dict[str, int] = {}

    def note(what: str, name: str, seconds: list[float]) -> None:
        taken.setdefault(what, {}).setdefault(name, []).extend(seconds)

    try:
        for session in open_sessions.values():
            session.first_cell(session.system.start)
            session.kernel.run(f"import numpy\nbig = numpy.random.rand({MEGABYTES} << 17)").ok()
        for _ in range(rounds):
            for name, session in open_sessions.items():
                note("an empty cell", name, session.repeated("pass", 30))
                note("a small all_reduce", name, session.repeated("dist.all_reduce(t)", 30))
                seconds, missing = session.flood()
                note(f"2 x {LINES:,} lines", name, [seconds])
                lost[name] = lost.get(name, 0) + missing
                if session.system.push:
                    note(f"push {MEGABYTES} MB to both", name, [session.timed(session.system.push)])
                    note(f"pull {MEGABYTES} MB from one", name, [session.timed(session.system.pull)])
    finally:
        for session in open_sessions.values():
            session.close()
    lines = [line for what, by_name in taken.items() for line in beside(what, medians_of(by_name))]
    return [*lines, "lines lost: " + ", ".join(f"{name} {number}" for name, number in lost.items())]


def many_ranks(numbers: tuple[int, ...] = (2, 32), rounds: int = 10) -> list[str]:
    """An empty cell by the number of ranks: seconds, processor time of the kernel, and its descriptors."""
    taken: dict[str, list[float]] = {}
    kernels: dict[int, Kernel] = {}
    opened: dict[int, int] = {}
    try:
        for number in numbers:
            kernel = kernels[number] = Kernel()
            kernel.run("%load_ext nb_accelerate\nimport os, time\nbefore = len(os.listdir('/proc/self/fd'))").ok()
            kernel.run(f"%%distributed -n {number}\npass", 120).ok()
            opened[number] = int(str(kernel.run("len(os.listdir('/proc/self/fd')) - before").ok().value))
        for _ in range(rounds):
            for number, kernel in kernels.items():
                kernel.run("at_first = time.process_time()").ok()
                seconds = Session(SYSTEMS[OURS], kernel).repeated("pass", 30)
                taken.setdefault(f"an empty cell of {number} ranks", []).extend(seconds)
                used = float(str(kernel.run("(time.process_time() - at_first) / 30").ok().value))
                taken.setdefault(f"  processor time of its kernel, {number} ranks", []).append(used)
    finally:
        for kernel in kernels.values():
            kernel.run("%unload_ext nb_accelerate", 60)
            kernel.close()
    few, many = min(opened), max(opened)
    each = (opened[many] - opened[few]) / (many - few)
    line = f"descriptors of the kernel: {each:.1f} a rank, {opened[many] - each * many:.0f} for all"
    return [*ratios(medians_of(taken), base=f"an empty cell of {numbers[0]} ranks"), line]


def medians_of(taken: dict[str, list[float]]) -> Seconds:
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def beside(what: str, seconds: Seconds) -> list[str]:
    """Ratios to the best of the others."""
    best = min((name for name in seconds if not name.startswith(OURS)), key=lambda name: seconds[name])
    return [f"{what}, beside {best}", *(f"  {line}" for line in ratios(seconds, base=best)), ""]


def measure() -> list[str]:
    # Others' ranks are started as `python`, which is to be this one.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return [*starts(3), *work(3), "", *many_ranks()]
