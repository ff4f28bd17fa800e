"""Errors that say it all in one line are shown in one line, without the frames of a magic."""

from __future__ import annotations

import contextlib
import functools
import traceback
from typing import TYPE_CHECKING

from nb_accelerate.errors import CellSyntaxError, NbAccelerateError
from nb_accelerate.errors.traceback_lines import cell_name, lines_instead, show_instead, text_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nb_accelerate.errors.traceback_lines import Style


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Show errors about what was asked for, raised inside the block, without a traceback.

    Raises:
        CellSyntaxError: instead of a SyntaxError, which IPython always shows with all frames.
    """
    try:
        yield
    except SyntaxError as error:
        plain = CellSyntaxError(str(error.msg))
        _show_as(plain, lines_instead(error) or functools.partial(_syntax_lines, error))  # a rank's has some
        raise plain from None
    except (NbAccelerateError, NameError) as error:
        _show_as(error, functools.partial(text_lines, error))
        raise


def _show_as(error: BaseException, lines: Callable[[Style], list[str]]) -> None:
    if "_render_traceback_" not in vars(error):  # what came from a rank has one
        show_instead(error, lines)


def _syntax_lines(error: SyntaxError, style: Style) -> list[str]:
    """Return Python's own drawing, with the cell's name in place of a file's."""
    _, *drawing = traceback.format_exception_only(type(error), error)
    place = cell_name(error.filename or "") or error.filename
    shown = [line.rstrip("\n") for line in drawing[:-1]]
    return [
        f"{style.where}{place}, line {error.lineno}{style.end}",
        *shown,
        f"{style.error}SyntaxError{style.end}: {error.msg}",
    ]
