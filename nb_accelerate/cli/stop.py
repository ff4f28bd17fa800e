"""`nb-accelerate stop`: end a run of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import argparse

_END_SECONDS = 10.0
"""Seconds that a run has to end by itself."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `stop` to the command line."""
    parser = subparsers.add_parser(
        "stop",
        help="end a run on this machine",
        description="End the ranks of a run, and the command that has started them. A notebook that has started them "
        "lives on, and no other cell of it is interrupted; the variables of ranks that stay between cells are lost.",
    )
    parser.add_argument("pid", type=int, metavar="PID", help="as `nb-accelerate status` shows it")
    parser.add_argument("--force", action="store_true", help="kill it if it does not end by itself")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import contextlib

    import psutil

    from nb_accelerate.cli.running import find_runs

    run = next((run for run in find_runs() if run.pid == arguments.pid), None)
    if run is None:
        raise ConfigError(
            f"there is no run with pid {arguments.pid}. To see those that there are: nb-accelerate status"
        )
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
