"""Which names a rank has from the notebook, and which are its own. Pure.

A name is *sent* when the notebook's value went to the rank, and *own* when a cell on the rank bound it. What was sent
is sent again when the notebook rebinds the name, or changes plain data in place; an own name is never replaced
unless that is asked for.
"""

from __future__ import annotations

import enum
import pickle
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

GIVEN = frozenset({"rank", "local_rank", "world_size", "device", "accelerator"})
"""Names that every rank has from the start, and that are its own."""

SHELLS = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open", "display"})
"""Names that a rank's shell has as the notebook's has."""

_MOST_ITEMS = 10_000
"""Items of plain data that are compared for changes in place."""


class Verdict(enum.Enum):
    """What to do about a name that a cell reads."""

    SEND = enum.auto()
    HAS_IT = enum.auto()
    OWN = enum.auto()


@dataclass(frozen=True)
class _Sent:
    value: Callable[[], Any]
    content: bytes | None
    uses: frozenset[str]


class NamespaceSync:
    """What one rank has of the notebook's names, and what of its own."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._own: set[str] = set()
        self._told: dict[str, Callable[[], Any]] = {}

    def judge(self, name: str, value: object) -> Verdict:
        """Decide whether the rank needs the notebook's `value` of `name`."""
        if name in SHELLS:
            return Verdict.HAS_IT
        if name in self._own or name in GIVEN:
            return Verdict.OWN
        sent = self._sent.get(name)
        if sent is None or sent.value() is not value:
            return Verdict.SEND
        if sent.content is None or pickle.loads(sent.content) == value:
            return Verdict.HAS_IT
        return Verdict.SEND

    @property
    def own(self) -> frozenset[str]:
        """Names that cells on the rank bound."""
        return frozenset(self._own)

    def uses(self, name: str) -> frozenset[str]:
        """Other names that what was sent as `name` reads."""
        sent = self._sent.get(name)
        return sent.uses if sent is not None else frozenset()

    def is_news(self, name: str, value: object) -> bool:
        """Tell, and remember, whether the user is yet to hear that `value` does not replace the rank's own."""
        told = self._told.get(name)
        if told is not None and told() is value:
            return False
        self._told[name] = _reference(value)
        return True

    def sent(self, values: Mapping[str, object], uses: frozenset[str]) -> None:
        """Take note of values that went to the rank, also if the names were its own."""
        for name, value in values.items():
            self._own.discard(name)
            content = pickle.dumps(value) if is_plain(value) and isinstance(value, (list, dict, set)) else None
            self._sent[name] = _Sent(_reference(value), content, uses)

    def bound(self, names: Iterable[str]) -> None:
        """Take note of names that a cell on the rank bound."""
        for name in names:
            self._own.add(name)
            self._sent.pop(name, None)

    def unbound(self, names: Iterable[str]) -> None:
        """Take note of names that a cell on the rank deleted."""
        for name in names:
            self._own.discard(name)
            self._sent.pop(name, None)


def is_plain(value: object) -> bool:
    """Tell whether a value is small, and made of numbers, text, lists, dicts and the like only."""
    waiting: list[Any] = [value]
    seen = 0
    while waiting:
        one = waiting.pop()
        seen += 1
        if seen > _MOST_ITEMS:
            return False
        if type(one) in (list, tuple, set, frozenset):
            waiting.extend(one)
        elif type(one) is dict:
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif type(one) not in (int, float, complex, bool, str, bytes, type(None)):
            return False
    return True


def _reference(value: object) -> Callable[[], Any]:
    """Make a function that gives the value back, and does not keep it alive where that is possible."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
