"""Keep track of which names a rank was sent from the notebook, and which its cells have bound. Pure.

A name is *sent* if the rank has the notebook's value of it, and *own* if a cell on the rank has bound it. An own name
is replaced only if the user asks for it. Of the objects in what was sent, by their numbers, it is known what they held.
"""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from nb_accelerate.notebook.protocol.content import Snapshot
    from nb_accelerate.notebook.worker.received import Key

RANK_NUMBERS = frozenset({"rank", "local_rank", "world_size"})

RANK_NAMES = RANK_NUMBERS | {"device", "accelerator"}
"""Names that every rank has from the start; they count as own."""

SHELL_NAMES = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open", "display"})
"""Names that IPython defines in the notebook and on a rank alike."""

NO_MODULES: Mapping[str, str] = MappingProxyType({})


class Verdict(enum.Enum):
    """What to do about a name that a cell reads: send it, or leave it, because the rank has it or has its own."""

    SEND = enum.auto()
    HAS_IT = enum.auto()
    OWN = enum.auto()


@dataclass
class _Sent:
    """A name that was sent.

    Attributes:
        value: returns the value, or None if that is gone.
        tokens: all that the value held; None for a number or text.
        keys: of the objects in it.
        uses: global names that functions read which were sent with it.
    """

    value: Callable[[], Any]
    tokens: list[Any] | None
    keys: frozenset[Key]
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
        self.known: dict[Key, list[Any] | None] = {}
        """What the objects held that the rank has, when they were sent; None if that is not certain."""
        self._uses: dict[Key, frozenset[str]] = {}
        self._settled: dict[str, list[Any]] = {}
        self._seen: set[str] = set()

    def judge(self, name: str, value: object) -> Verdict:
        """Decide whether to send a name."""
        if name in SHELL_NAMES:
            return Verdict.HAS_IT
        self._seen.add(name)
        if name in self._own or name in RANK_NAMES:
            return Verdict.OWN
        sent = self._sent.get(name)
        return Verdict.SEND if sent is None or sent.value() is not value else Verdict.HAS_IT

    def changed(self, name: str, snapshot: Snapshot, *, is_new: bool) -> set[Key]:
        """Return which of the objects in a value hold something else than when they were sent.

        Args:
            snapshot: of the value, as it is now.
        """
        sent = self._sent.get(name)
        if sent is not None and snapshot.is_as(sent.tokens):
            return set()
        found = {
            key
            for key, tokens in snapshot.parts(name).items()
            if key in self.known and self.known[key] != tokens and not (is_new and key == name)
        }
        if sent is not None and not found and not is_new:  # they were sent with another name
            sent.tokens = snapshot.tokens
        return found

    def replaced(self, name: str) -> frozenset[Key]:
        """Return the objects in the value that a name had when it was sent."""
        sent = self._sent.get(name)
        return sent.keys if sent is not None else frozenset()

    def has(self, name: str) -> bool:
        """Return whether the rank was sent this name when the notebook had it, and still has it."""
        return name in self._sent and name in self._seen

    def settle(self, name: str, snapshot: Snapshot) -> None:
        """Note that the user knows that what a value holds now is not sent."""
        self._settled[name] = snapshot.tokens

    def is_settled(self, name: str, snapshot: Snapshot | None = None) -> bool:
        """Return whether the user knows that what a value holds, now or at an earlier snapshot, is not sent."""
        return name in self._settled and (snapshot is None or self._settled[name] == snapshot.tokens)

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

    def uses_of(self, keys: Iterable[Key]) -> frozenset[str]:
        """Return the global names that functions read which were sent with some objects."""
        return frozenset[str]().union(*(self._uses.get(key, ()) for key in keys))

    def containers(self, namespace: Mapping[str, object]) -> dict[int, str]:
        """Return the names of lists and dictionaries that were sent, and that the notebook still has, by address."""
        named = {name: sent.value() for name, sent in self._sent.items() if name in self.known}
        return {id(value): name for name, value in named.items() if value is namespace.get(name) and value is not None}

    def is_untold(self, name: str, value: object) -> bool:
        """Return whether the user was not told yet that this value does not replace the rank's own, and remember it."""
        told = self._told.get(name)
        if told is not None and told() is value:
            return False
        self._told[name] = _reference(value)
        return True

    def sent(self, values: Mapping[str, object], snapshots: Mapping[str, Snapshot], uses: frozenset[str]) -> None:
        """Note values that were sent to the rank. Its own values of these names are replaced.

        Args:
            values: by name.
            snapshots: of those that are no numbers and texts.
            uses: global names that functions among the values read.
        """
        for name, value in values.items():
            self._own.discard(name)
            self._lost.discard(name)
            self._modules.pop(name, None)
            self._told.pop(f"{name} deleted", None)
            snapshot = snapshots.get(name)
            tokens, keys = (
                (None, frozenset()) if snapshot is None else (snapshot.tokens, frozenset(snapshot.parts(name)))
            )
            self._sent[name] = _Sent(_reference(value), tokens, keys, uses)

    def holds(self, contents: Mapping[Key, list[Any]], uses: frozenset[str]) -> None:
        """Note what objects hold that the rank has now.

        Args:
            contents: their tokens, by key.
            uses: global names that functions among them read.
        """
        for key, tokens in contents.items():
            sent = self._sent[key] if isinstance(key, str) else None
            others = {name for name in self._sent.keys() & self.known.keys() if sent and self._has_same(name, sent)}
            self.known.update(dict.fromkeys({key, *others}, tokens))
            self._uses[key] = self._uses.get(key, frozenset()) | uses

    def _has_same(self, name: str, sent: _Sent) -> bool:
        return self._sent[name].value() is sent.value() is not None

    def gone(self, numbers: Iterable[Key]) -> None:
        """Note objects that the rank has no more."""
        for number in numbers:
            self.known.pop(number, None)
            self._uses.pop(number, None)

    def doubt(self, keys: Collection[Key]) -> None:
        """Note that it is not certain whether objects hold on the rank what was sent."""
        self.known.update(dict.fromkeys(self.known.keys() & set(keys)))
        for sent in self._sent.values():
            if not sent.keys.isdisjoint(keys):
                sent.tokens = []

    def bound(self, names: Iterable[str], modules: Mapping[str, str] = NO_MODULES) -> None:
        """Note names that a cell on the rank has bound.

        Args:
            modules: full names of the modules among their values, by name.
        """
        for name in names:
            self._modules.pop(name, None)
            self._own.add(name)
            self._lost.discard(name)
            self._forget(name)
        self._modules.update(modules)

    def unbound(self, names: Iterable[str]) -> None:
        """Note names that a cell on the rank has deleted."""
        for name in names:
            self._modules.pop(name, None)
            self._own.discard(name)
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._sent.pop(name, None)
        self.known.pop(name, None)


def _reference(value: object) -> Callable[[], Any]:
    """Return a function that returns the value, and does not keep it alive if it can have weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
