"""Find the user's line that has led to here."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors.traceback_lines import is_ours, is_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from nb_accelerate.training.rehearsal.trace import Line

_ROOM = str(Path(__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_SAVERS = (
    "torch",
    "numpy",
    "pandas",
    "safetensors",
    "transformers",
    "diffusers",
    "peft",
    "matplotlib",
    "PIL",
    "joblib",
)
"""Libraries that write what users tell them to, and where."""


@functools.cache
def is_users_file(filename: str) -> bool:
    """Return whether a file is the user's, as `is_users` does."""
    return is_users(filename)


def frames() -> Iterator[FrameType]:
    """Yield the frames that have led to here, innermost first, without those of this room."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - as `warnings` does
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_ROOM):
            yield frame
        frame = frame.f_back


def user_line() -> Line:
    """Return the innermost line of the user's that has led to here."""
    return user_call()[0]


def user_call() -> tuple[Line, str]:
    """Return the innermost line of the user's that has led to here, and what of this package it has called."""
    called = ""
    for frame in frames():
        filename = frame.f_code.co_filename
        if is_users_file(filename):
            return (filename, frame.f_lineno), _WORDS.get(called, called)
        if is_ours(filename):
            called = frame.f_code.co_name
    return ("", 0), ""


_WORDS = {"__iter__": "loop over a loader"}


def is_told_by_user() -> bool:
    """Return whether a user's line has told this, perhaps through Python's own modules and libraries that save."""
    for frame in frames():
        if is_users_file(frame.f_code.co_filename):
            return True
        if not _passes_on(frame.f_code.co_filename):
            return False
    return False


@functools.cache
def _passes_on(filename: str) -> bool:
    parts = Path(filename).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] in _SAVERS
    return filename.startswith((_STDLIB, "<frozen"))
