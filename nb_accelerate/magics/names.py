"""What only the ranks have: completion, inspection, and a hint where the notebook's own cells use its name.

For completion and inspection rank 0 is asked, briefly, while it is idle.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Any

from nb_accelerate.magics.args import CELL, HELP, POOL, SHOW
from nb_accelerate.magics.commands import COMMANDS
from nb_accelerate.magics.distribute import REWRITING

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from nb_accelerate.magics.auto import AutoMode

_COMMAND = re.compile(r"\s*%distributed\s+(\w*)$")
_OPTION = re.compile(r"\s*%(?:distributed\s+(\w+)|%(distributed|rank|distribute))\b.*\s(-[\w-]*)$")

_ANSWER_WITHIN = 0.2
"""Seconds that rank 0 has for an answer, while somebody types."""


class RankNames:
    """Adds itself to a shell's completer and inspector; `register`, `unregister`.

    Args:
        shell: of the kernel.
        auto: while it is on, every cell is one for the ranks.
    """

    def __init__(self, shell: InteractiveShell, auto: AutoMode) -> None:
        self._shell = shell
        self._auto = auto
        self._inspect: Callable[..., Any] | None = None
        self._matcher: Any = None

    def register(self) -> None:
        """Add the completer and the inspector to the shell."""
        completer = getattr(self._shell, "Completer", None)
        if completer is not None:
            self._matcher = _make_matcher(self._shell, self._auto)
            completer.custom_matchers += [self._matcher, _magic_matcher]
        self._shell.events.register("post_run_cell", _hint)
        self._inspect = self._shell.object_inspect_mime
        self._shell.object_inspect_mime = self._inspect_here_or_there  # type: ignore[method-assign]

    def unregister(self) -> None:
        """Take them out of the shell."""
        if self._matcher is not None:
            for matcher in (self._matcher, _magic_matcher):
                with contextlib.suppress(ValueError):
                    self._shell.Completer.custom_matchers.remove(matcher)
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", _hint)
        if self._inspect is not None:
            del self._shell.object_inspect_mime  # the class' own shows again

    def _inspect_here_or_there(self, oname: str, *arguments: Any, **options: Any) -> Any:
        assert self._inspect is not None
        try:
            return self._inspect(oname, *arguments, **options)
        except KeyError:
            from nb_accelerate.worker.namespace import inspect

            detail = options.get("detail_level", arguments[0] if arguments else 0)
            bundle = _ask_rank_0(inspect, oname, detail)
            if bundle is None:
                raise
            return bundle


def _hint(result: Any) -> None:
    """Say of a name that a cell of the notebook lacks that the ranks have it."""
    error = result.error_in_exec
    pools = sys.modules.get("nb_accelerate.pool")
    if not isinstance(error, NameError) or pools is None:
        return
    name = error.name
    if name is not None and name in pools.current().own_names:
        module = pools.current().own_modules.get(name)
        said = f"{name} is on the ranks: %distributed pull {name}" if module is None else _import_here(name, module)
        print(said, file=sys.stderr)  # noqa: T201 - under the error


def _import_here(name: str, module: str) -> str:
    line = f"import {module}" if name == module else f"import {module} as {name}"
    return f"{name} is imported on the ranks only. To have it here too: {line}"


def _magic_matcher(context: Any) -> dict[str, Any]:
    """Complete the commands of ``%distributed``, and the options of our magics; nothing else fits there."""
    from IPython.core.completer import SimpleCompletion

    line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
    found = words_for(line)
    return {"completions": [SimpleCompletion(text=one, type="magic") for one in found], "suppress": bool(found)}


_magic_matcher.matcher_api_version = 2  # type: ignore[attr-defined]
_magic_matcher.matcher_priority = 100  # type: ignore[attr-defined]  # before those that it suppresses
_magic_matcher.matcher_identifier = "nb_accelerate.magics"  # type: ignore[attr-defined]


def words_for(line: str) -> list[str]:
    """Return what may be written at the end of a line with a magic of ours; nothing for other lines. Pure."""
    command = _COMMAND.match(line)
    if command is not None:
        return [name for name in COMMANDS if name.startswith(command[1])]
    option = _OPTION.match(line)
    if option is None:
        return []
    known = COMMANDS.get(option[1])
    of_cells = REWRITING if option[2] == "distribute" else (*POOL, *CELL, *SHOW)
    options = of_cells if option[1] is None else known.options if known is not None else ()
    return sorted(flag for one in (*options, HELP) for flag in one.flags if flag.startswith(option[3]))


def _make_matcher(shell: InteractiveShell, auto: AutoMode) -> Any:
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher()  # type: ignore[untyped-decorator]
    def distributed_matcher(context: Any) -> dict[str, Any]:
        """Complete names of rank 0 in a cell for the ranks."""
        from nb_accelerate.worker.namespace import complete

        nothing: dict[str, Any] = {"completions": []}
        text = context.full_text
        is_theirs = auto.is_on or text.startswith(("%%distributed", "%%rank"))
        if not is_theirs or context.token.split(".")[0] in shell.user_ns:
            return nothing
        lines = text.split("\n")
        cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
        answer = _ask_rank_0(complete, text, cursor)
        if answer is None:
            return nothing
        start, end, found = answer
        # The part of the token before what is completed stays as it is.
        before = context.token[: max(0, len(context.token) - (end - start))]
        return {"completions": [SimpleCompletion(text=before + one, type="rank 0") for one in found]}

    return distributed_matcher


def _ask_rank_0(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of rank 0; None if there is none within the deadline."""
    pools = sys.modules.get("nb_accelerate.pool")
    if pools is None or not pools.current().is_idle:
        return None
    try:
        return pools.current().call(function, *arguments, ranks=(0,), timeout=_ANSWER_WITHIN)[0]
    except Exception:  # whatever it is, somebody is typing and wants no error
        return None
