"""The line magic ``%distributed COMMAND``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.errors import ConfigError, PoolError
from nb_accelerate.notebook.magics import args
from nb_accelerate.notebook.magics.args import HELP, POOL, SHOW, Option
from nb_accelerate.notebook.magics.plain import plain_errors
from nb_accelerate.notebook.magics.replacing import replace
from nb_accelerate.notebook.magics.status import status_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from nb_accelerate.notebook.magics.args import Parsed
    from nb_accelerate.notebook.magics.auto import AutoMode

_RANKS = Option(("--ranks",), "ranks", "Only these: 0,2-3.", args.ranks, "RANKS")
_LARGE = Option(("--large",), "large", "Also if it is more than 1 GB.")
_ALL = Option(("--all",), "all", "A list with the value of each rank.")
_ANY = None


@dataclass(frozen=True)
class Command:
    """One row of the table below.

    Attributes:
        usage: how it is written.
        about: what it does.
        options: of this command.
        words: how many words stand alone, at least and at most.
    """

    usage: str
    about: str
    options: tuple[Option, ...] = ()
    words: tuple[int, int | None] = (0, 0)


COMMANDS = {
    "start": Command("start [-n N] ...", "Start ranks; the first %%distributed cell does it by itself.", POOL),
    "status": Command("status", "Rank, process, device, memory, state, and what it does now."),
    "push": Command(
        "push NAME ... [--ranks RANKS] [--large]",
        "Send variables of the notebook, also over the ranks' own.",
        (_RANKS, _LARGE),
        (1, _ANY),
    ),
    "pull": Command(
        "pull NAME ... [--ranks RANKS] [--all]",
        "Bring variables of rank 0, or of another rank; of several, or all, a list by rank.",
        (_RANKS, _ALL),
        (1, _ANY),
    ),
    "where": Command("where", "Where every rank is in its code, also while it runs."),
    "interrupt": Command("interrupt", "Interrupt a cell that runs in the background."),
    "restart": Command("restart [RANK]", "Put a new rank in the place of one; or start all anew.", (), (0, 1)),
    "debug": Command(
        "debug [RANK]",
        "Look into the failure of the last cell on a rank, in the debugger; by default where it failed first.",
        (),
        (0, 1),
    ),
    "reset": Command("reset", "Delete all variables of the ranks."),
    "stop": Command("stop", "End the ranks."),
    "auto": Command("auto on|off", "Run every cell on the ranks; %%local keeps one here.", (), (1, 1)),
    "config": Command(
        "config [options]", "Show, or set, the options that cells, launches and ranks start with.", (*POOL, *SHOW)
    ),
}

HELP_TEXT = (
    "%distributed COMMAND [options]\n\nRanks that stay, for %%distributed cells.\n\ncommands:\n"
    + "\n".join(f"  {command.usage}\n      {command.about}" for command in COMMANDS.values())
    + "\n"
)


class Commands:
    """The line magic.

    Args:
        defaults: options for cells to come, set here.
    """

    def __init__(self, shell: InteractiveShell, auto: AutoMode, defaults: dict[str, Any]) -> None:
        self._shell = shell
        self._auto = auto
        self._defaults = defaults

    def run(self, line: str) -> None:
        """Do one command; replaced below by the whole help."""
        with plain_errors():
            name, _, rest = line.strip().partition(" ")
            if name in ("", "help", "-h", "--help"):
                _say(HELP_TEXT)
                return
            command = COMMANDS.get(name)
            if command is None:
                raise ConfigError(
                    f"there is no %distributed {name}.{suggest(name, COMMANDS)} Write one of: {', '.join(COMMANDS)}"
                )
            usage = f"%distributed {command.usage}"
            parsed = args.parse(rest, (*command.options, HELP), words=command.words, usage=usage)
            if parsed.get("help"):
                _say(args.help_text(usage, command.about, (*command.options, HELP)))
                return
            act: Callable[[Parsed], None] = getattr(self, "_switch_auto" if name == "auto" else f"_{name}")
            act(parsed)

    run.__doc__ = HELP_TEXT

    def _start(self, parsed: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        known = [option.name for option in POOL]
        defaults = {name: value for name, value in self._defaults.items() if name in known}
        pools.start(**{**defaults, **parsed.only(known)})
        _say(pools.current().brief)

    def _status(self, _: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        if not pools.current().is_running:
            _say("no ranks are running")
            return
        _say(f"{pools.current().describe()}: {pools.current().state.value}")
        _say(status_table(pools.status(), pools.current().where()))

    def _push(self, parsed: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        missing = [name for name in parsed.words if name not in self._shell.user_ns]
        if missing:
            near = suggest(missing[0], [name for name in self._shell.user_ns if not name.startswith("_")])
            raise NameError(f"name {missing[0]!r} is not defined in the notebook.{near}")
        values = {name: self._shell.user_ns[name] for name in parsed.words}
        ranks = parsed.get("ranks")
        pools.current().push(values, ranks, large=bool(parsed.get("large")))
        _say(f"{', '.join(values)}: sent to {_whom(ranks)}")

    def _pull(self, parsed: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        pool, names = pools.current(), parsed.words
        ranks = parsed.get("ranks", None if parsed.get("all") else (0,))
        try:
            by_rank = pool.pull(names, ranks)
            different = [] if {"ranks", "all"} & parsed.values.keys() else pool.different(names)
        except NameError as error:
            raise NameError(str(error)) from None  # without the traceback of a rank
        is_one = ranks is not None and len(ranks) == 1
        values = {
            name: found[0] if is_one else list(found)
            for name, found in zip(names, zip(*by_rank, strict=True), strict=True)
        }
        self._shell.user_ns.update(values)
        pool.note_pulled(values)
        differ = f"; the other ranks' are different: %distributed pull {' '.join(different)} --all" if different else ""
        _say(f"{', '.join(names)}: from {_whom(ranks)}{differ}")

    def _where(self, _: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        for rank, place in pools.current().where().items():
            _say(f"rank {rank}: {place}")

    def _interrupt(self, _: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        pool = pools.current()
        was_busy = pool.is_running and not pool.is_idle
        pools.interrupt()
        _say("the cell on the ranks is interrupted" if was_busy else "no cell runs on the ranks")

    def _restart(self, parsed: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        if parsed.words:
            _say(replace(pools.current(), _rank(parsed.words[0], "restart")))
            return
        pools.restart()
        _say(pools.current().brief)

    def _debug(self, parsed: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools
        from nb_accelerate.notebook.pool.source import read_cell

        pool = pools.current()
        rank = _rank(parsed.words[0], "debug") if parsed.words else pool.failed_rank
        if rank is None:
            raise PoolError("no cell has failed on the ranks, so there is nothing to look into")
        # Not a cell of the user's: no text of it is kept, and auto mode does not see it.
        pool.run(read_cell("get_ipython().debugger(force=True)"), pools.CellOptions(ranks=(rank,), progress="off"))

    def _reset(self, _: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        pools.current().reset()
        _say("the ranks have no variables of yours any more")

    def _stop(self, _: Parsed) -> None:
        from nb_accelerate.notebook import pool as pools

        was_running = pools.current().is_running
        pools.stop()
        _say("the ranks have ended" if was_running else "no ranks are running")

    def _switch_auto(self, parsed: Parsed) -> None:
        self._auto.switch(parsed.words[0])
        _say("cells run on the ranks; %%local keeps one here" if self._auto.is_on else "cells run in the notebook")

    def _config(self, parsed: Parsed) -> None:
        self._defaults.update(parsed.values)
        for option in (*POOL, *SHOW):
            if option.name in self._defaults:
                _say(f"{option.flags[-1]} {self._defaults[option.name]}")
        if not self._defaults:
            _say("nothing is set: cells and ranks start with what --help says")


def _whom(ranks: Sequence[int] | None) -> str:
    return "all ranks" if ranks is None else named(ranks)


def _rank(word: str, command: str) -> int:
    if not word.isdigit():
        raise ConfigError(f"{word!r} is not a rank. Write %distributed {command} 1, say")
    return int(word)


def _say(text: str) -> None:
    print(text)  # noqa: T201 - it was asked for
