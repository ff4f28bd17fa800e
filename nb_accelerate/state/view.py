"""What `PartialState`, `AcceleratorState` and `GradientState` are: views of what is kept elsewhere."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self


class SharedState:
    """What a state shows, by name, as the class attribute that accelerate keeps it in. It can be read only.

    Libraries ask it whether there is a state at all: ``if PartialState._shared_state == {}``.

    Args:
        known: whether there is something to show.
        names: of attributes of the state.
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
    """What states have in common: they show something that is kept elsewhere."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = getattr(type(self), name, None)
        if isinstance(known, property) and known.fset is None:
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be set: it shows what this process is and what its Accelerator "
                "chose. Write it as an argument of Accelerator(...), or set an attribute of the Accelerator."
            )
        object.__setattr__(self, name, value)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
