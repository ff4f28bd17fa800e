"""What only tells about a run never stops it."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

Report = TypeVar("Report", bound="Callable[..., None]")

logger = logging.getLogger("nb_accelerate")


def only_reports(what: str) -> Callable[[Report], Report]:
    """Decorate a method that reports about training, which goes on when the report fails.

    The first error is logged, with ``what`` is missing then. After it, the method does nothing for that object.
    """

    def decorate(method: Report) -> Report:
        failed: WeakSet[Any] = WeakSet()

        @functools.wraps(method)
        def report(self: object, *args: Any, **kwargs: Any) -> None:
            if failed and self in failed:
                return
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                failed.add(self)
                logger.warning("Training goes on without %s, which failed (%s: %s)", what, type(error).__name__, error)

        return cast("Report", report)

    return decorate
