"""What only the ranks have: completion, inspection, and a hint where the notebook's own cells use its name.

For completion and inspection rank 0 is asked, briefly, while it is idle.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.ipython_versions import Completions, add_completer
from nb_accelerate.notebook.magics.args import DISTRIBUTED_CELL
from nb_accelerate.notebook.magics.commands import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from nb_accelerate.base.ipython_versions import Cursor
    from nb_accelerate.notebook.magics.auto import AutoMode

_COMMAND = re.compile(r"\s*%distributed\s+(\w*)$")
_OPTION = re.compile(r"\s*%(?:distributed\s+(\w+)|%(?:distributed|rank))\b.*\s(-[\w-]*)$")

# Methods of a shell that tell what a name is. Colab's kernel asks the second one first.
_INSPECTORS = ("object_inspect_mime", "object_inspect")

_ANSWER_WITHIN = 0.2  # seconds that rank 0 has for an answer, while somebody types


class RankNames:
    """Adds itself to a shell's completer and inspector; `register`, `unregister`."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode) -> None:
        self._shell = shell
        self._auto = auto
        self._remove_completer: Callable[[], None] = lambda: None

    def register(self) -> None:
        """Add the completer and the inspector to the shell."""
        self._remove_completer = add_completer(self._shell, self._complete)
        self._shell.events.register("post_run_cell", _hint)
        self._shell.events.register("post_run_cell", self._note_bindings)
        for method in _INSPECTORS:
            setattr(self._shell, method, _also_on_ranks(getattr(self._shell, method), method))

    def unregister(self) -> None:
        """Take them out of the shell."""
        self._remove_completer()
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", _hint)
            self._shell.events.unregister("post_run_cell", self._note_bindings)
        for method in _INSPECTORS:
            vars(self._shell).pop(method, None)  # uncovers the method of its class

    def _note_bindings(self, result: Any) -> None:
        """Note which names a cell of the notebook has bound later than the ranks, or deleted."""
        pools = sys.modules.get("nb_accelerate.notebook.pool")
        variables = pools.current().variables if pools is not None else None
        cell = result.info.raw_cell or ""
        if variables is None or not variables.syncs or not self._auto.runs_here(cell):
            return
        names = self._shell.user_ns
        bound: frozenset[str] = frozenset()
        # A number that is bound again is the same object: only the source says so.
        if result.success and variables.own_names:
            from nb_accelerate.notebook.pool.names import stored_by
            from nb_accelerate.notebook.pool.source import read_cell

            with contextlib.suppress(SyntaxError), self._auto.paused():
                source = read_cell(cell, transform=self._shell.transform_cell)
                bound = source.stored.union(*(stored_by(names.get(name), names) for name in source.calls))
        from nb_accelerate.notebook.pool.variables import NotebookValue

        for sync in variables.syncs.values():
            sync.note_notebook(names, bound)
        for name, before in variables.trained.items():
            if before.value() is not names.get(name, before.value()):
                variables.trained[name] = NotebookValue.of(name, names)
                print(  # noqa: T201 - under what the cell prints
                    f"{name} was trained on the ranks, and is bound to something else here: the next cell there that "
                    f"uses {name} gets that, and loses what was trained. To have the trained one: "
                    f"%distributed pull {name}"
                )

    def _complete(self, cursor: Cursor) -> Completions:
        """Complete the commands and options of our magics, and names of rank 0 in a cell for the ranks."""
        line = cursor.text.split("\n")[cursor.line][: cursor.column]
        words = words_for(line)
        if words:
            return Completions(words, "magic", only=True)
        from nb_accelerate.notebook.worker.namespace import complete

        is_theirs = self._auto.is_on or cursor.text.startswith(("%%distributed", "%%rank"))
        if not is_theirs or cursor.token.split(".")[0] in self._shell.user_ns:
            return Completions([])
        above = cursor.text.split("\n")[: cursor.line]
        position = sum(len(line) + 1 for line in above) + cursor.column
        answer = _ask_rank_0(complete, cursor.text, position)
        if answer is None:
            return Completions([])
        start, end, found = answer
        # The part of the token before what is completed stays as it is.
        before = cursor.token[: max(0, len(cursor.token) - (end - start))]
        return Completions([before + name for name in found], "rank 0")


def _also_on_ranks(here: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Return a method of a shell that asks rank 0 about names which the notebook lacks."""

    def look_up(oname: str, *arguments: Any, **options: Any) -> Any:
        from nb_accelerate.notebook.worker.namespace import inspect

        error = None
        try:
            found = here(oname, *arguments, **options)
        except KeyError as missing:
            found, error = None, missing
        if found is not None and found.get("found", True):
            return found
        detail = options.get("detail_level", arguments[0] if arguments else 0)
        there = _ask_rank_0(inspect, method, oname, detail)
        if there is not None:
            return there
        if error is not None:
            raise error
        return found

    return look_up


def _hint(result: Any) -> None:
    """Say of a name that a cell of the notebook lacks that the ranks have it."""
    error = result.error_in_exec
    pools = sys.modules.get("nb_accelerate.notebook.pool")
    if not isinstance(error, NameError) or pools is None:
        return
    name = error.name
    if name is not None and name in pools.current().variables.own_names:
        print(f"{name} is on the ranks: %distributed pull {name}", file=sys.stderr)  # noqa: T201 - under the error


def words_for(line: str) -> list[str]:
    """Return what may be written at the end of a line with a magic of ours; nothing for other lines. Pure."""
    command = _COMMAND.match(line)
    if command is not None:
        return [name for name in COMMANDS if name.startswith(command[1])]
    option = _OPTION.match(line)
    if option is None:
        return []
    parser = DISTRIBUTED_CELL if option[1] is None else COMMANDS.get(option[1])
    return sorted(flag for flag in parser.flags if flag.startswith(option[2])) if parser is not None else []


def _ask_rank_0(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of rank 0; None if there is none within the deadline."""
    pools = sys.modules.get("nb_accelerate.notebook.pool")
    if pools is None or not pools.current().accepts_cells:
        return None
    try:
        return pools.current().call(function, *arguments, ranks=(0,), timeout=_ANSWER_WITHIN)[0]
    except Exception:  # somebody is typing and wants no error
        return None
