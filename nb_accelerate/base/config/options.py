"""`Options`: the base of dataclasses whose values are checked when they are built and when they are changed."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from typing_extensions import override

from nb_accelerate.base.config.checks import check_flag, suggest
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nb_accelerate.base.config.env import Environment


class Options:
    """Base of option objects, which are dataclasses.

    A subclass names the checks of its fields in `_checks`; those that are a yes or no need none. Setting a field after
    something was made from the options (`note_use`) is a warning that says what keeps its old value.
    """

    __slots__ = ("_uses",)  # neither a field nor in the __dict__ of the object
    _uses: list[_Use]

    _checks: ClassVar[Mapping[str, Callable[[str, Any], Any]]] = {}
    """By field: takes its name and value, and returns the value in its usual form or raises `ConfigError`."""

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_uses", [])

    def _check(self) -> None:
        """Refuse wrong values, and convert others to their usual form. Called when it is built and after each change.

        None is not checked where it is the default.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if field.name in self._checks:
                self._set(field.name, self._checks[field.name](field.name, value))
            elif field.type in {"bool", "bool | None"}:
                check_flag(field.name, value)

    def _set(self, name: str, value: Any) -> None:
        """Set a field without checks and warnings, of frozen options too."""
        object.__setattr__(self, name, value)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        uses = getattr(self, "_uses", None)
        if uses is None:  # being built
            self._set(name, value)
            return
        known = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]  # as above
        if name not in known:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, so setting it would do nothing.{suggest(name, known)} "
                f"Its fields are {', '.join(known)}."
            )
        before = getattr(self, name)
        self._set(name, value)
        try:
            self._check()
        except ConfigError:
            self._set(name, before)
            raise
        self._warn_if_late(name, getattr(self, name))

    def _warn_if_late(self, name: str, value: Any) -> None:
        """Warn if a change has no effect on objects that were made before."""
        warned = set()
        for use in self._uses:
            old = use.values[name]
            if old != value and use.made not in warned:
                warned.add(use.made)
                warnings.warn(
                    f"{type(self).__name__}.{name} = {value!r} has no effect on {use.made} with {name}={old!r}. "
                    f"{use.advice}",
                    stacklevel=levels_to_the_user(),
                )

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # nothing was made from a copy yet

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set("_uses", [])


class _Use(NamedTuple):
    """Something that was made from options, and the values of their fields at that time."""

    made: str
    advice: str
    values: dict[str, Any]


def note_use(options: Options, made: str, *, advice: str) -> None:
    """Record that an object was made from options, so that setting them afterwards gives a warning.

    Args:
        made: the object, with an article: ``"the model that was prepared"``.
        advice: a sentence that says where to set the options instead.
    """
    fields = dataclasses.fields(options)  # type: ignore[arg-type]  # subclasses are dataclasses
    use = _Use(made, advice, {field.name: getattr(options, field.name) for field in fields})
    if use not in options._uses:  # noqa: SLF001 - kept out of sight: users see plain dataclasses
        options._uses.append(use)  # noqa: SLF001 - as above


def fields_in(environment: Environment, options: Options, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return values from the environment for fields of options that have their defaults.

    Args:
        variables: names of environment variables by field. The type of the field says how a variable is read.
    """
    readers: dict[Any, Callable[[str], Any]] = {
        "bool": environment.flag,
        "bool | None": environment.flag,
        "int | None": environment.whole,
    }
    found = {
        field.name: readers.get(field.type, environment.text)(variables[field.name])
        for field in dataclasses.fields(options)  # type: ignore[arg-type]  # as above
        if field.name in variables and getattr(options, field.name) == field.default
    }
    return {name: value for name, value in found.items() if value is not None}


def levels_to_the_user() -> int:
    """Return the ``stacklevel`` that makes a warning of the caller point at the line outside of this package."""
    levels, frame = 1, sys._getframe(1)  # noqa: SLF001 - the standard library does the same
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "nb_accelerate":
        levels, frame = levels + 1, frame.f_back
    return levels
