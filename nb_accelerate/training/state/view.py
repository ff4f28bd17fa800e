"""Base of `PartialState`, `AcceleratorState` and `GradientState`: read-only views."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self


class SharedState:
    """Descriptor of ``_shared_state``, the class attribute that holds a state's values in accelerate. Read-only.

    Libraries compare it to find out whether there is a state: ``if PartialState._shared_state == {}``.
    """

    def __init__(self, known: Callable[[], bool], *names: str) -> None:
        self._known = known
        self._names = names

    def __get__(self, view: View | None, kind: type[View]) -> Mapping[str, Any]:
        if not self._known():
            return MappingProxyType({})
        shown = kind() if view is None else view
        return MappingProxyType({name: getattr(shown, name) for name in self._names})


class View:
    """A read-only object whose attributes are computed. A copy of it is the object itself."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
