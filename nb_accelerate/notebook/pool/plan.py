"""Plan a cell: what each rank is sent of the notebook's variables before it runs, and what the user is told. Pure.

::

    names that the cell reads --> each rank lacks it, has it, or has its own --> objects that have changed --> CellPlan
          ^                                                                                                      |
          +--- names that functions among the values read, names of lists that the values hold <-----------------+

What the ranks themselves have changed is not known here: `CellPlan.settle` is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.pool.names import names_in
from nb_accelerate.notebook.pool.variables import RANK_NAMES, NotebookValue, is_users
from nb_accelerate.notebook.protocol.content import Edit, Snapshot, is_constant
from nb_accelerate.notebook.protocol.renewal import is_of_torch, state_of
from nb_accelerate.notebook.worker.received import Key

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence, Set as AbstractSet

    from nb_accelerate.notebook.pool.variables import NamespaceSync
    from nb_accelerate.notebook.protocol.content import ObjectIds


@dataclass
class Delivery:
    """What ranks get that lack the same."""

    ranks: list[int]
    names: set[str]
    objects: dict[Key, Any]  # objects that the ranks have and that are to hold something else
    edits: dict[Key, Edit]  # attributes of objects that are to be other ones
    deleted: set[str]  # names that are to go


@dataclass(kw_only=True)
class CellPlan:
    """Which variables of the notebook each rank is sent for a cell."""

    variables: Mapping[str, Any]
    syncs: Mapping[int, NamespaceSync]  # what each rank that runs the cell has, by rank
    object_ids: ObjectIds
    forced: frozenset[str]
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    send: dict[int, set[str]]  # names whose values are sent, by rank
    # Objects that the rank has and that the notebook has changed in place, by name, by rank.
    changed: dict[int, dict[str, set[Key]]]
    # Attributes that the notebook has changed of objects whose other parts the rank has changed, by rank.
    edits: dict[int, dict[Key, Edit]]
    deleted: dict[int, set[str]]  # names that the notebook has deleted, by rank
    trained: Container[str]  # names of models that cells on the ranks have trained
    # Names that are not sent because cells on the ranks have bound them later, with the notebook's values.
    own_values: dict[str, Any] = field(default_factory=dict)
    # Names that are not sent because both the notebook and the ranks have changed the value.
    conflicts: set[str] = field(default_factory=set)
    # Names that the notebook has bound again, which replaces something that ranks have changed.
    replacing: set[str] = field(default_factory=set)
    # Names that the notebook has deleted, whose values the ranks have trained.
    undeleted: set[str] = field(default_factory=set)
    # Objects that are not sent, though the user asks for it, because the ranks have trained them; by name.
    kept_trained: dict[str, set[Key]] = field(default_factory=dict)
    # Names of values that the ranks have, where a part could not be compared.
    uncompared: set[str] = field(default_factory=set)
    _planned: dict[int, set[str]]

    def add(self, names: Iterable[str], *, are_read: bool = True) -> None:
        """Plan for more names, and for names that functions among their values read.

        Args:
            are_read: False for lists that are only held by what is sent. If the ranks have their own, nobody is told.
        """
        for rank, planned in self._planned.items():
            waiting = [*names]
            while waiting:
                name = waiting.pop()
                if name not in planned and name in self.variables and is_users(name):
                    planned.add(name)
                    waiting += self._plan_name(name, rank, are_read=are_read)
        # A list, or a variable that two closures share, has no id: it stays one object on the ranks by its name. So the
        # names of those that the sent values hold are planned too.
        held_ids = set[int]()
        for name in set[str]().union(*self.send.values(), *self.changed.values()) & self.snapshots.keys():
            held_ids |= self.snapshots[name].visited
        if held_ids:
            held_names = self.without_plan(n for n, value in self.variables.items() if _is_held(value, held_ids))
            if held_names:
                self.add(held_names, are_read=False)

    def without_plan(self, names: Iterable[str]) -> set[str]:
        """Return those variables among names for which nothing is planned yet on some rank."""
        planned = set.intersection(*self._planned.values())
        return {name for name in names if name not in planned and name in self.variables and is_users(name)}

    def _plan_name(self, name: str, rank: int, *, are_read: bool) -> Iterable[str]:
        """Decide about a name on a rank. Returns the names that functions in its value read."""
        value, sync = self.variables[name], self.syncs[rank]
        is_forced = name in self.forced
        if sync.owns(name, value) and not is_forced:
            # A constant cannot have changed, so the notebook's is just the earlier one, and nobody is told.
            if are_read and (not is_constant(value) or name in RANK_NAMES or name in sync.absent):
                self.own_values[name] = value
                if self.object_ids.get(value) in sync.sent_tokens or sync.watches(name):
                    self._snapshot(name)
            return ()
        is_new = is_forced or not sync.has(name, value)
        if is_new:
            self.send[rank].add(name)
        if is_constant(value):
            return sync.uses(name)
        snapshot = self._snapshot(name)
        if is_forced:
            # A value that the rank has is changed in place, so that all that refers to it there sees the change.
            if name in sync.sent_tokens and state_of(value) is not None and sync.has(name, value):
                self.send[rank].discard(name)
                self.changed[rank][name] = snapshot.parts(name).keys() & sync.sent_tokens.keys()
            else:
                self.changed[rank][name] = snapshot.parts(name).keys() & sync.sent_tokens.keys() - {name}
        elif is_new or not sync.was_told(name, value, snapshot):
            changed = sync.changed(name, snapshot, is_new=is_new)
            if name in changed and state_of(value) is None:
                self.send[rank].add(name)
                changed.discard(name)
            if changed:
                self.changed[rank][name] = changed
            elif snapshot.is_partial and not is_new:
                self.uncompared.add(name)
        return sync.uses(name).union(*map(names_in, snapshot.codes())) if is_new else sync.uses(name)

    def _snapshot(self, name: str) -> Snapshot:
        if name not in self.snapshots:
            self.snapshots[name] = Snapshot(self.variables[name], self.object_ids)
        return self.snapshots[name]

    def in_doubt(self) -> dict[int, set[Key]]:
        """Return the objects that a rank may have changed itself and would lose, by rank; only ranks that have some."""
        doubtful = {}
        for rank, sync in self.syncs.items():
            replaced = map(sync.replaced, (self.send[rank] - self.forced) | self.deleted[rank])
            doubtful[rank] = set[Key]().union(*self.changed[rank].values(), *replaced) & sync.sent_tokens.keys()
        return {rank: keys for rank, keys in doubtful.items() if keys}

    def settle(self, touched: AbstractSet[Key]) -> None:
        """Take objects that ranks have changed in place themselves out of the plan."""
        self._keep_what_is_trained(touched)
        blocked: set[Key] = set()
        for rank, changed in self.changed.items():
            sent_tokens = self.syncs[rank].sent_tokens
            for name, keys in changed.items():
                if name in self.forced or keys.isdisjoint(touched):
                    continue
                parts = self.snapshots[name].parts(name)
                edits = {key: Edit.between(sent_tokens[key], parts[key]) for key in keys & touched}
                self.edits[rank] |= {key: edit for key, edit in edits.items() if edit}
                if all(edit.apply(sent_tokens[key]) == parts[key] for key, edit in edits.items()):
                    blocked |= edits.keys()  # the edits are all that there is to send
                else:
                    self.conflicts.add(name)
                    blocked |= keys
        for rank, sync in self.syncs.items():
            self.changed[rank] = {name: keys - blocked for name, keys in self.changed[rank].items()}
            names = self.send[rank] - self.forced
            self.replacing |= {name for name in names if self._is_trained(name, sync, touched)}
            trained = {name for name in self.deleted[rank] if self._is_trained(name, sync, touched)}
            self.deleted[rank] -= trained
            self.undeleted |= trained

    def _is_trained(self, name: str, sync: NamespaceSync, touched: AbstractSet[Key]) -> bool:
        return (name in sync.own_names and name in self.trained) or not sync.replaced(name).isdisjoint(touched)

    def _keep_what_is_trained(self, touched: AbstractSet[Key]) -> None:
        """Take what the ranks have trained out of what the user asks for, but for models that are named."""
        named_keys = set[Key]()
        for name in self.forced & self.snapshots.keys():
            if is_of_torch(self.variables[name], "nn.Module") or is_of_torch(self.variables[name], "Tensor"):
                named_keys |= self.snapshots[name].parts(name).keys()
        for name in self.forced & self.snapshots.keys():
            snapshot = self.snapshots[name]
            kept_keys = set[Key]()
            for holder, weights in _weights(snapshot).items():
                if weights.isdisjoint(named_keys):
                    kept_keys |= weights & touched
                    tokens = snapshot.parts(name)[holder]
                    for rank, changed in self.changed.items():
                        if holder in touched and holder in changed[name]:
                            self.edits[rank][holder] = Edit.between([], tokens)
            for changed in self.changed.values():
                changed[name] = changed.get(name, set()) - kept_keys
            if kept_keys:
                self.kept_trained[name] = kept_keys
            is_lost = not named_keys.isdisjoint(touched & snapshot.parts(name).keys()) or name in self.trained
            if is_lost and not kept_keys:
                self.replacing.add(name)

    def deliveries(self) -> list[Delivery]:
        """Return what is to be sent, once for ranks that get the same."""
        by_content: dict[Any, Delivery] = {}
        for rank, sync in self.syncs.items():
            objects = {
                key: self.snapshots[name].objects[key if isinstance(key, int) else None]
                for name, keys in self.changed[rank].items()
                for key in keys
            }
            names, edits, deleted = self.send[rank], self.edits[rank], self.deleted[rank]
            if names or objects or edits or deleted:
                edited = frozenset((key, *edit.changed.items(), *edit.gone) for key, edit in edits.items())
                content = frozenset(names), frozenset(objects), frozenset(sync.sent_tokens), edited, frozenset(deleted)
                by_content.setdefault(content, Delivery([], names, objects, edits, deleted)).ranks.append(rank)
        return [*by_content.values()]

    def notebook_values(self, names: Iterable[str]) -> dict[str, NotebookValue]:
        """Return what the notebook has under names before the cell, which may bind them."""
        for name in names:
            if name in self.variables and not is_constant(self.variables[name]):
                self._snapshot(name)
        return {name: NotebookValue.of(name, self.variables, self.snapshots.get(name)) for name in names}

    def remarks(self, device: str) -> list[str]:
        """Return what the user is told, once for a value: which changes are not sent, or replace what ranks have."""
        remarks = []
        is_same_device = str(self.own_values.get("device")).startswith(device)
        differing = sorted(self.own_values.keys() - ({"device"} if is_same_device else ()))
        own_names = [name for name in differing if self._note_told(name)]
        for name in [name for name in own_names if name in RANK_NAMES]:
            own_names.remove(name)
            rename = f". Give it another name: notebook_{name} = {name}" if name != "accelerator" else ""
            remarks.append(f"{name} is the ranks' own on each rank; the notebook's {name} was not sent{rename}")
        absent = [name for name in own_names if any(name in sync.absent for sync in self.syncs.values())]
        bound = [name for name in own_names if name not in absent]
        for unsent, verb in ((bound, "have their own"), (absent, "have deleted")):
            if unsent:
                listed = ", ".join(unsent)
                remarks.append(
                    f"the ranks {verb} {listed}; what the notebook calls {listed} was not sent to them. To send it: "
                    f"%distributed push {' '.join(unsent)}"
                )
        conflicts = sorted(self.conflicts)
        if conflicts:
            for name in conflicts:
                self._note_told(name)
            weights = [keys for name in conflicts for keys in _weights(self.snapshots[name]).values()]
            pushed = " ".join(sorted({*conflicts, *self._models(set[Key]().union(*weights))}))
            remarks.append(
                f"{_were(conflicts)} changed both in the notebook and on the ranks, which go on with theirs. To send "
                f"the notebook's, and lose theirs: %distributed push {pushed}"
            )
        if self.replacing:
            names = ", ".join(sorted(self.replacing))
            remarks.append(
                f"the notebook's {names} takes the place of what the ranks had under that name and have changed"
            )
        for name, keys in sorted(self.kept_trained.items()):
            models = self._models(keys) - {name}
            pushed = f"%distributed push {' '.join((name, *sorted(models)))}"
            advice = f". To send the notebook's, and lose what they have trained: {pushed}" if models else ""
            remarks.append(f"{name}: what the ranks have trained stays theirs, and all else was sent{advice}")
        for name in sorted(self.undeleted):
            for sync in self.syncs.values():
                sync.note_bound({name: NotebookValue.of(name, {})})
            remarks.append(
                f"the ranks keep {name}, which they have trained and the notebook has deleted. To delete it: "
                f"del {name}, in a %%distributed cell"
            )
        unread = [name for name in sorted(self.uncompared) if self._note_told(name, about=" unread")]
        if unread:
            remarks.append(
                f"{_were(unread)} not looked at for changes, because a part is too large or cannot be read. After a "
                f"change in place: %distributed push {' '.join(unread)}"
            )
        return remarks

    def _models(self, keys: AbstractSet[Key]) -> set[str]:
        return {name for sync in self.syncs.values() for name in sync.models(keys)}

    def _note_told(self, name: str, *, about: str = "") -> bool:
        """Note, for each rank, that the user is told of a value. Returns whether that is news."""
        subject, value = name + about, self.variables[name]
        snapshot = None if about else self.snapshots.get(name)
        news = [sync.tell(subject, value, snapshot) for sync in self.syncs.values()]  # each of them notes it
        return any(news)


def plan_cell(
    names: Iterable[str],
    variables: Mapping[str, Any],
    syncs: Mapping[int, NamespaceSync],
    object_ids: ObjectIds,
    forced: Sequence[str] = (),
    trained: Container[str] = (),
) -> CellPlan:
    """Plan what ranks are sent for a cell. Raises NameError if one of the names `forced` is not defined here."""
    for name in forced:
        if name not in variables:
            raise NameError(f"name {name!r} is not defined in the notebook, so it cannot be sent to the ranks")
    plan = CellPlan(
        variables=variables,
        syncs=syncs,
        object_ids=object_ids,
        forced=frozenset(forced),
        send={rank: set() for rank in syncs},
        changed={rank: {} for rank in syncs},
        edits={rank: {} for rank in syncs},
        # A push deletes nothing, because it need not be from the notebook.
        deleted={rank: set() if forced else sync.deleted - variables.keys() for rank, sync in syncs.items()},
        trained=trained,
        _planned={rank: set() for rank in syncs},
    )
    plan.add({*names, *forced})
    return plan


def _is_held(value: object, held: AbstractSet[int]) -> bool:
    return id(value) in held or (type(value) is FunctionType and not held.isdisjoint(map(id, value.__closure__ or ())))


def _weights(snapshot: Snapshot) -> dict[Key, set[Key]]:
    """Return what training changes in each module and optimizer, by its id."""
    weights: dict[Key, set[Key]] = {}
    for object_id, value in snapshot.objects.items():
        parts: list[Any] = []
        if is_of_torch(value, "nn.Module"):
            parts = [*vars(value)["_parameters"].values(), *vars(value)["_buffers"].values()]
        elif is_of_torch(value, "optim.Optimizer"):
            states = [part for state in value.state.values() for part in state.values()]
            parts = [value, *states, *(part for group in value.param_groups for part in group["params"])]
        if parts and object_id is not None:
            weights[object_id] = {object_id for object_id in map(snapshot.ids.get, parts) if object_id is not None}
    return weights


def _were(names: list[str]) -> str:
    return f"{', '.join(names)} {'was' if len(names) == 1 else 'were'}"
