"""An exception in a rank as data, without the frames of the worker that ran the code."""

from __future__ import annotations

import traceback
from pathlib import Path

from nb_accelerate.protocol.messages import ErrorReport, Frame

_OUR_FRAMES = str(Path(__file__).parents[1] / "worker")
_MAX_CHAIN = 10


def report_exception(error: BaseException) -> ErrorReport:
    """Everything about `error` that a reader in another process can use."""
    return _report(error, _MAX_CHAIN)


def _report(error: BaseException, depth: int) -> ErrorReport:
    explicit = error.__cause__ is not None
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    frames = [
        Frame(filename=summary.filename, lineno=summary.lineno or 0, name=summary.name)
        for summary in traceback.extract_tb(error.__traceback__)
    ]
    while frames and frames[0].filename.startswith(_OUR_FRAMES):
        del frames[0]
    return ErrorReport(
        type_name=type(error).__qualname__,
        message=_text_of(error),
        frames=tuple(frames),
        notes=tuple(str(note) for note in getattr(error, "__notes__", ())),
        cause=_report(cause, depth - 1) if cause is not None and depth > 1 else None,
        explicit_cause=explicit,
        last_lines=tuple(traceback.format_exception_only(type(error), error)),
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<the text of this exception cannot be made: {type(broken).__name__}>"
