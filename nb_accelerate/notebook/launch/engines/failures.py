"""What has gone wrong when a command does not reach a host, from what it says, and what to do about it. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from nb_accelerate.base.version import __version__
from nb_accelerate.notebook.remote.streams import ended

if TYPE_CHECKING:
    from collections.abc import Iterable


class Failure(NamedTuple):
    """A way to fail: how to tell it from the stderr of the command, and what users are told.

    Attributes:
        pattern: a regular expression.
        advice: with ``{host}``, ``{python}`` and ``{version}``, of this package here.
    """

    pattern: str
    advice: str


OF_PYTHON = (
    Failure(
        r"No module named '?nb_accelerate",
        "{python} there does not have this package. Install version {version} there as here: in a clone of its "
        "repository, {python} -m pip install .",
    ),
    Failure(
        r"No module named '?(psutil|typing_extensions|cloudpickle|yaml)\b",
        "{python} there does not have all that this package needs. Install it there as here: in a clone of its "
        "repository, {python} -m pip install .",
    ),
    Failure(
        r"(?i)not found|no such file or directory|executable file not found|cannot execute",
        "there is no {python} there. Name one that is: remote_python='/path/to/env/bin/python'",
    ),
)
"""Messages of a shell or of Python on the other machine, for all engines."""

_SHELL_NOT_FOUND = (126, 127)


def explained(command: str, code: int | None, said: str, failures: Iterable[Failure], *, host: str, python: str) -> str:
    """Return in a sentence why a command has ended, and what to do.

    Args:
        command: its name, for where nothing is known.
        code: its exit code, negative for a signal; None if it still runs.
        said: what it has written to its stderr.
        failures: that this command reports; `OF_PYTHON` is searched after them.
    """
    of_python = [
        failure for failure in OF_PYTHON if failure.pattern.startswith("No module") or code in _SHELL_NOT_FOUND
    ]
    for failure in (*failures, *of_python):
        if re.search(failure.pattern, said):
            advice = failure.advice.format(host=host, python=python, version=__version__)
            return f"{advice} ({_last_line(said)})"
    return ended(command, code, said)


def _last_line(said: str) -> str:
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
