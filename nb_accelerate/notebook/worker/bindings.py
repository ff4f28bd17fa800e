"""`Bindings`: what the variables of a rank were before a cell, without keeping any of them alive.

A cell that deletes a model to make room for another must get the memory while it runs, so no reference to the model is
held. What allows it is referred to weakly. What does not (lists, tuples, dicts) is known by its address, which a later
object may have: then the source of the cell says whether it was bound again.
"""

from __future__ import annotations

import ast
import gc
import re
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


_SMALL = frozenset({bool, int, float, str, type(None)})
_CONTAINERS = frozenset({list, tuple, dict})
"""Types without weak references. They are asked about first because an error for each would take most of the time."""


class Bindings:
    """The variables of a rank at one moment."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._references: dict[str, weakref.ref[Any]] = {}
        self._values: dict[str, Any] = {}  # numbers and texts: they hold no other objects
        self._addresses: dict[str, int] = {}
        for name, value in names.items():
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """Add a variable that the cell does not count as having bound."""
        if type(value) in _SMALL:
            self._values[name] = value
            return
        if type(value) in _CONTAINERS and gc.is_tracked(value):
            self._addresses[name] = id(value)
            return
        try:
            self._references[name] = weakref.ref(value)
        except TypeError:
            if gc.is_tracked(value):
                self._addresses[name] = id(value)
            else:
                self._values[name] = value

    def bound(self, names: Mapping[str, Any], source: str) -> list[str]:
        """Return the names that were bound since then. The source of the cell has magics as calls of functions."""
        found, unclear = [], []
        words = set(re.findall(r"\w+", source))
        for name, value in names.items():
            if name in self._references:
                is_same = self._references[name]() is value
            elif name in self._values:
                is_same = self._values[name] is value
            else:
                is_same = self._addresses.get(name) == id(value)
                if is_same and name in words:
                    unclear.append(name)
            if not is_same:
                found.append(name)
        return found + (sorted(set(unclear) & stored_names(source)) if unclear else [])

    def unbound(self, names: Iterable[str]) -> set[str]:
        """Return the names that are no longer there."""
        return {*self._references, *self._values, *self._addresses}.difference(names)


def stored_names(source: str) -> set[str]:
    """Return the names that a cell assigns to anywhere, also in the arguments of magics such as ``%%time``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found.union(*(stored_names(text) for text in _arguments_of_magics(tree)))


def _arguments_of_magics(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython()."):
            for argument in node.args[1:]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value
