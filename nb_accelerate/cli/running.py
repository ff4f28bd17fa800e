"""Find the user's runs of this package on this machine, by the names of its processes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from nb_accelerate.errors import LaunchError

_SERVER = "nb-server"
_RANK = re.compile(r"nb-rank(\d+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A notebook or a command, and its ranks.

    Attributes:
        pid: process of the notebook's kernel, or of the command.
        memory: bytes of main memory (RSS) that a rank holds, as the panel shows it; of the one that holds most.
        seconds: since the first rank was started.
    """

    pid: int
    processes: tuple[psutil.Process, ...]
    ranks: tuple[int, ...]
    memory: int
    seconds: float
    what: str
    is_notebook: bool


def find_runs() -> list[Run]:
    """Return all runs of this user, by the process id of their owner. Idle servers are no runs."""
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
    found = []
    for pid, processes in sorted(ranks.items()):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            found.append(_describe(psutil.Process(pid), processes))
    return found


def _owner_of(rank: psutil.Process) -> psutil.Process:
    """Return the process that launched a rank: the parent of the server that forked it.

    Raises:
        psutil.NoSuchProcess: it has ended, or it is no rank but has the name of one.
    """
    owner = next((ancestor for ancestor in rank.parents() if ancestor.name() != _SERVER), None)
    if owner is None or rank.exe() != owner.exe() or "python" not in Path(rank.exe()).name:
        raise psutil.NoSuchProcess(rank.pid)
    return owner


def _describe(owner: psutil.Process, ranks: list[psutil.Process]) -> Run:
    numbers, memory, began = [], 0, time.time()
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            match = _RANK.fullmatch(rank.name())
            if match is None:
                continue
            memory = max(memory, rank.memory_info().rss)
            began = min(began, rank.create_time())
            numbers.append(int(match[1]))
    notebook = ""
    with contextlib.suppress(psutil.Error):
        notebook = owner.environ().get("JPY_SESSION_NAME", "")
    is_notebook = bool(notebook) or is_interactive(owner.cmdline())
    return Run(
        pid=owner.pid,
        processes=tuple(ranks),
        ranks=tuple(sorted(numbers)),
        memory=memory,
        seconds=time.time() - began,
        what=_printable(_short(notebook) if notebook else " ".join(map(_short, owner.cmdline()))),
        is_notebook=is_notebook,
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
