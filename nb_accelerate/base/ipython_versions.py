"""What IPython has in some of its versions only, 7.34 to 9: names of cells, and completers that see the whole cell.

Colab and Kaggle have IPython 7.34. All other code that differs between versions of IPython asks this module.
"""

from __future__ import annotations

import functools
import linecache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell


def cell_number(shell: InteractiveShell, filename: str) -> int | None:
    """Return the number of the cell that is compiled under a file name; None if it is no cell."""
    compiler: Any = shell.compile
    numbers: dict[str, int] | None = getattr(compiler, "_filename_map", None)
    if numbers is not None:
        return numbers.get(filename)
    # Before 8, a compiler knows how to name a cell, and not which cell has a name.
    if filename not in getattr(linecache, "_ipython_cache", ()):
        return None
    history = shell.history_manager.input_hist_raw if shell.history_manager is not None else []
    for number in range(len(history) - 1, 0, -1):
        # A cell magic is given its cell with one more line break than the history keeps.
        if filename in _names_of(compiler.get_code_name, history[number], number):
            return number
    return None


def is_module_level(code_name: str) -> bool:
    """Return whether the code object of this name is a whole module or cell, and not a function in it."""
    return code_name == "<module>" or code_name.startswith("<cell line: ")  # 7.31 to 8


def lines_of_cell(filename: str) -> list[str] | None:
    """Return the text of a cell that has run in this process, by its file name in tracebacks; None for other files."""
    entry: Any = linecache.cache.get(filename, ())
    # Without a time, an entry stays though there is no such file. Before 8, IPython puts its own back instead.
    is_kept = len(entry) == 4 and (entry[1] is None or filename in getattr(linecache, "_ipython_cache", ()))
    return entry[2] if is_kept else None


@functools.lru_cache(maxsize=2048)
def _names_of(get_code_name: Callable[[str, str, int], str], code: str, number: int) -> tuple[str, str]:
    return get_code_name(code, code, number), get_code_name(f"{code}\n", f"{code}\n", number)


class Cursor(NamedTuple):
    """Where somebody types and asks for completions: in the text of a cell, in a line counted from 0, after a token."""

    text: str
    line: int
    column: int
    token: str


class Completions(NamedTuple):
    """What may stand in the place of a token."""

    texts: list[str]  # each for the whole token
    kind: str = ""  # shown beside them
    only: bool = False  # nothing else fits there


def add_completer(shell: InteractiveShell, complete: Callable[[Cursor], Completions]) -> Callable[[], None]:
    """Have a shell ask for completions too. Return a function that undoes it."""
    completer: Any = getattr(shell, "Completer", None)
    if completer is None:
        return lambda: None
    try:
        from IPython.core.completer import SimpleCompletion, context_matcher
    except ImportError:  # before 8.6
        return _wrap(completer, complete)

    @context_matcher(identifier="nb_accelerate", priority=100)  # type: ignore[untyped-decorator]  # before the others
    def matcher(context: Any) -> dict[str, Any]:
        completions = complete(Cursor(context.full_text, context.cursor_line, context.cursor_position, context.token))
        texts = [SimpleCompletion(text=text, type=completions.kind) for text in completions.texts]
        return {"completions": texts, "suppress": completions.only}

    completer.custom_matchers.append(matcher)

    def remove() -> None:
        if matcher in completer.custom_matchers:
            completer.custom_matchers.remove(matcher)

    return remove


def _wrap(completer: Any, complete: Callable[[Cursor], Completions]) -> Callable[[], None]:
    """Ask before the completer does: its matchers are given the token only, and cannot put others aside."""
    original = completer._complete  # noqa: SLF001 - versions before 8.6 have no other place that sees the cell

    def ask(*, cursor_line: int, cursor_pos: int, **rest: Any) -> Any:
        text = rest.get("full_text") or rest.get("line_buffer") or ""
        line = text.split("\n")[cursor_line] if text else ""
        token = completer.splitter.split_line(line, cursor_pos)
        completions = complete(Cursor(text, cursor_line, cursor_pos, token))
        origins = [completions.kind] * len(completions.texts)
        if completions.only:
            return token, completions.texts, origins, ()
        its_token, texts, its_origins, of_jedi = original(cursor_line=cursor_line, cursor_pos=cursor_pos, **rest)
        if not completions.texts or its_token != token:
            return its_token, texts, its_origins, of_jedi
        return token, [*completions.texts, *texts], [*origins, *its_origins], of_jedi

    completer._complete = ask  # noqa: SLF001 - see above

    def remove() -> None:
        if completer._complete is ask:  # noqa: SLF001 - see above
            del completer._complete  # noqa: SLF001 - uncovers the method of its class

    return remove
