"""`nb-accelerate`, the command line: one file for a command, or for a few that are alike.

A file has `register(subparsers)`, which describes arguments, and for each command a function that runs it and
returns the exit code. Importing it costs nothing: what a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from nb_accelerate.base.version import __version__
from nb_accelerate.cli import config, env, estimate_memory, fsdp, launch, running, test
from nb_accelerate.cli.closed_output import discard_stdout
from nb_accelerate.cli.flags import why_refused
from nb_accelerate.errors import ConfigError, NbAccelerateError

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = (config, launch, test, running, estimate_memory, fsdp, env)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; the console script `nb-accelerate` calls this."""
    parser = make_parser()
    try:
        arguments = parser.parse_args(argv)
        code = arguments.run(arguments) or 0
        sys.stdout.flush()
        return code
    except NbAccelerateError as error:
        # These are written for the person at the terminal; a traceback would only hide the sentence.
        print(f"nb-accelerate: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        discard_stdout()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("nb-accelerate: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nb-accelerate", description="Distributed PyTorch that is at home in a Jupyter notebook.")
    parser.add_argument("--version", action="version", version=f"nb-accelerate {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=lambda _: parser.print_help(), command=parser)
    for command in _COMMANDS:
        command.register(subparsers)
    for subparser in subparsers.choices.values():
        subparser.set_defaults(command=subparser)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, and suggests what a mistyped command or flag was meant to be."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and name a flag that the command does not know together with the nearest that it knows."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from nb_accelerate.base.config.checks import suggest

            flag = unknown[0].partition("=")[0]
            if why := why_refused(flag):
                raise ConfigError(f"{flag}: {why}.")
            command: _Parser = parsed.command
            flags = [name for action in command._actions for name in action.option_strings]
            below = [name for action in command._actions for name in action.choices or () if not action.option_strings]
            meant = flag.lstrip("-")
            hint = f" Did you mean '{command.prog} {meant}'?" if meant in below else suggest(flag, flags)
            command.error(f"unknown: {' '.join(unknown)}.{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the message in one line, without a usage that has all flags, and exit with 2."""
        message = message.removesuffix(", ...").rstrip(".")
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message}{end} All there is: {self.prog} --help\n")
