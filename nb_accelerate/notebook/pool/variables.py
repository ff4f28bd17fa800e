"""Record the variables of the notebook that each rank was sent, and the variables that its cells have bound. Pure.

A name is *sent* if the rank has the notebook's value of it, and *own* if a cell on the rank has bound it. An own name
is replaced only if the user asks for it. Of the objects in what was sent, by their ids, it is known what they held.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.pool.names import names_in
from nb_accelerate.notebook.protocol.content import ObjectIds, Snapshot, is_constant, structure
from nb_accelerate.notebook.protocol.renewal import is_of_torch
from nb_accelerate.notebook.worker.namespace import is_hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from nb_accelerate.notebook.protocol.content import Structure
    from nb_accelerate.notebook.worker.received import Key

# Names that every rank has from the start; they count as own.
RANK_NAMES = frozenset({"rank", "local_rank", "world_size", "device", "accelerator"})

# Names that IPython defines in the notebook and on a rank alike.
SHELL_NAMES = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open", "display"})


def is_users(name: str) -> bool:
    """Return whether a name of the notebook can be a variable of the user's."""
    return name not in SHELL_NAMES and not is_hidden(name)


@dataclass(frozen=True)
class Sent:
    """A value that was sent, which this does not keep alive."""

    value: Callable[[], Any]  # returns the value, or None if that is gone
    tokens: list[Any] | None  # all that the value held; None for a number or text.
    keys: frozenset[Key]  # of the objects in it
    uses: frozenset[str]  # global names that functions read which were sent with it

    @classmethod
    def of(cls, name: str, value: object, snapshot: Snapshot | None, uses: frozenset[str]) -> Sent:
        if snapshot is None:
            return cls(_reference(value), None, frozenset(), uses)
        return cls(_reference(value), snapshot.tokens, frozenset(snapshot.parts(name)), uses)


_NOT_SENT = Sent(lambda: None, None, frozenset(), frozenset())


_ABSENT = object()  # in the place of the value of a name that the notebook does not have


@dataclass(frozen=True)
class NotebookValue:
    """What the notebook had under a name when a cell on a rank bound or deleted that name.

    As long as the notebook has the same, the rank's is the later one.
    """

    value: Callable[[], Any]  # returns the value; `_ABSENT` if there was none.
    tokens: list[Any] | None = None  # what it held; None where that is not known.

    @classmethod
    def of(cls, name: str, variables: Mapping[str, Any], snapshot: Snapshot | None = None) -> NotebookValue:
        """Describe what the notebook has now."""
        return cls(_reference(variables.get(name, _ABSENT)), snapshot.tokens if snapshot is not None else None)


# Replaces what the notebook had, once it has bound or deleted the name later.
_EARLIER: NotebookValue = NotebookValue(lambda: _EARLIER)


class NamespaceSync:
    """Knows which names one rank was sent, and which its cells have bound."""

    def __init__(self) -> None:
        # Names that cells have bound, or deleted, later than the notebook, with what that had before.
        self.own_names: dict[str, NotebookValue] = {}
        self.absent: set[str] = set()  # those of them that were deleted
        self.deleted: set[str] = set()  # names that the notebook has deleted, and the rank has still
        self.sent_tokens: dict[Key, list[Any]] = {}  # what the objects held that the rank has, when they were sent
        self._sent: dict[str, Sent] = {}
        self._uses: dict[Key, frozenset[str]] = {}
        self._told_values: dict[str, tuple[Callable[[], Any], list[Any] | None]] = {}

    def owns(self, name: str, value: object) -> bool:
        """Return whether the rank has bound or deleted a name later than the notebook, which has this value."""
        if name in self.own_names:
            return self.own_names[name].value() is value
        return name in RANK_NAMES and name not in self._sent

    def has(self, name: str, value: object) -> bool:
        """Return whether the rank has this value under a name, perhaps with an older content."""
        return name in self._sent and self._sent[name].value() is value

    def changed(self, name: str, snapshot: Snapshot, *, is_new: bool) -> set[Key]:
        """Return which of the objects in a value hold something else than when they were sent."""
        sent = self._sent.get(name)
        if sent is not None and snapshot.matches(sent.tokens):
            return set()
        changed_keys = {
            key
            for key, tokens in snapshot.parts(name).items()
            if key in self.sent_tokens and self.sent_tokens[key] != tokens and not (is_new and key == name)
        }
        if sent is not None and not changed_keys and not is_new:  # what has changed was sent with another name
            self._sent[name] = replace(sent, tokens=snapshot.tokens)
        return changed_keys

    def replaced(self, name: str) -> frozenset[Key]:
        """Return the objects in the value that a name had when it was sent."""
        return self._sent.get(name, _NOT_SENT).keys

    def uses(self, name: str) -> frozenset[str]:
        """Return the global names that functions read which were sent together with `name`."""
        return self._sent.get(name, _NOT_SENT).uses

    def uses_of(self, keys: Iterable[Key]) -> frozenset[str]:
        """Return the global names that functions read which were sent with some objects."""
        return frozenset[str]().union(*(self._uses.get(key, ()) for key in keys))

    def containers(self, namespace: Mapping[str, object]) -> dict[int, str]:
        """Return the names of lists and dictionaries that were sent, and that the notebook still has, by address."""
        values = {name: sent.value() for name, sent in self._sent.items() if name in self.sent_tokens}
        return {id(value): name for name, value in values.items() if value is namespace.get(name) and value is not None}

    def watches(self, name: str) -> bool:
        """Return whether changes in place of a value that is not sent are to be announced."""
        return name in self._told_values and self._told_values[name][1] is not None

    def models(self, keys: Container[Key]) -> list[str]:
        """Return the names under which models, or weights by themselves, were sent that are some of these objects."""
        values = [(name, sent.value()) for name, sent in self._sent.items() if any(key in keys for key in sent.keys)]
        return sorted(name for name, value in values if is_of_torch(value, "nn.Module") or is_of_torch(value, "Tensor"))

    def was_told(self, name: str, value: object, snapshot: Snapshot | None) -> bool:
        """Return whether the user was told that a value, with what it holds now, does not replace the rank's own."""
        reference, tokens = self._told_values.get(name, (lambda: None, None))
        return reference() is value and (snapshot is None or tokens is None or snapshot.tokens == tokens)

    def tell(self, name: str, value: object, snapshot: Snapshot | None = None) -> bool:
        """Note that the user is told so now. Returns whether that is news."""
        is_news = name not in self._told_values or not self.was_told(name, value, snapshot)
        self._told_values[name] = _reference(value), None if snapshot is None else snapshot.tokens
        return is_news

    def note_sent(self, values: Mapping[str, Sent], contents: Mapping[Key, list[Any]], uses: frozenset[str]) -> None:
        """Note what the rank was sent, and has received. Its own values of these names are replaced.

        Args:
            contents: tokens of what objects hold on the rank now, by key.
            uses: global names that functions among the objects read.
        """
        for name in values:
            self._forget(name)
        self._sent.update(values)
        for key, tokens in contents.items():
            keys = {key}
            if isinstance(key, str):  # a list may have been sent under several names
                value = self._sent[key].value()
                keys |= {n for n, sent in self._sent.items() if n in self.sent_tokens and sent.value() is value}
            self.sent_tokens.update(dict.fromkeys(keys, tokens))
            self._uses[key] = self._uses.get(key, frozenset()) | uses

    def note_gone(self, object_ids: Iterable[Key]) -> None:
        """Note objects that the rank has no more."""
        for object_id in object_ids:
            self.sent_tokens.pop(object_id, None)
            self._uses.pop(object_id, None)

    def note_bound(self, names: Mapping[str, NotebookValue]) -> None:
        """Note names that a cell on the rank has bound, with what the notebook had before."""
        for name, earlier in names.items():
            self.note_dropped((name,))
            self.own_names[name] = earlier
            if earlier.tokens is not None:
                self._told_values[name] = earlier.value, earlier.tokens

    def note_unbound(self, names: Mapping[str, NotebookValue]) -> None:
        """Note names that a cell on the rank has deleted."""
        self.note_bound({name: replace(earlier, tokens=None) for name, earlier in names.items()})
        self.absent |= names.keys()

    def note_dropped(self, names: Iterable[str]) -> None:
        """Note names that the rank does not have any more, because the notebook has deleted them."""
        for name in names:
            self._forget(name)
            self._sent.pop(name, None)
            self.sent_tokens.pop(name, None)

    def _forget(self, name: str) -> None:
        self.own_names.pop(name, None)
        self.absent.discard(name)
        self.deleted.discard(name)
        self._told_values.pop(name, None)

    def note_rejoined(self) -> None:
        """Note that the rank has joined a group again, which defines names such as ``rank``."""
        for name in RANK_NAMES - {"accelerator"}:
            self._sent.pop(name, None)

    def note_notebook(self, names: Mapping[str, object], bound: Container[str]) -> None:
        """Note what a cell of the notebook has done to names."""
        for name, earlier in self.own_names.items():
            if name in bound or earlier.value() is not names.get(name, _ABSENT):
                self.own_names[name] = _EARLIER
        deleted_own = {name for name in self.own_names.keys() - names.keys() if self.own_names[name] is _EARLIER}
        self.deleted |= ((self._sent.keys() - names.keys()) | (deleted_own - self.absent)) - RANK_NAMES

    def is_there(self, name: str) -> bool:
        """Return whether the rank has a name, sent or bound."""
        return name in self._sent or (name in self.own_names and name not in self.absent)


class RankVariables:
    """Knows which variables each rank has.

    Attributes:
        trained: names of models that cells have trained on the ranks, with what the notebook had under each then.
        announced: names of models that the user knows to be trained there only.
    """

    def __init__(self) -> None:
        self.syncs: dict[int, NamespaceSync] = {}
        self.object_ids = ObjectIds()
        self.trained: dict[str, NotebookValue] = {}
        self.announced: set[str] = set()

    @property
    def own_names(self) -> set[str]:
        """Names that cells have bound on the ranks. Those of the cell that runs are added when it has ended."""
        return {name for sync in self.syncs.values() for name in sync.own_names.keys() - sync.absent}

    def begin(self, ranks: Iterable[int]) -> None:
        """Note that these ranks are new, and have no variables yet."""
        self.syncs.update({rank: NamespaceSync() for rank in ranks})

    def forget(self) -> None:
        """Note that the ranks have no variables any more."""
        self.begin(self.syncs)
        self.trained.clear()

    def note_pulled(
        self, values: Mapping[str, Any], share: Callable[[Mapping[str, Structure]], Sequence[Container[str]]] | None
    ) -> None:
        """Note that variables of the notebook are copies of what the ranks have.

        Args:
            share: has ranks know the objects in their values by the ids of the copies; returns the names whose
                values are alike, by rank. None if the ranks do not all have what was copied, and go on with theirs.
        """
        snapshots = {name: Snapshot(value, self.object_ids) for name, value in values.items()}
        pulled = {name: NotebookValue.of(name, values, snapshot) for name, snapshot in snapshots.items()}
        alike: Sequence[Container[str]] = [()] * len(self.syncs)
        if share is not None:
            alike = share({name: structure(snapshot) for name, snapshot in snapshots.items()})
        for sync, names in zip(self.syncs.values(), alike, strict=True):
            sync.note_bound(pulled)
            for name, snapshot in snapshots.items():
                if name in names:
                    uses = frozenset[str]().union(*map(names_in, snapshot.codes()))
                    parts = {} if is_constant(values[name]) else snapshot.parts(name)
                    sent = Sent.of(name, values[name], snapshot if parts else None, uses)
                    sync.note_sent({name: sent}, parts, uses)
        self.trained |= {name: pulled[name] for name in pulled.keys() & self.trained.keys()}
        self.announced |= values.keys()


def _reference(value: object) -> Callable[[], Any]:
    """Return a function that returns the value, and does not keep it alive if it can have weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
