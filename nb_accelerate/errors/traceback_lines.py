"""Show an exception in a few lines: where in the user's code it was raised, and its text.

A traceback of one of this package's errors ends in frames of this package, which say nothing to a user. IPython asks
an exception for ``_render_traceback_``, plain Python calls `sys.excepthook`: both get these lines instead. With
``NB_ACCELERATE_FULL_TRACEBACK=1`` in the environment both show all frames, as for any other exception.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nb_accelerate.base.ipython_versions import cell_number, is_module_level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

FULL_TRACEBACK = "NB_ACCELERATE_FULL_TRACEBACK"

_OUR_FOLDER = str(Path(__file__).parents[1]) + os.sep
_LIBRARY_PATHS = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) + os.sep for name in _LIBRARY_PATHS})
_LIBRARY_PARTS = ("site-packages", "dist-packages", "ipykernel_launcher")

# Frames of the user's that are shown: the outermost and the innermost ones. With the text they fill twelve lines.
_MAX_FRAMES = 3

# Attribute of an exception: a function that takes a `Style` and returns the lines to show instead of a traceback.
_LINES = "_nb_accelerate_lines"


class Style(NamedTuple):
    """ANSI sequences, or empty strings."""

    error: str = ""
    where: str = ""
    faint: str = ""
    end: str = ""


PLAIN = Style()
ANSI = Style(error="\x1b[31m", where="\x1b[32m", faint="\x1b[2m", end="\x1b[0m")


class FrameLine(NamedTuple):
    """A line of code that a frame was in."""

    filename: str
    lineno: int
    name: str


class ShortTraceback:
    """Descriptor for ``_render_traceback_`` of our exceptions: IPython shows what it returns instead of all frames.

    An instance may have its own, which comes first. While full tracebacks are wanted there is no such attribute.
    """

    def __get__(self, error: BaseException | None, _: type[BaseException] | None = None) -> Callable[[], list[str]]:
        if error is None or wants_full():
            raise AttributeError("_render_traceback_")
        return functools.partial(short_lines, error, ANSI)


def wants_full() -> bool:
    """Return whether tracebacks show the frames of this package: the environment variable is set, and not to 0."""
    return os.environ.get(FULL_TRACEBACK, "").strip().lower() not in ("", "0", "false", "no", "off")


def show_instead(error: BaseException, lines: Callable[[Style], list[str]]) -> None:
    """Have lines shown in the place of an exception's traceback, in IPython and by plain Python.

    Args:
        error: of any type. One that refuses attributes keeps its traceback.
    """
    if wants_full():
        return
    try:
        setattr(error, _LINES, lines)
        error._render_traceback_ = functools.partial(lines, ANSI)  # type: ignore[attr-defined]
    except Exception:  # noqa: S110 - users' classes may have slots, or an odd __setattr__; then Python shows it
        pass


def lines_instead(error: BaseException) -> Callable[[Style], list[str]] | None:
    """Return what `show_instead` was given for an exception; None if it was not called."""
    try:
        found: Callable[[Style], list[str]] | None = vars(error).get(_LINES)
    except Exception:  # users' classes: one without attributes, or with an odd __dict__
        return None
    return found


def short_lines(error: BaseException, style: Style = PLAIN) -> list[str]:
    """Return the user's lines that led to an exception, innermost last, and then its text."""
    frames = user_frames(error.__traceback__)
    lines: list[str] = []
    if len(frames) > _MAX_FRAMES:
        lines += [*frame_lines(frames[0], style), f"{style.faint}    ...{style.end}"]
        frames = frames[-_MAX_FRAMES + 1 :]
    for frame in frames:
        lines += frame_lines(frame, style)
    return [*lines, *([""] if lines else []), *text_lines(error, style)]


def text_lines(error: BaseException, style: Style = PLAIN) -> list[str]:
    """Return the type of an exception without its module, its message and its notes."""
    text = "".join(traceback.format_exception_only(type(error), error)).rstrip("\n")
    # Python 3.10 leaves them out, unless the package exceptiongroup is imported, as by AnyIO.
    text = "\n".join([text, *(note for note in map(str, getattr(error, "__notes__", ())) if note not in text)])
    first, *rest = text.split("\n")
    return [highlight_type(first, style), *rest]


def highlight_type(line: str, style: Style) -> str:
    """Return ``ConfigError: text`` for ``nb_accelerate.errors.ConfigError: text``, with the type in colour."""
    kind, colon, text = line.partition(":")
    return f"{style.error}{kind.removeprefix(f'{__package__}.')}{style.end}{colon}{text}"


def user_frames(trace: TracebackType | None) -> list[FrameLine]:
    """Return the frames of a traceback that are the user's own code, outermost first."""
    frames = [
        FrameLine(frame.f_code.co_filename, lineno or 0, frame.f_code.co_name)
        for frame, lineno in traceback.walk_tb(trace)
    ]
    return [frame for frame in frames if is_users(frame.filename)]


def calling_line() -> str:
    """Return the text of the user's line that has called this package; "" if it cannot be read."""
    for frame, lineno in traceback.walk_stack(None):
        if is_users(frame.f_code.co_filename):
            return linecache.getline(frame.f_code.co_filename, lineno).strip().rstrip(":")
    return ""


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to this package."""
    return filename.startswith(_OUR_FOLDER)


def is_users(filename: str) -> bool:
    """Return whether a file is a cell of the notebook, or one that no library has installed."""
    if cell_name(filename) is not None:
        return True
    if is_ours(filename) or filename.startswith("<"):
        return False
    return not filename.startswith(_LIBRARY_FOLDERS) and not any(part in filename for part in _LIBRARY_PARTS)


@functools.cache
def is_users_file(filename: str) -> bool:
    """Return the same, remembered, for who asks it of each frame again and again."""
    return is_users(filename)


def _number_of_cell(filename: str) -> int | None:
    find_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)  # not there while another thread imports it
    shell = find_shell() if find_shell is not None else None
    return None if shell is None else cell_number(shell, filename)


def cell_name(filename: str) -> str | None:
    """Return ``Cell In[7]`` if the file is a cell of the notebook that runs here, else None."""
    number = _number_of_cell(filename)
    return None if number is None else f"Cell In[{number}]"


def line_in_cell(filename: str, lineno: int) -> str | None:
    """Return ``cell 7 line 12`` if the file is a cell of the notebook that runs here, else None.

    Panels, advice and sentences of errors say it so. Headers of a traceback are IPython's: ``Cell In[7], line 12``.
    """
    number = _number_of_cell(filename)
    return None if number is None else f"cell {number} line {lineno}"


def frame_lines(frame: FrameLine, style: Style = PLAIN, *, context: int = 0) -> Iterator[str]:
    """Yield where a frame is, and its line of code. `context`: lines of a cell that are shown before and after it."""
    cell = cell_name(frame.filename)
    inside = "" if is_module_level(frame.name) else f", in {frame.name}"
    if cell is None:
        yield f"File {style.where}{frame.filename}:{frame.lineno}{style.end}{inside}"
        text = linecache.getline(frame.filename, frame.lineno).strip()
        if text:
            yield f"    {text}"
        return
    yield f"{style.where}{cell}, line {frame.lineno}{style.end}{inside}"
    count = len(linecache.getlines(frame.filename))
    for lineno in range(max(1, frame.lineno - context), min(count, frame.lineno + context) + 1):
        text = linecache.getline(frame.filename, lineno).rstrip("\n")
        if lineno == frame.lineno:
            yield f"{style.error}{'---> ' + str(lineno):>10}{style.end} {text}"
        else:
            yield f"{style.faint}{lineno:>10}{style.end} {text}"


def shorten_tracebacks(own: type[BaseException]) -> None:
    """Have plain Python print uncaught exceptions of a type, and those of `show_instead`, in a few lines.

    All others go to Python's own hook. A hook that somebody else has set stays.
    """
    if sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        lines = lines_instead(error) or (functools.partial(short_lines, error) if isinstance(error, own) else None)
        if lines is None or wants_full() or sys.stderr is None:
            return sys.__excepthook__(kind, error, trace)
        style = ANSI if "NO_COLOR" not in os.environ and sys.stderr.isatty() else PLAIN
        return print("\n".join(lines(style)), file=sys.stderr)  # noqa: T201 - it is what Python would print

    sys.excepthook = hook
