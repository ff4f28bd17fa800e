"""Decide which values are sent to which rank before a cell, and pack them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ShippingError, TooLargeError
from nb_accelerate.notebook.pool.names import names_in
from nb_accelerate.notebook.pool.namespace_sync import SHELL_NAMES, Verdict
from nb_accelerate.notebook.protocol.content import Snapshot, is_constant
from nb_accelerate.notebook.protocol.main_module import Globals
from nb_accelerate.notebook.protocol.renewal import is_of_torch, state_of
from nb_accelerate.notebook.protocol.shipping import References, pack
from nb_accelerate.notebook.worker.namespace import is_hidden
from nb_accelerate.notebook.worker.received import Key, Names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet

    from nb_accelerate.notebook.pool.namespace_sync import NamespaceSync
    from nb_accelerate.notebook.protocol.content import Numbers
    from nb_accelerate.notebook.protocol.shipping import Packed

    Ask = Callable[[Sequence[int], tuple[Key, ...]], list[set[Key]]]

_ADVICE = "Create it on the ranks, in a %%distributed cell."

SIZE_LIMIT = 1 << 30
"""Bytes that are sent unless the user asks for more."""


@dataclass
class Need:
    """What ranks lack that have the same.

    Attributes:
        ranks: the ranks.
        sync: what one of them has.
        values: what is sent, by name.
        changed: objects that they have and that are to hold something else.
        containers: names of lists and dictionaries that they have, by address.
    """

    ranks: list[int]
    sync: NamespaceSync
    values: dict[str, Any]
    changed: dict[Key, Any]
    containers: dict[int, str]


@dataclass
class Shipment:
    """Values for ranks that lack the same.

    Attributes:
        ranks: the ranks that get them.
        packed: a `Names`, pickled.
        values: the values, by name.
        uses: global names that functions among the values read, and those of containers that are referred to.
        contents: what objects hold on the ranks then.
    """

    ranks: list[int]
    packed: Packed
    values: dict[str, Any]
    uses: frozenset[str]
    contents: dict[Key, list[Any]]


@dataclass
class Manifest:
    """All values that are sent for one cell.

    Attributes:
        shipments: at most one for each rank.
        snapshots: of the values that the cell uses, by name.
        own: names that cells on the ranks have bound, and that are therefore not sent, with the notebook's values.
        conflicts: names of values that both the notebook and the ranks have changed; they are not sent.
        replacing: names that the notebook has bound again, to what takes the place of something ranks have changed.
        weights: names of models whose tensors the notebook has changed.
        unread: names of values that the ranks have and of which a part was not read, with the values.
        deleted: names that the notebook has no more.
    """

    shipments: list[Shipment] = field(default_factory=list)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)
    replacing: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    unread: dict[str, Any] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)

    def packed_for(self, rank: int) -> Packed | None:
        """Return what a rank gets, or None."""
        return next((one.packed for one in self.shipments if rank in one.ranks), None)

    def close(self) -> None:
        """Close what was packed, and forget the values."""
        for shipment in self.shipments:
            shipment.packed.close()
        self.shipments.clear()
        self.snapshots.clear()
        self.own.clear()
        self.unread.clear()


def make_manifest(
    free: Iterable[str],
    namespace: Mapping[str, Any],
    syncs: Mapping[int, NamespaceSync],
    numbers: Numbers,
    ask: Ask,
    *,
    forced: Iterable[str] = (),
    limit: int | None = SIZE_LIMIT,
) -> Manifest:
    """Pack what ranks lack.

    Args:
        syncs: what each rank that runs the cell has, by rank.
        ask: asks ranks which of some objects they have changed.
        limit: bytes that may be sent; None for any number.

    Raises:
        ShippingError: a value cannot be pickled; the text says which part.
        TooLargeError: the values have more than `limit` bytes; the text says how to send them nevertheless.
    """
    forced = frozenset(forced)
    wanted, held = {*free, *forced}, set[str]()
    while True:  # until nothing that is packed uses a name that was not asked for
        manifest = Manifest()
        planning = _Planning(wanted, held, namespace, syncs, numbers, forced, manifest)
        more = planning.held() - wanted
        if more:
            held |= more
            wanted |= more
            continue
        try:
            for need in planning.needs(ask):
                manifest.shipments.append(_pack(need, manifest.snapshots, numbers, limit, is_forced=bool(forced)))
        except BaseException:
            manifest.close()
            raise
        uses = frozenset[str]().union(*(shipment.uses for shipment in manifest.shipments))
        if uses <= wanted:
            return manifest
        manifest.close()
        wanted |= uses


class _Planning:
    """Finds out what each rank lacks of the names that a cell reads, and of those that functions among them read."""

    def __init__(
        self,
        wanted: set[str],
        held: set[str],
        namespace: Mapping[str, Any],
        syncs: Mapping[int, NamespaceSync],
        numbers: Numbers,
        forced: frozenset[str],
        manifest: Manifest,
    ) -> None:
        self._held = held
        self._namespace = namespace
        self._syncs = syncs
        self._numbers = numbers
        self._forced = forced
        self._manifest = manifest
        self._send: dict[int, set[str]] = {rank: set() for rank in syncs}
        self._changed: dict[int, dict[str, set[Key]]] = {rank: {} for rank in syncs}
        for rank, sync in syncs.items():
            seen: set[str] = set()
            waiting = list(wanted)
            while waiting:
                name = waiting.pop()
                if name not in seen and name not in SHELL_NAMES and not is_hidden(name):
                    seen.add(name)
                    waiting += self._judge(name, rank, sync)

    def _judge(self, name: str, rank: int, sync: NamespaceSync) -> Iterable[str]:
        """Decide about a name. Returns the names that functions in its value read."""
        manifest = self._manifest
        if name not in self._namespace:
            if sync.has(name):
                manifest.deleted.add(name)
            return ()
        value = self._namespace[name]
        verdict = Verdict.SEND if name in self._forced else sync.judge(name, value)
        if verdict is Verdict.OWN:
            if name in self._held:
                return ()
            manifest.own[name] = value
            if self._numbers.get(value) in sync.known or sync.is_settled(name):
                self._snapshot(name)
            return ()
        if verdict is Verdict.SEND:
            self._send[rank].add(name)
        if is_constant(value):
            return sync.uses(name)
        snapshot = self._snapshot(name)
        if name in self._forced:
            self._changed[rank][name] = snapshot.parts(name).keys() & sync.known.keys()
            if name in sync.known and state_of(value) is not None and sync.judge(name, value) is Verdict.HAS_IT:
                self._send[rank].discard(name)
            else:
                self._changed[rank][name].discard(name)
        elif not sync.is_settled(name, snapshot):
            changed = sync.changed(name, snapshot, is_new=verdict is Verdict.SEND)
            if name in changed and state_of(value) is None:
                self._send[rank].add(name)
                changed.discard(name)
            if changed:
                self._changed[rank][name] = changed
            elif snapshot.is_partial and verdict is Verdict.HAS_IT:
                manifest.unread[name] = value
        return sync.uses(name) if verdict is Verdict.HAS_IT else sync.uses(name).union(*map(names_in, snapshot.codes()))

    def _snapshot(self, name: str) -> Snapshot:
        snapshots = self._manifest.snapshots
        if name not in snapshots:
            snapshots[name] = Snapshot(self._namespace[name], self._numbers)
        return snapshots[name]

    def held(self) -> set[str]:
        """Return the names of lists and the like in what is sent. A list has no number: it stays one by its name."""
        held = set[int]()
        for name in set[str]().union(*self._send.values(), *self._changed.values()) & self._manifest.snapshots.keys():
            held |= self._manifest.snapshots[name].held
        names = [name for name, value in self._namespace.items() if id(value) in held] if held else []
        return {name for name in names if not is_hidden(name) and name not in SHELL_NAMES}

    def needs(self, ask: Ask) -> list[Need]:
        """Return what ranks need, those together that need the same."""
        touched = self._touched(ask)
        manifest = self._manifest
        blocked: set[Key] = set()
        for changed in self._changed.values():
            for name, keys in changed.items():
                if name not in self._forced and not keys.isdisjoint(touched):
                    manifest.conflicts.add(name)
                    blocked |= keys
        found: dict[Any, Need] = {}
        for rank, sync in self._syncs.items():
            names = self._send[rank]
            manifest.replacing |= {name for name in names if not sync.replaced(name).isdisjoint(touched)} - self._forced
            changes = {name: keys - blocked for name, keys in self._changed[rank].items()}
            objects: dict[Key, Any] = {}
            for name, keys in changes.items():
                parts = manifest.snapshots[name].objects
                objects.update((key, parts[key if isinstance(key, int) else None]) for key in keys)
                if is_of_torch(self._namespace[name], "nn.Module") and any(
                    is_of_torch(objects[key], "Tensor") for key in keys
                ):
                    manifest.weights.add(name)
            if names or objects:
                same = (frozenset(names), frozenset(objects), frozenset(sync.known))
                if same not in found:
                    values = {name: self._namespace[name] for name in names}
                    found[same] = Need([], sync, values, objects, sync.containers(self._namespace))
                found[same].ranks.append(rank)
        manifest.weights -= self._forced
        return [*found.values()]

    def _touched(self, ask: Ask) -> set[Key]:
        """Return which objects that are to be changed or replaced the ranks have changed."""
        keys: dict[int, set[Key]] = {}
        for rank, sync in self._syncs.items():
            changed = self._changed[rank]
            asked: list[AbstractSet[Key]] = [changed[name] for name in changed.keys() - self._forced]
            asked += [sync.replaced(name) for name in self._send[rank] - self._forced]
            keys[rank] = set[Key]().union(*asked) & sync.known.keys()
        ranks = [rank for rank, asked in keys.items() if asked]
        if not ranks:
            return set()
        return set[Key]().union(*ask(ranks, tuple(set[Key]().union(*keys.values()))))


def _pack(
    need: Need, snapshots: Mapping[str, Snapshot], numbers: Numbers, limit: int | None, *, is_forced: bool
) -> Shipment:
    values, sync = need.values, need.sync
    states: dict[Key, Any] = {}
    roots = {id(snapshot.value): name for name, snapshot in snapshots.items()}
    anew: set[Key] = set()
    for key, value in need.changed.items():
        state = state_of(value)
        if state is not None:
            states[key] = state
            continue
        anew.add(key)
        if id(value) in roots:
            values[roots[id(value)]] = value
        elif not is_forced:
            name = next(name for name, snapshot in snapshots.items() if key in snapshot.objects)
            raise ShippingError(
                f"{name} holds a {type(value).__qualname__} that was changed in the notebook. It cannot be changed in "
                f"place on the ranks. To send all of it: %distributed push {name}"
            )
    containers = {address: name for address, name in need.containers.items() if name not in values}
    parts = {key: tokens for name, snapshot in snapshots.items() for key, tokens in snapshot.parts(name).items()}
    # What was not looked at, in a large list, may have changed: rather a copy of it than what the ranks have.
    references = References(numbers, (sync.known.keys() & parts.keys()) - anew, containers)
    try:
        names = Names(dict(sorted(values.items())), states)
        packed = pack(
            names,
            name="what the cell uses",
            advice=_ADVICE,
            globals_there=Globals.FOUND,
            limit=limit,
            references=references,
        )
    except TooLargeError as error:
        sent = sorted(values or snapshots)
        raise TooLargeError(
            f"{', '.join(sent)} of the notebook: {error.size / 2**30:.1f} GiB would be copied to the ranks. "
            f"To copy them: %distributed push {' '.join(sent)} --large. Or load the data on the ranks "
            f"themselves, in a %%distributed cell",
            size=error.size,
        ) from None
    except ShippingError as error:
        raise _of_a_variable(error, snapshots) from error.__cause__
    uses = packed.names.union(*(names_in(code) for code in packed.codes)) | sync.uses_of(references.used)
    uses |= {key for key in references.used if isinstance(key, str)}
    contents = {key: parts[key] for key in (*states, *(values.keys() & parts.keys()))}
    for number, value in references.packed.items():  # also what was not looked at, as it is in a large list
        contents[number] = parts.get(number) or Snapshot(value, numbers, deep=False).tokens
    return Shipment(need.ranks, packed, values, uses, contents)


def _of_a_variable(error: ShippingError, snapshots: Mapping[str, Snapshot]) -> ShippingError:
    """Return an error about a part of a `Names`, told as a part of a variable."""
    place = re.match(r"what the cell uses\[\d\]\[(?:'(\w+)'|(\d+))\]", error.path)
    path = error.path
    if place is not None:
        holders = [name for name, snapshot in snapshots.items() if place[2] and int(place[2]) in snapshot.objects]
        path = f"{place[1] or holders[0]}{path[place.end() :]}"
    return ShippingError(str(error).replace(error.path, path, 1), path=path, is_final=error.is_final)


def of_pulled(error: ShippingError, names: Sequence[str]) -> ShippingError:
    """Return the error of a rank about a value that was pulled, told as one about the variable.

    Args:
        error: about a part of the list that the rank was to return.
    """
    place = re.search(r"\[(\d+)\]", error.path)
    if place is None:
        return error
    path = f"{names[int(place[1])]}{error.path[place.end() :]}"
    return ShippingError(str(error).replace(error.path, path, 1), path=path, is_final=error.is_final)
