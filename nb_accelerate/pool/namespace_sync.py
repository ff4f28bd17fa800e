"""Keep track of which names a rank was sent from the notebook, and which its cells have bound. Pure.

A name is *sent* if the rank has the notebook's value of it, and *own* if a cell on the rank has bound it. A sent name
is sent again when the notebook binds it to another value, or changes plain data in place. An own name is replaced only
if the user asks for it.
"""

from __future__ import annotations

import enum
import pickle
import weakref
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

RANK_NAMES = frozenset({"rank", "local_rank", "world_size", "device", "accelerator"})
"""Names that every rank has from the start; they count as own."""

SHELL_NAMES = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open", "display"})
"""Names that IPython defines in the notebook and on a rank alike."""

NO_MODULES: Mapping[str, str] = MappingProxyType({})

_MAX_ITEMS = 10_000
"""Items of a value that is compared for changes in place. A larger one is sent again only when its name is rebound."""


class Verdict(enum.Enum):
    """What to do about a name that a cell reads: send it, or leave it, because the rank has it or has its own."""

    SEND = enum.auto()
    HAS_IT = enum.auto()
    OWN = enum.auto()


@dataclass(frozen=True)
class _Sent:
    value: Callable[[], Any]
    content: bytes | None
    uses: frozenset[str]


class NamespaceSync:
    """Knows which names one rank was sent, and which its cells have bound.

    Args:
        lost: names that cells had bound on it before it was reset, or on the rank in whose place it is.
    """

    def __init__(self, lost: Iterable[str] = ()) -> None:
        self._sent: dict[str, _Sent] = {}
        self._own: set[str] = set()
        self._lost: set[str] = set(lost)
        self._modules: dict[str, str] = {}
        self._told: dict[str, Callable[[], Any]] = {}

    def judge(self, name: str, value: object) -> Verdict:
        """Decide whether to send a name.

        Args:
            name: the name.
            value: its value in the notebook.
        """
        if name in SHELL_NAMES:
            return Verdict.HAS_IT
        if name in self._own or name in RANK_NAMES:
            return Verdict.OWN
        sent = self._sent.get(name)
        if sent is None or sent.value() is not value:
            return Verdict.SEND
        if sent.content is None or pickle.loads(sent.content) == value:
            return Verdict.HAS_IT
        return Verdict.SEND

    @property
    def own(self) -> frozenset[str]:
        """Names that cells on the rank have bound."""
        return frozenset(self._own)

    @property
    def lost(self) -> frozenset[str]:
        """Names that cells had bound on the rank, and that it has neither bound nor been sent since they were lost."""
        return frozenset(self._lost)

    def emptied(self) -> NamespaceSync:
        """Return what is known of the rank when its variables are deleted, or of a new one in its place."""
        return NamespaceSync(self._own | self._lost)

    @property
    def modules(self) -> Mapping[str, str]:
        """Full names of the modules that cells on the rank have imported, by the names that they have there."""
        return self._modules

    def uses(self, name: str) -> frozenset[str]:
        """Return the global names that functions read which were sent together with `name`."""
        sent = self._sent.get(name)
        return sent.uses if sent is not None else frozenset()

    def is_untold(self, name: str, value: object) -> bool:
        """Return whether the user was not told yet that this value does not replace the rank's own, and remember it."""
        told = self._told.get(name)
        if told is not None and told() is value:
            return False
        self._told[name] = _reference(value)
        return True

    def sent(self, values: Mapping[str, object], uses: frozenset[str]) -> None:
        """Note values that were sent to the rank. Its own values of these names are replaced.

        Args:
            values: by name.
            uses: global names that functions among the values read.
        """
        for name, value in values.items():
            self._own.discard(name)
            self._lost.discard(name)
            self._modules.pop(name, None)
            content = pickle.dumps(value) if is_plain(value) and isinstance(value, (list, dict, set)) else None
            self._sent[name] = _Sent(_reference(value), content, uses)

    def bound(self, names: Iterable[str], modules: Mapping[str, str] = NO_MODULES) -> None:
        """Note names that a cell on the rank has bound.

        Args:
            names: all of them.
            modules: full names of the modules among their values, by name.
        """
        for name in names:
            self._modules.pop(name, None)
            self._own.add(name)
            self._lost.discard(name)
            self._sent.pop(name, None)
        self._modules.update(modules)

    def unbound(self, names: Iterable[str]) -> None:
        """Note names that a cell on the rank has deleted."""
        for name in names:
            self._modules.pop(name, None)
            self._own.discard(name)
            self._sent.pop(name, None)


def is_plain(value: object) -> bool:
    """Return whether a value consists of numbers, text and built-in containers only, at most `_MAX_ITEMS` of them."""
    waiting: list[Any] = [value]
    seen = 0
    while waiting:
        one = waiting.pop()
        seen += 1
        if seen > _MAX_ITEMS:
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
    """Return a function that returns the value, and does not keep it alive if it can have weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
