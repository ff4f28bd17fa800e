"""`nb-accelerate status`: list the runs on this machine."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` to the command line."""
    parser = subparsers.add_parser(
        "status",
        help="show the runs on this machine",
        description="Show notebooks and commands that have ranks on this machine: process id, ranks, main "
        "memory (RSS) of the rank that holds most, for how long. `nb-accelerate stop PID` ends one.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command is called alike)
    from nb_accelerate.base.table import Table
    from nb_accelerate.base.words import size
    from nb_accelerate.cli.running import find_runs

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
    if not rows:
        print("nothing runs on this machine")
        return 0
    titles = ("pid", "ranks", "memory of a rank", "for", "what")
    print(Table(titles, rows, right=titles[:4]))
    return 0
