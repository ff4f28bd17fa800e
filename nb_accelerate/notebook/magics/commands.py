"""The line magic ``%distributed COMMAND``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.base.table import Table
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.base.words import size
from nb_accelerate.errors import ConfigError, PoolError
from nb_accelerate.notebook.magics import args
from nb_accelerate.notebook.magics.args import ENGINE, POOL, RANKS, SHOW, LineParser
from nb_accelerate.notebook.magics.cells import plain_errors, replace, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from nb_accelerate.notebook.magics.auto import AutoMode
    from nb_accelerate.notebook.pool import Pool
    from nb_accelerate.notebook.ranks.status import RankStatus


def _command(usage: str, about: str, *parents: argparse.ArgumentParser) -> LineParser:
    return LineParser(f"%distributed {usage}", about, *parents)


COMMANDS = {
    "start": _command("start [-n N] ...", "Start ranks; the first %%distributed cell does it by itself.", POOL, ENGINE),
    "status": _command("status", "Rank, process, device, memory, state, and where it is in its code now."),
    "push": _command(
        "push NAME ... [--ranks RANKS] [--large]", "Send variables of the notebook, also over the ranks' own.", RANKS
    ),
    "pull": _command(
        "pull NAME ... [--ranks RANKS] [--all]",
        "Bring variables of rank 0, or of another rank; of several, or all, a list by rank.",
        RANKS,
    ),
    "interrupt": _command("interrupt", "Interrupt a cell that runs in the background."),
    "restart": _command(
        "restart [RANK]", "Put a new rank in the place of one; or start all, or those of a lost machine."
    ),
    "debug": _command(
        "debug [RANK]",
        "Look into the failure of the last cell on a rank, in the debugger; by default where it failed first.",
    ),
    "reset": _command("reset", "Delete all variables of the ranks."),
    "stop": _command("stop", "End the ranks."),
    "auto": _command("auto on|off", "Run every cell on the ranks; %%local keeps one here."),
    "config": _command(
        "config [options]", "Show, or set, the options that cells, launches and ranks start with.", POOL, ENGINE, SHOW
    ),
}
for name in ("push", "pull"):
    COMMANDS[name].add_argument("names", nargs="+", metavar="NAME")
for name in ("restart", "debug"):
    COMMANDS[name].add_argument("rank", nargs="?", type=int, metavar="RANK", default=None)
COMMANDS["push"].add_argument("--large", action="store_true", help="Also if it is more than 1 GB.")
COMMANDS["pull"].add_argument("--all", action="store_true", help="A list with the value of each rank.")
COMMANDS["auto"].add_argument("how", choices=("on", "off"))

HELP_TEXT = (
    "%distributed COMMAND [options]\n\nRanks that stay, for %%distributed cells.\n\ncommands:\n"
    + "\n".join(f"  {command.line.partition(' ')[2]}\n      {command.description}" for command in COMMANDS.values())
    + "\n"
)


class Commands:
    """The line magic."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode, defaults: dict[str, Any]) -> None:
        self._shell = shell
        self._auto = auto
        self._defaults = defaults

    @property
    def _pool(self) -> Pool:
        from nb_accelerate.notebook import pool  # only where a command needs it: it imports much

        return pool.current()

    def run(self, line: str) -> None:
        """Do one command; replaced below by the whole help."""
        with plain_errors():
            name, _, arguments = line.strip().partition(" ")
            if name in ("", "help", "-h", "--help"):
                say(HELP_TEXT)
                return
            command = COMMANDS.get(name)
            if command is None:
                raise ConfigError(
                    f"there is no %distributed {name}.{suggest(name, COMMANDS)} Write one of: {', '.join(COMMANDS)}"
                )
            options = command.parse(arguments)
            if options is not None:
                act: Callable[[dict[str, Any]], None] = getattr(self, "_switch_auto" if name == "auto" else f"_{name}")
                act(options)

    run.__doc__ = HELP_TEXT

    def _start(self, options: dict[str, Any]) -> None:
        from nb_accelerate.notebook.pool.options import PoolOptions

        defaults = {name: value for name, value in self._defaults.items() if name in args.names_of(POOL)}
        self._pool.start(PoolOptions(**{**defaults, **options}))
        say(self._pool.brief)

    def _status(self, _: dict[str, Any]) -> None:
        if not self._pool.has_ranks:
            say("no ranks are running")
            return
        say(f"{self._pool.describe()}: {self._pool.state.value}")
        say(status_table(self._pool.status(), self._pool.where()))

    def _push(self, options: dict[str, Any]) -> None:
        missing = [name for name in options["names"] if name not in self._shell.user_ns]
        if missing:
            near = suggest(missing[0], [name for name in self._shell.user_ns if not name.startswith("_")])
            raise NameError(f"name {missing[0]!r} is not defined in the notebook.{near}")
        values = {name: self._shell.user_ns[name] for name in options["names"]}
        ranks = options.get("ranks")
        self._pool.push(values, ranks, large=bool(options.get("large")))
        say(f"{', '.join(values)}: sent to {_whom(ranks)}")

    def _pull(self, options: dict[str, Any]) -> None:
        from nb_accelerate.notebook.worker.received import share

        pool, names = self._pool, options["names"]
        ranks = options.get("ranks", None if options.get("all") else (0,))
        try:
            by_rank = pool.pull(names, ranks)
            differing = [] if {"ranks", "all"} & options.keys() else pool.differing(names)
        except NameError as error:
            raise NameError(str(error)) from None  # without the traceback of a rank
        is_one = ranks is not None and len(ranks) == 1
        values = {
            name: of_ranks[0] if is_one else list(of_ranks)
            for name, of_ranks in zip(names, zip(*by_rank, strict=True), strict=True)
        }
        self._shell.user_ns.update(values)
        is_shared = is_one and not differing and "ranks" not in options and not pool.lost
        pool.variables.note_pulled(values, functools.partial(pool.call, share) if is_shared else None)
        differ = f"; the other ranks' are different: %distributed pull {' '.join(differing)} --all" if differing else ""
        say(f"{', '.join(names)}: from {_whom(ranks)}{differ}")

    def _interrupt(self, _: dict[str, Any]) -> None:
        pool = self._pool
        was_busy = pool.has_ranks and not pool.accepts_cells
        pool.interrupt()
        say("the cell on the ranks is interrupted" if was_busy else "no cell runs on the ranks")

    def _restart(self, options: dict[str, Any]) -> None:
        say(replace(self._pool, options["rank"]))

    def _debug(self, options: dict[str, Any]) -> None:
        from nb_accelerate.notebook.pool.options import CellOptions
        from nb_accelerate.notebook.pool.source import read_cell

        pool = self._pool
        rank = pool.failed_rank if options["rank"] is None else options["rank"]
        if rank is None:
            raise PoolError("no cell has failed on the ranks, so there is nothing to look into")
        # It is no cell of the user's, so no text of it is kept, and auto mode does not see it.
        pool.run(read_cell("get_ipython().debugger(force=True)"), CellOptions(ranks=(rank,), progress="off"))

    def _reset(self, _: dict[str, Any]) -> None:
        self._pool.reset()
        say("the ranks have no variables of yours any more")

    def _stop(self, _: dict[str, Any]) -> None:
        from nb_accelerate.notebook.launch.hosts import close_hosts  # here, because this file is loaded before the pool

        was_running = self._pool.has_ranks
        self._pool.stop()
        self._pool.pending = None
        had_hosts = close_hosts()  # of the last launch
        hosts = "; the machines of the last launch are free" if had_hosts else ""
        say(f"{'the ranks have ended' if was_running else 'no ranks are running'}{hosts}")

    def _switch_auto(self, options: dict[str, Any]) -> None:
        self._auto.is_on = options["how"] == "on"
        say("cells run on the ranks; %%local keeps one here" if self._auto.is_on else "cells run in the notebook")

    def _config(self, options: dict[str, Any]) -> None:
        self._defaults.update(options)
        for group in (POOL, ENGINE, SHOW):
            for option in args.written(group, self._defaults):
                say(option)
        if not self._defaults:
            say("nothing is set: cells and ranks start with what --help says")


def _whom(ranks: Sequence[int] | None) -> str:
    return "all ranks" if ranks is None else named(ranks)


def status_table(ranks: Sequence[RankStatus], positions: Mapping[int, str]) -> str:
    """Return a table with a row for each rank, and a line about how models are spread over them."""
    has_models = any(status.held.states for status in ranks)
    held_columns = ("peak", "parameters", "gradients", "optimizer") if has_models else ()
    has_machines = len({status.machine for status in ranks}) > 1
    titles = ("rank", *(["machine"] if has_machines else []), "pid", "device", "memory", *held_columns, "state", "now")
    rows = []
    for status in ranks:
        now = status.doing if status.state == "ended" else positions.get(status.rank, "")
        if now == "idle":
            now = ""
        held = status.held
        sizes = [status.memory, *((held.peak, held.parameters, held.gradients, held.optimizer) if has_models else ())]
        memory = [size(num_bytes) if num_bytes else "" for num_bytes in sizes]
        machine = [status.machine] if has_machines else []
        rows.append((str(status.rank), *machine, str(status.pid or ""), status.device, *memory, status.state, now))
    sharding = sorted({status.held.sharding for status in ranks if status.held.sharding})
    return repr(Table(titles, rows, notes=[f"models: {kind}" for kind in sharding]))
