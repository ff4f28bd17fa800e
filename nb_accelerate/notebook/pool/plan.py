"""Plan a cell: what each rank is sent of the notebook's variables before it runs, and what the user is told. Pure.

::

    names that the cell reads --> each rank lacks it, has it, or has its own --> objects that have changed --> CellPlan
          ^                                                                                                      |
          +--- names that functions among the values read, names of lists that the values hold <-----------------+

What the ranks themselves have changed is not known here: `CellPlan.settle` is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.pool.names import names_in
from nb_accelerate.notebook.pool.variables import RANK_NAMES, is_users
from nb_accelerate.notebook.protocol.content import ATOMS, Snapshot, is_constant
from nb_accelerate.notebook.protocol.renewal import state_of
from nb_accelerate.notebook.worker.received import Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet

    from nb_accelerate.notebook.pool.variables import NamespaceSync
    from nb_accelerate.notebook.protocol.content import Numbers


@dataclass
class Delivery:
    """What ranks get that lack the same.

    Attributes:
        objects: objects that the ranks have and that are to hold something else.
    """

    ranks: list[int]
    names: set[str]
    objects: dict[Key, Any]


@dataclass(kw_only=True)
class CellPlan:
    """Which variables of the notebook each rank is sent for a cell.

    Attributes:
        syncs: what each rank that runs the cell has, by rank.
        send: names whose values are sent, by rank.
        changed: objects that the rank has and that the notebook has changed in place, by name, by rank.
        own: names that are not sent because cells on the ranks have bound them, with the notebook's values.
        conflicts: names that are not sent because both the notebook and the ranks have changed the value.
        replacing: names that the notebook has bound again, which replaces something that ranks have changed.
        unread: names of values that the ranks have and of which a part could not be compared.
    """

    variables: Mapping[str, Any]
    syncs: Mapping[int, NamespaceSync]
    numbers: Numbers
    forced: frozenset[str]
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    send: dict[int, set[str]]
    changed: dict[int, dict[str, set[Key]]]
    own: dict[str, Any] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)
    replacing: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    _judged: dict[int, set[str]]

    def add(self, names: Iterable[str], *, are_read: bool = True) -> None:
        """Plan for more names, and for those that functions among their values read.

        Args:
            are_read: False for lists that are only held by what is sent. If the ranks have their own, nobody is told.
        """
        for rank, judged in self._judged.items():
            waiting = [*names]
            while waiting:
                name = waiting.pop()
                if name not in judged and name in self.variables and is_users(name):
                    judged.add(name)
                    waiting += self._judge(name, rank, are_read=are_read)
        # A list has no number. It stays one object on the ranks by its name.
        held = set[int]()
        for name in set[str]().union(*self.send.values(), *self.changed.values()) & self.snapshots.keys():
            held |= self.snapshots[name].held
        lists = self.without_plan(name for name, value in self.variables.items() if id(value) in held) if held else ()
        if lists:
            self.add(lists, are_read=False)

    def without_plan(self, names: Iterable[str]) -> set[str]:
        """Return those variables among names for which nothing is planned yet on some rank."""
        planned = set.intersection(*self._judged.values())
        return {name for name in names if name not in planned and name in self.variables and is_users(name)}

    def _judge(self, name: str, rank: int, *, are_read: bool) -> Iterable[str]:
        """Decide about a name on a rank. Returns the names that functions in its value read."""
        value, sync, is_forced = self.variables[name], self.syncs[rank], name in self.forced
        if sync.owns(name) and not is_forced:
            if are_read:
                self.own[name] = value
                if self.numbers.get(value) in sync.known or sync.watches(name):
                    self._snapshot(name)
            return ()
        is_new = is_forced or not sync.has(name, value)
        if is_new:
            self.send[rank].add(name)
        if is_constant(value):
            return sync.uses(name)
        snapshot = self._snapshot(name)
        if is_forced:
            # In place if the rank has it: then whatever refers to it there has the new content too.
            if name in sync.known and state_of(value) is not None and sync.has(name, value):
                self.send[rank].discard(name)
                self.changed[rank][name] = snapshot.parts(name).keys() & sync.known.keys()
            else:
                self.changed[rank][name] = snapshot.parts(name).keys() & sync.known.keys() - {name}
        elif is_new or not sync.was_told(name, value, snapshot):
            changed = sync.changed(name, snapshot, is_new=is_new)
            if name in changed and state_of(value) is None:
                self.send[rank].add(name)
                changed.discard(name)
            if changed:
                self.changed[rank][name] = changed
            elif snapshot.is_partial and not is_new:
                self.unread.add(name)
        return sync.uses(name).union(*map(names_in, snapshot.codes())) if is_new else sync.uses(name)

    def _snapshot(self, name: str) -> Snapshot:
        if name not in self.snapshots:
            self.snapshots[name] = Snapshot(self.variables[name], self.numbers)
        return self.snapshots[name]

    def in_doubt(self) -> dict[int, set[Key]]:
        """Return the objects that a rank may have changed itself and would lose, by rank; only ranks that have some."""
        found = {}
        for rank, sync in self.syncs.items():
            changed = [keys for name, keys in self.changed[rank].items() if name not in self.forced]
            replaced = [sync.replaced(name) for name in self.send[rank] - self.forced]
            found[rank] = set[Key]().union(*changed, *replaced) & sync.known.keys()
        return {rank: keys for rank, keys in found.items() if keys}

    def settle(self, touched: AbstractSet[Key]) -> None:
        """Take objects that ranks have changed in place themselves out of the plan.

        Args:
            touched: those of the objects `in_doubt` that ranks have changed.
        """
        blocked: set[Key] = set()
        for changed in self.changed.values():
            for name, keys in changed.items():
                if name not in self.forced and not keys.isdisjoint(touched):
                    self.conflicts.add(name)
                    blocked |= keys
        for rank, sync in self.syncs.items():
            self.changed[rank] = {name: keys - blocked for name, keys in self.changed[rank].items()}
            names = self.send[rank] - self.forced
            self.replacing |= {name for name in names if not sync.replaced(name).isdisjoint(touched)}

    def deliveries(self) -> list[Delivery]:
        """Return what is to be sent, once for ranks that get the same."""
        found: dict[Any, Delivery] = {}
        for rank, sync in self.syncs.items():
            objects = {key: self.object_of(name, key) for name, keys in self.changed[rank].items() for key in keys}
            if self.send[rank] or objects:
                same = frozenset(self.send[rank]), frozenset(objects), frozenset(sync.known)
                found.setdefault(same, Delivery([], self.send[rank], objects)).ranks.append(rank)
        return [*found.values()]

    def object_of(self, name: str, key: Key) -> Any:
        """Return an object in the value of a name."""
        return self.snapshots[name].objects[key if isinstance(key, int) else None]

    def remarks(self, device: str) -> list[str]:
        """Return what the user is told, once for a value: which changes are not sent, or replace what ranks have."""
        said = []
        own = [
            name
            for name, value in sorted(self.own.items())
            if not (is_constant(value) and type(value) not in ATOMS)  # an import, of which they have the same
            and not (name == "device" and str(value).partition(":")[0] == device)
            and self._tell(name)
        ]
        if own:
            listed = ", ".join(own)
            theirs = f"the ranks have their own {listed}; what the notebook calls {listed} was not sent to them"
            sendable = [name for name in own if name not in RANK_NAMES]  # ranks without their numbers are of no use
            said.append(theirs + (f". To send it: %distributed push {' '.join(sendable)}" if sendable else ""))
        conflicts = sorted(self.conflicts)
        if conflicts:
            for name in conflicts:
                self._tell(name)
            said.append(
                f"{_were(conflicts)} changed both in the notebook and on the ranks, which go on with theirs. To send "
                f"the notebook's: %distributed push {' '.join(conflicts)}"
            )
        if self.replacing:
            names = ", ".join(sorted(self.replacing))
            said.append(f"the notebook's new {names} replaces what the ranks had under that name and have changed")
        unread = [name for name in sorted(self.unread) if self._tell(name, about=" unread")]
        if unread:
            said.append(
                f"{_were(unread)} not looked at for changes, because a part is too large or cannot be read. After a "
                f"change in place: %distributed push {' '.join(unread)}"
            )
        return said

    def _tell(self, name: str, *, about: str = "") -> bool:
        """Note, for each rank, that the user is told of a value. Returns whether that is news."""
        subject, value = name + about, self.variables[name]
        snapshot = None if about else self.snapshots.get(name)
        news = [sync.tell(subject, value, snapshot) for sync in self.syncs.values()]  # each of them notes it
        return any(news)


def plan_cell(
    names: Iterable[str],
    variables: Mapping[str, Any],
    syncs: Mapping[int, NamespaceSync],
    numbers: Numbers,
    forced: Sequence[str] = (),
) -> CellPlan:
    """Plan what ranks are sent for a cell.

    Args:
        variables: those of the notebook.
        syncs: what each rank that runs the cell has, by rank.
        forced: names to send whatever the ranks have.

    Raises:
        NameError: one of `forced` is not defined in the notebook.
    """
    for name in forced:
        if name not in variables:
            raise NameError(f"name {name!r} is not defined in the notebook, so it cannot be sent to the ranks")
    plan = CellPlan(
        variables=variables,
        syncs=syncs,
        numbers=numbers,
        forced=frozenset(forced),
        send={rank: set() for rank in syncs},
        changed={rank: {} for rank in syncs},
        _judged={rank: set() for rank in syncs},
    )
    plan.add({*names, *forced})
    return plan


def _were(names: list[str]) -> str:
    return f"{', '.join(names)} {'was' if len(names) == 1 else 'were'}"
