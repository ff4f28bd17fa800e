"""`nb-accelerate launch`: run a notebook from a terminal, without a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import argparse

_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `launch` to the command line."""
    parser = subparsers.add_parser(
        "launch",
        help="run a notebook from this terminal",
        description="Run a notebook from top to bottom in a new kernel of this Python, with its progress as "
        "text. The notebook itself is not changed: the executed copy is NAME.executed.ipynb, complete up to "
        "the cell that failed or was interrupted. Ctrl-C interrupts the running cell; twice, the kernel.",
    )
    parser.add_argument("notebook", type=Path, metavar="NOTEBOOK.ipynb")
    parser.add_argument(
        "--output-dir", type=Path, default=Path(), metavar="DIR", help="where to write (default: this folder)"
    )
    parser.add_argument("--html", action="store_true", help="also write the executed notebook as NAME.html")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.notebook
    _check(path)

    from nb_accelerate.cli import notebook

    run = notebook.execute(path, progress=sys.stdout)
    written = [notebook.write_notebook(run, arguments.output_dir)]
    if arguments.html:
        written.append(notebook.write_page(run, arguments.output_dir))
    for file in written:
        print(f"wrote {file}")
    if run.failure is not None:
        print(run.failure.render(color=sys.stderr.isatty() and "NO_COLOR" not in os.environ), file=sys.stderr)
    if run.interrupted:
        return _INTERRUPTED
    return 0 if run.failure is None else 1


def _check(path: Path) -> None:
    if path.suffix == ".py":
        raise ConfigError(
            f"launch was given the script {str(path)!r}, but runs notebooks only in this version. "
            f"For a script, write: torchrun --nproc-per-node 2 {path}"
        )
    if path.suffix != ".ipynb":
        raise ConfigError(f"launch was given {str(path)!r}, which is no notebook: its name does not end in .ipynb.")
    if not path.is_file():
        raise ConfigError(f"launch was given {str(path)!r}, but there is no such file in {Path.cwd()}.")
