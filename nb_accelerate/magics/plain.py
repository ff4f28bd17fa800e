"""Errors that say it all in one line are shown in one line, without the frames of a magic."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING

from nb_accelerate.diagnostics.render import ANSI, cell_name
from nb_accelerate.errors import CellSyntaxError, NbAccelerateError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Errors about what was asked for, raised inside, show no traceback of ours.

    Raises:
        CellSyntaxError: instead of a SyntaxError, which IPython shows with all frames, whatever it is told.
    """
    try:
        yield
    except SyntaxError as error:
        plain = CellSyntaxError(str(error.msg))
        _show_as(plain, _syntax_lines(error))
        raise plain from None
    except (NbAccelerateError, NameError) as error:
        _show_as(error, _lines(error))
        raise


def _show_as(error: BaseException, lines: list[str]) -> None:
    if not hasattr(error, "_render_traceback_"):  # what came from a rank has one
        # IPython asks for this method before it formats a traceback itself.
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]


def _lines(error: BaseException) -> list[str]:
    """The message, and notes if there are any."""
    first, *rest = "".join(traceback.format_exception_only(type(error), error)).rstrip("\n").split("\n")
    kind, colon, text = first.partition(":")
    return [f"{ANSI.error}{kind.rpartition('.')[2]}{ANSI.end}{colon}{text}", *rest]


def _syntax_lines(error: SyntaxError) -> list[str]:
    """Python's own drawing, with the cell's name in place of a file's."""
    _, *drawing = traceback.format_exception_only(type(error), error)
    place = cell_name(error.filename or "") or error.filename
    shown = [line.rstrip("\n") for line in drawing[:-1]]
    return [
        f"{ANSI.where}{place}, line {error.lineno}{ANSI.end}",
        *shown,
        f"{ANSI.error}SyntaxError{ANSI.end}: {error.msg}",
    ]
