"""Names of ``accelerate.commands.launch``: for programs that read flags of a launch, and launch a script with them."""

from __future__ import annotations

import argparse
import sys

from nb_accelerate.cli import main, make_parser

__all__ = ["launch_command", "launch_command_parser"]


def launch_command_parser() -> argparse.ArgumentParser:
    """Return the parser of ``nb-accelerate launch``: flags, a script, its arguments."""
    actions = make_parser()._actions  # noqa: SLF001 - there is no public way to the parser of a command
    parsers = next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001
    parser: argparse.ArgumentParser = parsers["launch"]
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Launch what a parser of `launch_command_parser` has read.

    Raises:
        SystemExit: the launch failed, with its exit code.
    """
    if code := args.run(args):
        sys.exit(code)


if __name__ == "__main__":  # python -m accelerate.commands.launch is in published scripts
    sys.exit(main(["launch", *sys.argv[1:]]))
