"""`nb-accelerate`, the command line: one file per command.

A command is a module with `register(subparsers)`, which describes its arguments, and a function that runs it
and returns the exit code. Importing it costs nothing: what a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from nb_accelerate.cli import (
    completion,
    config,
    env,
    estimate_memory,
    launch,
    merge_weights,
    status,
    stop,
    test,
    to_fsdp2,
)
from nb_accelerate.errors import NbAccelerateError
from nb_accelerate.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = (config, launch, test, status, stop, estimate_memory, merge_weights, to_fsdp2, completion, env)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; the console script `nb-accelerate` calls this."""
    parser = make_parser()
    try:
        arguments = parser.parse_args(argv)
        return arguments.run(arguments) or 0
    except NbAccelerateError as error:
        # These are written for the person at the terminal; a traceback would only hide the sentence.
        print(f"nb-accelerate: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. What it parses has the parser itself as ``program``."""
    parser = argparse.ArgumentParser(
        prog="nb-accelerate", description="Distributed PyTorch that is at home in a Jupyter notebook."
    )
    parser.add_argument("--version", action="version", version=f"nb-accelerate {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=lambda _: parser.print_help(), program=parser)
    for command in _COMMANDS:
        command.register(subparsers)
    return parser
