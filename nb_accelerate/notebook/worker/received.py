"""What a rank was sent from the notebook: found again by its id, and changed in place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from nb_accelerate.errors import ShippingError
from nb_accelerate.notebook.protocol.content import ObjectIds, Snapshot, structure
from nb_accelerate.notebook.protocol.main_module import main_globals
from nb_accelerate.notebook.protocol.renewal import edit, is_of_torch, renew
from nb_accelerate.notebook.protocol.shipping import unpack_with_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nb_accelerate.notebook.protocol.content import Edit, Structure
    from nb_accelerate.notebook.protocol.messages import Parcel

# The id of an object; or the name of a variable that holds a list or dictionary, which cannot have one.
Key = int | str


class Names(NamedTuple):
    """What travels with a cell: values by name, what objects that the rank has are to hold, and names that go."""

    values: dict[str, Any]
    states: dict[Key, Any]
    edits: dict[Key, Edit]
    deleted: list[str]


class Received(ObjectIds):
    """Objects that came from the notebook, by the ids that they have there. Keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__(first=1 << 50)  # for objects of this rank
        self._objects: dict[int, weakref.ref[Any]] = {}
        self._tokens: dict[Key, list[Any]] = {}
        self._homes: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._gone: list[int] = []
        self._earlier: dict[int, int] = {}

    def define(self, parcel: Parcel, fds: tuple[int, ...], names: dict[str, Any]) -> None:
        """Define, or change in place, what has come with a cell: a `Names`. Its descriptors are taken over."""
        sent, objects = unpack_with_ids(parcel, fds, lambda key: self._find(key, names))
        changed = {key: self._find(key, names) for key in sent.states}
        # An object that holds a list which is changed here differs afterwards, though this rank has not changed it.
        has_lists = any(isinstance(key, str) for key in changed)
        same = self._tokens.keys() - self.changed([*self._tokens], names) if has_lists else ()
        for key, value in changed.items():
            renew(value, sent.states[key])
        for key, change in sent.edits.items():
            # An edit leaves alone what else this rank has changed in the object.
            edit(self._find(key, names), change)
            self._tokens[key] = change.apply(self._tokens[key])
        for name in sent.deleted:
            names.pop(name, None)
        for name, value in sent.values.items():
            if not _is_within(value, names.get(name)):
                names[name] = value
        for object_id, value in objects.items():
            self._take(object_id, value)
        for value in objects.values():
            self._find_home_of_parameters(value)
        for key in {*objects, *changed, *sent.values, *same}:
            value = names.get(key) if isinstance(key, str) else self._object(key)
            if value is not None:
                self._tokens[key] = self._read(value)

    def share(self, name: str, value: Any, structure_there: Structure) -> bool:
        """Know the objects in a value by the ids of the notebook's copy. Return False if they are not alike."""
        look = Snapshot(value, self, moves=True)
        if look.is_partial or [kind for _, kind in structure(look)] != [kind for _, kind in structure_there]:
            return False
        # Objects that hold one of these are read in another way from now on, and were not changed by this rank.
        same = self._tokens.keys() - self.changed([*self._tokens], main_globals())
        keys: list[Key] = [name if object_id is None else object_id for object_id, _ in structure_there]
        for key, part in zip(keys, look.objects.values(), strict=True):
            if isinstance(key, int):
                self._take(key, part)
        for part in look.objects.values():
            self._find_home_of_parameters(part)
        for key in {*keys, *same}:
            found = main_globals().get(key) if isinstance(key, str) else self._object(key)
            if found is not None:
                self._tokens[key] = self._read(found)
        return True

    def changed(self, keys: Iterable[Key], names: dict[str, Any]) -> set[Key]:
        """Return which of these objects hold something else than when they came, or were last changed, from there."""
        found = set()
        for key in keys:
            value = names.get(key) if isinstance(key, str) else self._object(key)
            is_other = key in self._tokens and value is not None and self._read(value) != self._tokens[key]
            if is_other or (isinstance(key, int) and self._successor(key, value)):
                found.add(key)
        return found

    def pop_gone(self) -> tuple[int, ...]:
        """Return the ids of objects that are gone. Each is returned once."""
        # The id of a parameter that its module has replaced is kept: what refers to it must not get a copy.
        kept = [
            object_id
            for object_id in self._gone
            if object_id in self._homes and self._homes[object_id][0]() is not None
        ]
        gone = tuple(set(self._gone).difference(kept))
        self._gone = kept
        for object_id in gone:
            self._homes.pop(object_id, None)
        return gone

    @override
    def on_end(self, object_id: int) -> None:
        if self._objects.pop(object_id, None) is not None:
            self._tokens.pop(object_id, None)
            self._gone.append(object_id)
        if object_id in self._earlier:
            self.on_end(self._earlier.pop(object_id))

    def _take(self, object_id: int, value: Any) -> None:
        earlier = self.get(value)
        try:
            self._objects[object_id] = weakref.ref(value)
            self.register(object_id, value)
            if earlier in self._objects and earlier != object_id:
                self._earlier[object_id] = earlier
        except TypeError:  # it became something else on the way
            self._gone.append(object_id)

    def _find_home_of_parameters(self, module: Any) -> None:
        if is_of_torch(module, "nn.Module"):
            for name, parameter in vars(module)["_parameters"].items():
                object_id = self.get(parameter)
                if object_id in self._objects:
                    self._homes[object_id] = weakref.ref(module), name

    def _object(self, object_id: int) -> Any:
        reference = self._objects.get(object_id)
        return None if reference is None else reference()

    def _read(self, value: Any) -> list[Any]:
        return Snapshot(value, self, deep=False, moves=True).tokens

    def _successor(self, object_id: int, value: Any) -> str:
        """Return which parameter a module has in the place of one that was sent; "" if it has the same."""
        module, name = self._homes.get(object_id, (lambda: None, ""))
        home: Any = module()
        is_same = home is None or vars(home)["_parameters"].get(name) is value
        return "" if is_same else f"{name!r} of a {type(home).__name__}"

    def _find(self, key: Key, names: dict[str, Any]) -> Any:
        if isinstance(key, str):
            return names[key]
        value = self._object(key)
        successor = self._successor(key, value)
        if successor:
            raise ShippingError(
                f"the notebook sends, or refers to, the parameter {successor}, which the ranks have replaced, as FSDP "
                f"does when a model is prepared. Make what refers to it (an optimizer, say), and load weights, on the "
                f"ranks, in a %%distributed cell"
            )
        if value is None:
            raise ShippingError("the ranks no longer have what the cell refers to. Run the cell again")
        return value


def _is_within(value: Any, holder: Any) -> bool:
    """Return whether a variable holds a model in its wrapper, as `prepare` returns it."""
    if not is_of_torch(value, "nn.Module"):
        return False
    while holder is not value and is_of_torch(holder, "nn.Module"):
        modules = vars(holder)["_modules"]
        holder = modules.get("module") or modules.get("_orig_mod")
    return holder is value


received = Received()  # what this process was sent


def share(structures: dict[str, Structure]) -> set[str]:
    """Know what the notebook has pulled by its ids. Returns the names of what is alike. Sent in a `Call`, too."""
    names = main_globals()
    return {
        name
        for name, structure_there in structures.items()
        if name in names and received.share(name, names[name], structure_there)
    }


def changed_there(keys: tuple[Key, ...]) -> set[Key]:
    """Return which objects of the notebook this rank has changed. The kernel sends it in a `Call`."""
    return received.changed(keys, main_globals())
