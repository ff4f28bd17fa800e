"""An exception in a rank as data, without the frames of the worker that ran the code.

Exceptions are users' code: their text and their notes may raise, or be of any size. Nothing of that hides where an
exception came from: each part that cannot be had is replaced by a note.
"""

from __future__ import annotations

import linecache
import re
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nb_accelerate.notebook.protocol.main_module import main_globals
from nb_accelerate.notebook.protocol.messages import ErrorReport, Frame

if TYPE_CHECKING:
    from collections.abc import Callable

_OUR_FRAMES = str(Path(__file__).parents[1] / "worker")
_MAX_CHAIN = 10
_MAX_GROUP = 10  # exceptions of a group that are told of; the others are counted
_MAX_FRAMES = 500
_MAX_NOTES = 100

# Characters of an exception's text, or of a note, that travel: what nobody reads holds everybody up.
LONGEST_TEXT = 20_000

# Texts of exceptions for a variable of ``__main__`` that is not there, by their type.
_ABSENT = {
    "NameError": re.compile(r"name '(\w+)' is not defined"),
    "KeyError": re.compile(r"'(\w+)'"),
    "AttributeError": re.compile(
        r"(?:Can't get|module '__main__' has no) attribute '(\w+)'(?: on <module '__main__'.*>)?"
    ),
}

_EVALUATED = "<string>"  # the file of what ``eval`` runs
_LOOKS_UP = re.compile(r"globals\(\)|locals\(\)|vars\(|__dict__")  # in a line that reads variables as a dictionary

T = TypeVar("T")


def report_exception(error: BaseException) -> ErrorReport:
    """Return everything about `error` that a reader in another process can use. Raises nothing."""
    return _report(error, _MAX_CHAIN, set())


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, cut if it is very long; a note in its place if that raises."""
    try:
        return readable(str(error))
    except BaseException as broken:  # users' code: it may also exit
        return readable(f"<the text of this exception cannot be made: {type(broken).__qualname__}>")


def has_plain_text(error: BaseException) -> bool:
    """Return whether ``str(error)`` can be had, and shown as it is."""
    try:
        text = str(error)
        return readable(text) == text
    except BaseException:  # users' code: it may also exit
        return False


def readable(text: str) -> str:
    """Return a text that can be sent and shown: at most `LONGEST_TEXT` characters, and without lone surrogates."""
    if len(text) > LONGEST_TEXT:
        kept = LONGEST_TEXT // 2 - 50
        text = f"{text[:kept]}\n... {len(text) - 2 * kept:,} characters are left out here ...\n{text[-kept:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _report(error: BaseException, depth: int, seen: set[int]) -> ErrorReport:
    seen.add(id(error))  # each is told of once: causes may go in circles, and groups share members
    explicit = error.__cause__
    # argparse, say, exits while it handles an error that it has explained.
    suppressed = error.__suppress_context__ or isinstance(error, SystemExit)
    cause = explicit if explicit is not None else None if suppressed else error.__context__
    tells_cause = cause is not None and depth > 1 and id(cause) not in seen
    message = text_of(error)
    found = getattr(error, "exceptions", ())  # of an ExceptionGroup; other classes may have anything by this name
    group = [member for member in found if isinstance(member, BaseException)] if isinstance(found, tuple) else []
    return ErrorReport(
        type_name=type(error).__qualname__,
        message=message,
        frames=_frames(error),
        notes=_notes(error),
        cause=_report(cause, depth - 1, seen) if cause is not None and tells_cause else None,
        explicit_cause=explicit is not None,
        last_lines=_last_lines(error, message),
        group=tuple(
            _report(member, depth - 1, seen) for member in group[:_MAX_GROUP] if depth > 1 and id(member) not in seen
        ),
        group_size=len(group),
        **_absent(error, message),
    )


def _absent(error: BaseException, message: str) -> dict[str, str]:
    """Return the fields of a report that name the variable of ``__main__`` that was looked for in vain, if one was."""
    pattern = _ABSENT.get(type(error).__qualname__)
    found = pattern.fullmatch(message) if pattern is not None else None
    names = main_globals()
    entries = [*traceback.walk_tb(error.__traceback__)]
    code = [frame.f_code for frame, _ in entries if frame.f_globals is names and frame.f_code.co_filename != _EVALUATED]
    if found is None or found[1] in names or not code:
        return {}
    if type(error) is not AttributeError:  # an AttributeError names the module in its text
        frame, lineno = entries[-1]
        line = linecache.getline(frame.f_code.co_filename, lineno or 0)
        if frame.f_globals is not names or not (type(error) is NameError or _LOOKS_UP.search(line)):
            return {}
    return {"absent": found[1], "absent_in": code[-1].co_name}


def _frames(error: BaseException) -> tuple[Frame, ...]:
    frames = [
        Frame(filename=frame.f_code.co_filename, lineno=lineno or 0, name=frame.f_code.co_name)
        for frame, lineno in traceback.walk_tb(error.__traceback__)
    ]
    while frames and frames[0].filename.startswith(_OUR_FRAMES):
        del frames[0]
    if len(frames) > _MAX_FRAMES:  # a recursion: both ends say what it is
        frames = frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]
    return tuple(frames)


def _notes(error: BaseException) -> tuple[str, ...]:
    notes: Any = getattr(error, "__notes__", None)
    if not isinstance(notes, (list, tuple)):
        return ()
    return tuple(readable(_asked(partial(str, note), "<a note that cannot be read>")) for note in notes[:_MAX_NOTES])


def _last_lines(error: BaseException, message: str) -> tuple[str, ...]:
    """Return what follows the frames in a plain traceback."""
    plain = [f"{type(error).__qualname__}: {message}\n" if message else f"{type(error).__qualname__}\n"]
    if message != _asked(lambda: str(error), None):
        return (*plain, *(f"{note}\n" for note in _notes(error)))
    lines = _asked(lambda: traceback.format_exception_only(type(error), error), plain)
    return tuple(readable(line) for line in lines)


def _asked(question: Callable[[], T], otherwise: T) -> T:
    """Return what an exception says about itself, or something else if that raises."""
    try:
        return question()
    except BaseException:  # users' code: it may also exit
        return otherwise
