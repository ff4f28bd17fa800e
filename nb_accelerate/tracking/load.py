"""Import the library of a tracker when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from nb_accelerate.errors import MissingDependencyError

if TYPE_CHECKING:
    from types import ModuleType


def load(module: str, tracker: str, *, package: str | None = None, missing_ok: bool = False) -> ModuleType | None:
    """Import the library of a tracker.

    Args:
        module: what to import.
        tracker: the name in ``log_with``, which is that of the extra too.
        package: the name on the package index, if it is another one.
        missing_ok: return None if it is not installed.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".", maxsplit=1)[0]:
            raise  # it is there, and lacks something itself
        if missing_ok:
            return None
        raise MissingDependencyError(package or module, needed_for=f"log_with={tracker!r}", extra=tracker) from error
