"""The public names as text, one line each: what a change of the interface looks like in a diff.

``python tests/structure/public_api.py`` writes it to ``public_api.txt`` after a change that is meant.
"""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from types import WrapperDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

SNAPSHOT = Path(__file__).with_suffix(".txt")


def describe(module: ModuleType) -> str:
    """Every public name of a module, its signature, and the members of its classes."""
    public = {name: getattr(module, name) for name in module.__all__}
    return "".join(f"{line}\n" for name, value in public.items() for line in _lines(name, value, public))


def _lines(name: str, value: Any, public: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield f"{name}: {', '.join(member.name for member in value)}"
    elif isinstance(value, type):
        # What a caller may catch or ask isinstance for. Other bases are how it is built.
        bases = [
            base.__name__ for base in value.__mro__[1:-1] if base.__module__ == "builtins" or base in public.values()
        ]
        signature = _signature(value)
        yield f"{name}{signature}" + (f"  is a {', '.join(bases)}" if bases else "")
        for member in sorted(_own_members(value)):
            if f"{member}: " in signature:
                continue  # a field of a dataclass, which the constructor showed
            yield from _member(f"{name}.{member}", inspect.getattr_static(value, member))
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _own_members(cls: type) -> set[str]:
    """Public members that this project wrote; those of builtin and foreign bases are none of our business."""
    ours = cls.__module__.split(".")[0]
    return {
        member
        for base in cls.__mro__
        if base.__module__.split(".")[0] == ours
        for member in vars(base)
        if not member.startswith("_")
    }


def _member(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, (classmethod, staticmethod)):
        yield f"{name}{_signature(value.__func__)}  ({type(value).__name__})"
    elif inspect.isfunction(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}  ({'property' if hasattr(type(value), '__get__') else 'attribute'})"


def _signature(value: Any) -> str:
    """A signature without quotes around annotations and without addresses: the same on every Python version."""
    if isinstance(value, type) and isinstance(value.__init__, WrapperDescriptorType):
        return "(...)"  # an exception with the constructor of the builtin one, whose signature varies with Python
    signature = inspect.signature(value)
    returned = "" if signature.return_annotation is signature.empty else f" -> {_name(signature.return_annotation)}"
    parts, kinds = [], inspect.Parameter
    seen_star = False
    for parameter in signature.parameters.values():
        if parameter.kind is kinds.KEYWORD_ONLY and not seen_star:
            parts.append("*")
        seen_star |= parameter.kind in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL)
        stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {_name(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        parts.append(text)
    return f"({', '.join(parts)}){returned}"


def _name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text or "object>" in text else text


if __name__ == "__main__":
    import nb_accelerate

    SNAPSHOT.write_text(describe(nb_accelerate), encoding="utf-8")
