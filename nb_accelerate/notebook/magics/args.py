"""Parse what is written behind a magic, as options. Pure: nothing is started, nothing is looked up.

`argparse` does it. Groups of options that several magics have are parsers too, the parents of those of the magics.
"""

from __future__ import annotations

import argparse
import functools
import keyword
import re
import shlex
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import override

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class LineParser(argparse.ArgumentParser):
    """Parses the line of a magic. An option that was not written is missing in what it returns.

    Args:
        line: how the line is written, for the help and for errors.
    """

    def __init__(self, line: str, about: str, *parents: argparse.ArgumentParser) -> None:
        super().__init__(
            prog="",  # by default it is read from `sys.argv`, which notebooks empty
            usage=line.replace("%", "%%"),
            description=about,
            parents=parents,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=120, max_help_position=32),
        )
        self.line = line

    @property
    def flags(self) -> list[str]:
        """How its options are written, without hidden ones."""
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        return [flag for action in shown for flag in action.option_strings]

    def parse(self, line: str) -> dict[str, Any] | None:
        """Return the options on a line, by name; None if they ask for the help, which has been printed then."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"{line!r} cannot be read: {error}. Close the quotes") from None
        try:
            options, unknown = self.parse_known_args(words)
        except _HelpShown:
            return None
        if unknown:
            hint = suggest(unknown[0], self.flags)
            raise ConfigError(f"unknown: {' '.join(unknown)}.{hint} --help shows all options")
        return vars(options)

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Write {self.line}")

    @override
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpShown


class _HelpShown(Exception):  # noqa: N818 - what has happened, and not an error
    """The help was printed."""


def whole(word: str) -> int:
    """Parse a number of things, at least 1."""
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 1")
    return int(word)


def seconds(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of seconds above 0")
    return value


def ranks(word: str) -> tuple[int, ...]:
    """Parse ranks: ``0,2-3``."""
    found: set[int] = set()
    for part in word.split(","):
        span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if span is None or (span[2] is not None and int(span[2]) < int(span[1])):
            raise argparse.ArgumentTypeError(f"{part!r} is not a rank, or a range of them, such as 0,2-3")
        found.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return tuple(sorted(found))


def variable(word: str) -> str:
    if not word.isidentifier() or keyword.iskeyword(word):
        raise argparse.ArgumentTypeError(f"{word!r} is not a name that a variable can have")
    return word


def devices(word: str) -> str | tuple[int, ...]:
    """Parse devices: ``cpu`` or ``0,2``."""
    return "cpu" if word == "cpu" else ranks(word)


def _group() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="", add_help=False, argument_default=argparse.SUPPRESS)


def names_of(group: argparse.ArgumentParser) -> dict[str, str]:
    """Return how the options of a group are written, by their names."""
    return {action.dest: action.option_strings[-1] for action in group._actions}  # noqa: SLF001 - there is no public list


def written(group: argparse.ArgumentParser, options: Mapping[str, Any]) -> list[str]:
    """Return options of a group as they are written on a line."""
    given = [action for action in group._actions if action.dest in options]  # noqa: SLF001 - there is no public list
    return [
        action.option_strings[-1] if action.nargs == 0 else f"{action.option_strings[-1]} {options[action.dest]}"
        for action in given
        if action.nargs != 0 or action.const == options[action.dest]
    ]


POOL = _group()
POOL.add_argument(
    "-n",
    "--num-processes",
    type=whole,
    metavar="N",
    help="Number of ranks, on all machines together. By default one for each GPU, or 2 on a machine without.",
)
POOL.add_argument("--mixed-precision", metavar="HOW", help="no, fp16 or bf16: the default of Accelerator().")
POOL.add_argument("--devices", type=devices, metavar="WHICH", help="cpu, or the numbers of the GPUs to use: 0,2-3.")
POOL.add_argument("--start-method", metavar="HOW", help="auto, forkserver or spawn.")

ENGINE = _group()
ENGINE.add_argument(
    "--engine",
    metavar="WHO",
    help="Who reaches other machines, for ranks there: ssh, command or ray. auto: ranks are here.",
)
ENGINE.add_argument("--hosts", metavar="HOSTS", help="Machines, each with its number of ranks: a:8,me@b:8.")
ENGINE.add_argument("--address", metavar="ADDRESS", help="For --engine ray: the head of the cluster, HEAD:6379.")
ENGINE.add_argument(
    "--command-template", metavar="COMMAND", help="For --engine command: 'kubectl exec -i {host} -- {command}'."
)
ENGINE.add_argument("--remote-python", metavar="COMMAND", help="What starts Python on the other machines: python3.")

RANKS = _group()
RANKS.add_argument("--ranks", type=ranks, metavar="RANKS", help="Only these: 0,2-3.")

CONVERT = _group()
CONVERT.add_argument(
    "--convert",
    dest="converts",
    action="store_true",
    help="Run a cell that is written for one process with its numbers: ranks share the work of its models.",
)

CONVERT.add_argument(
    "--rehearse",
    action="store_true",
    help="Start no ranks: run the cell as ranks of many on this CPU, each alone, and say where they part.",
)

CELL = _group()
CELL.add_argument(
    "--out",
    type=variable,
    metavar="NAME",
    help="Bind this name in the notebook to the value of the last expression: a list, by rank.",
)
CELL.add_argument(
    "--background",
    action="store_true",
    help="Go on at once; the value of the cell is a handle. Output goes under it.",
)
CELL.add_argument("--timeout", type=seconds, metavar="SECONDS", help="Interrupt the ranks after so many seconds.")
CELL.add_argument("--inserted", action="store_true", help=argparse.SUPPRESS)
"""Written by auto mode, not by people: there is no line above the cell's body."""

SHOW = _group()
SHOW.add_argument(
    "--group-outputs",
    dest="style",
    action="store_const",
    const="group",
    help="Wait for the end, and show what each rank printed in one place.",
)
SHOW.add_argument(
    "--no-capture",
    dest="style",
    action="store_const",
    const="raw",
    help="Show every line as it comes, with its rank; fold nothing.",
)
SHOW.add_argument("--quiet", action="store_true", help="Show no output.")
SHOW.add_argument("--progress", metavar="WHERE", help="Where the panel is drawn: auto, widget, text or off.")

DISTRIBUTED_CELL = LineParser(
    "%%distributed [-n N] [--convert] [--ranks RANKS] [--out NAME] [--background] ...",
    "Run the cell on every rank. Ranks are started by the first such cell, and keep their variables.\n\n"
    "They know rank, local_rank, world_size, device and accelerator. What the cell uses of the notebook is sent\n"
    "to them; the notebook's own variables are not touched. What all ranks print is shown once, other output with\n"
    "its rank.",
    POOL,
    ENGINE,
    CONVERT,
    RANKS,
    CELL,
    SHOW,
)

RANK_CELL = LineParser(
    "%%rank RANKS [--out NAME] [--background] [--timeout SECONDS] ...",
    "Run the cell on one rank, or some: %%rank 1, %%rank 0,2-3. The same as %%distributed --ranks.",
    CELL,
    SHOW,
)
RANK_CELL.add_argument("ranks", type=ranks, metavar="RANKS", help="1, say, or 0,2-3.")

LOCAL_CELL = LineParser("%%local", "Run the cell here, in the notebook, also in auto mode.")
