"""`nb-accelerate status` and `stop`: the user's runs on this machine, found by the names of their processes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    import argparse

    import psutil

_END_SECONDS = 10.0  # seconds that a run has to end by itself
_SERVER = "nb-server"
_RANK = re.compile(r"nb-rank(\d+)")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = subparsers.add_parser(
        "status",
        help="show the runs on this machine",
        description="Show notebooks and commands that have ranks on this machine: process id, ranks, main "
        "memory (RSS) of the rank that holds most, for how long. `nb-accelerate stop PID` ends one.",
    )
    status.set_defaults(run=_status)
    stop = subparsers.add_parser(
        "stop",
        help="end a run on this machine",
        description="End the ranks of a run, and the command that has started them. A notebook that has started them "
        "lives on, and no other cell of it is interrupted; the variables of ranks that stay between cells are lost.",
    )
    stop.add_argument("pid", type=int, metavar="PID", help="as `nb-accelerate status` shows it")
    stop.add_argument("--force", action="store_true", help="kill it if it does not end by itself")
    stop.set_defaults(run=_stop)


def _status(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command is called alike)
    from nb_accelerate.base.table import Table
    from nb_accelerate.base.words import size

    rows = [
        (
            str(run.pid),
            str(len(run.ranks)),
            size(run.memory),
            str(timedelta(seconds=round(run.seconds))),
            run.what,
        )
        for run in find_runs()
    ]
    titles = ("pid", "ranks", "memory of a rank", "for", "what")
    print(Table(titles, rows, right=titles[:4]) if rows else "nothing runs on this machine")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    import psutil

    run = next((run for run in find_runs() if run.pid == arguments.pid), None)
    if run is None:
        raise ConfigError(f"there is no run with pid {arguments.pid}. To see all runs: nb-accelerate status")
    # A command ends its ranks, and starts no others after that. The process of a notebook also does other things.
    ended = run.processes if run.is_notebook else (psutil.Process(run.pid),)
    for process in ended:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs({*ended, *run.processes}, timeout=_END_SECONDS)
    if alive and arguments.force:
        for process in alive:
            process.kill()
        _, alive = psutil.wait_procs(alive, timeout=_END_SECONDS)
    if alive:
        print(f"{run.what} has not ended within {_END_SECONDS:g} s. To kill it: nb-accelerate stop {run.pid} --force")
        return 1
    print(f"ended {len(run.ranks)} ranks of {run.what}")
    return 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A notebook or a command, and its ranks."""

    pid: int  # of the notebook's kernel, or of the command
    processes: tuple[psutil.Process, ...]
    ranks: tuple[int, ...]
    memory: int  # bytes of main memory (RSS), as the panel shows it, of the rank that holds most
    seconds: float  # since the first rank was started
    what: str
    is_notebook: bool


def find_runs() -> list[Run]:
    """Return all runs of this user, by the process id of their owner. Idle servers are no runs."""
    import psutil

    ranks: dict[int, list[psutil.Process]] = {}
    try:
        every = list(psutil.process_iter())
    except (OSError, IndexError) as error:  # whichever psutil raises where it finds no processes
        raise LaunchError("this system does not list its processes. Is /proc mounted here?") from error
    for process in every:
        with contextlib.suppress(psutil.Error):
            if _RANK.fullmatch(process.name()) and process.uids().real == os.getuid():
                owner = _owner_of(process)
                ranks.setdefault(owner.pid, []).append(process)
    runs = []
    for pid, processes in sorted(ranks.items()):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            runs.append(_describe(psutil.Process(pid), processes))
    return runs


def _owner_of(rank: psutil.Process) -> psutil.Process:
    """Return the process that launched a rank: the parent of the server that forked it.

    Raises:
        psutil.NoSuchProcess: it has ended, or it is no rank but has the name of one.
    """
    import psutil

    owner = next((ancestor for ancestor in rank.parents() if ancestor.name() != _SERVER), None)
    if owner is None or rank.exe() != owner.exe() or "python" not in Path(rank.exe()).name:
        raise psutil.NoSuchProcess(rank.pid)
    return owner


def _describe(owner: psutil.Process, ranks: list[psutil.Process]) -> Run:
    import psutil

    numbers, memory, began = [], 0, time.time()
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            if match := _RANK.fullmatch(rank.name()):
                memory = max(memory, rank.memory_info().rss)
                began = min(began, rank.create_time())
                numbers.append(int(match[1]))
    notebook = ""
    with contextlib.suppress(psutil.Error):
        notebook = owner.environ().get("JPY_SESSION_NAME", "")
    return Run(
        pid=owner.pid,
        processes=tuple(ranks),
        ranks=tuple(sorted(numbers)),
        memory=memory,
        seconds=time.time() - began,
        what=_printable(_short(notebook) if notebook else " ".join(map(_short, owner.cmdline()))),
        is_notebook=bool(notebook) or is_interactive(owner.cmdline()),
    )


def is_interactive(command: list[str]) -> bool:
    """Return whether a command line starts a kernel, IPython or Python at its prompt, and not a script."""
    program, *words = command or [""]
    names = [Path(word).name for word in (program, *words[:1])]
    return (
        any("ipykernel" in word for word in words)
        or any(name.startswith(("ipython", "jupyter")) for name in names)
        or words[:2] == ["-m", "IPython"]
        or "-i" in words[:1]
        or not words
    )


def _short(word: str) -> str:
    """Return a path with ``~`` for the home folder."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path refuses where nobody has a home
    return "~" + word[len(home) :] if word.startswith(home + "/") else word


def _printable(text: str) -> str:
    """Return a text with a space for each character that a terminal would take for a command."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
