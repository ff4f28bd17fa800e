"""Parse what is written behind a magic, as options. Pure: nothing is started, nothing is looked up.

One table row is one option: how it is written, what it becomes, and its line in the help.
"""

from __future__ import annotations

import keyword
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        flags: how it is written.
        name: what it is called afterwards.
        help: one line.
        read: makes a value of the word that follows; None if no word follows.
        meta: stands for the word in the help.
    """

    flags: tuple[str, ...]
    name: str
    help: str
    read: Callable[[str], Any] | None = None
    meta: str = ""


@dataclass(frozen=True)
class Parsed:
    """What was written.

    Attributes:
        values: by the options' names; an option that was not written is missing.
        words: what stands alone.
    """

    values: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an option."""
        return self.values.get(name, default)

    def only(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of `names` that were written."""
        return {name: self.values[name] for name in names if name in self.values}


def parse(line: str, options: Sequence[Option], *, words: tuple[int, int | None] = (0, 0), usage: str = "") -> Parsed:
    """Read a line.

    Args:
        words: how many words may stand alone, at least and at most.
        usage: how it is written, for the error about missing words.

    Raises:
        ConfigError: says what was given, why it cannot be, and what to write.
    """
    known = {flag: option for option in options for flag in option.flags}
    try:
        waiting = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{line!r} cannot be read: {error}. Close the quotes") from None
    waiting.reverse()
    values: dict[str, Any] = {}
    alone: list[str] = []
    while waiting:
        word = waiting.pop()
        if not word.startswith("-") or word == "-":
            alone.append(word)
            continue
        flag, equals, attached = word.partition("=")
        option = known.get(flag)
        if option is None:
            raise ConfigError(f"there is no option {flag}.{suggest(flag, known)} --help shows all")
        if option.read is None:
            if equals:
                raise ConfigError(f"{flag} takes no value. Write {flag} alone")
            values[option.name] = True
            continue
        if not equals and not waiting:
            raise ConfigError(f"{flag} needs a value: {flag} {option.meta}")
        values[option.name] = option.read(attached if equals else waiting.pop())
    least, most = words
    if "help" not in values and (len(alone) < least or (most is not None and len(alone) > most)):
        extra = (
            f"{alone[most]!r} is one word too many" if most is not None and len(alone) > most else "a word is missing"
        )
        raise ConfigError(f"{extra}. Write {usage}")
    return Parsed(values, tuple(alone))


def whole(name: str) -> Callable[[str], int]:
    """Parse a number of things, at least 1."""

    def read(word: str) -> int:
        if not word.isdigit() or int(word) < 1:
            raise ConfigError(f"{name} {word}: this is not a number from 1. Write {name} 2, say")
        return int(word)

    return read


def seconds(word: str) -> float:
    """Parse a time in seconds."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"--timeout {word}: this is not a number of seconds above 0. Write --timeout 60, say")
    return value


def ranks(word: str) -> tuple[int, ...]:
    """Parse ranks: ``0,2-3``."""
    found: set[int] = set()
    for part in word.split(","):
        span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if span is None or (span[2] is not None and int(span[2]) < int(span[1])):
            raise ConfigError(f"ranks {word!r}: {part!r} is not a rank, or a range of them. Write 0,2-3, say")
        found.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return tuple(sorted(found))


def names(word: str) -> tuple[str, ...]:
    """Parse names of variables: ``x,model``."""
    return tuple(variable(part.strip()) for part in word.split(",") if part.strip())


def variable(word: str) -> str:
    """Parse the name of a variable."""
    if not word.isidentifier() or keyword.iskeyword(word):
        raise ConfigError(f"{word!r} is not a name that a variable can have")
    return word


def devices(word: str) -> str | tuple[int, ...]:
    """Parse devices: ``cpu`` or ``0,2``."""
    return "cpu" if word == "cpu" else ranks(word)


HELP = Option(("-h", "--help"), "help", "Show this.")

POOL = (
    Option(
        ("-n", "--num-processes"),
        "num_processes",
        "Number of ranks. By default one for each GPU, or 2 on a machine without.",
        whole("-n"),
        "N",
    ),
    Option(("--mixed-precision",), "mixed_precision", "no, fp16 or bf16: the default of Accelerator().", str, "HOW"),
    Option(("--devices",), "devices", "cpu, or the numbers of the GPUs to use: 0,2-3.", devices, "WHICH"),
    Option(("--start-method",), "start_method", "auto, forkserver or spawn.", str, "HOW"),
)

CELL = (
    Option(("--ranks",), "ranks", "Run on these only: 0,2-3.", ranks, "RANKS"),
    Option(
        ("--in",),
        "send",
        "Send these from the notebook first, also if the ranks have their own of that name.",
        names,
        "NAME,...",
    ),
    Option(
        ("--out",),
        "out",
        "Bind this name in the notebook to the value of the last expression: a list, by rank.",
        variable,
        "NAME",
    ),
    Option(("--background",), "background", "Go on at once; the value of the cell is a handle. Output goes under it."),
    Option(("--timeout",), "timeout", "Interrupt the ranks after so many seconds.", seconds, "SECONDS"),
)

CONVERT = (
    Option(
        ("--convert",),
        "converts",
        "Run a cell that is written for one process with its numbers: ranks share the work of its models.",
    ),
)

SHOW = (
    Option(("--group-outputs",), "group_outputs", "Wait for the end, and show what each rank printed in one place."),
    Option(("--no-capture",), "no_capture", "Show every line as it comes, with its rank; fold nothing."),
    Option(("--quiet",), "quiet", "Show no output."),
    Option(("--progress",), "progress", "Where the panel is drawn: auto, widget, text or off.", str, "WHERE"),
)

INSERTED = Option(("--inserted",), "inserted", "")
"""Written by auto mode, not by people: there is no line above the cell's body."""


def parse_cell(line: str) -> Parsed:
    """Read what follows ``%%distributed``."""
    options = (*POOL, *CONVERT, *CELL, *SHOW, HELP, INSERTED)
    return parse(line, options, usage="%%distributed [options], and the cell below")


def parse_rank(line: str) -> Parsed:
    """Read what follows ``%%rank``."""
    options = [option for option in (*CELL, *SHOW, HELP) if option.name != "ranks"]
    parsed = parse(line, options, words=(1, 1), usage="%%rank 1, say")
    if parsed.words:
        parsed.values["ranks"] = ranks(parsed.words[0])
    return parsed


def help_text(usage: str, about: str, options: Iterable[Option]) -> str:
    """Return a help text in the manner of IPython's magics."""
    lines = [f"{usage}\n", about, ""]
    rows = [
        (", ".join(f"{flag} {option.meta}".rstrip() for flag in option.flags), option.help)
        for option in options
        if option.help
    ]
    if rows:
        lines.append("options:")
        for left, right in rows:
            lines += [f"  {left}", f"      {right}"]
    return "\n".join(lines).rstrip() + "\n"


DISTRIBUTED_CELL = help_text(
    "%%distributed [-n N] [--convert] [--ranks RANKS] [--in NAME,...] [--out NAME] [--background] ...",
    "Run the cell on every rank. Ranks are started by the first such cell, and keep their variables.\n\n"
    "They know rank, local_rank, world_size, device and accelerator. What the cell uses of the notebook is sent\n"
    "to them; the notebook's own variables are not touched. What all ranks print is shown once, other output with\n"
    "its rank.",
    (*POOL, *CONVERT, *CELL, *SHOW, HELP),
)

RANK_CELL = help_text(
    "%%rank RANKS [--in NAME,...] [--out NAME] [--background] [--timeout SECONDS] ...",
    "Run the cell on one rank, or some: %%rank 1, %%rank 0,2-3. The same as %%distributed --ranks.",
    [option for option in (*CELL, *SHOW, HELP) if option.name != "ranks"],
)

LOCAL_CELL = help_text("%%local", "Run the cell here, in the notebook, also in auto mode.", ())
