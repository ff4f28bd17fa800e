"""`Options`: the base of dataclasses whose values are checked when they are built and when they are changed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_flag, suggest
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nb_accelerate.base.config.env import Environment


class Options:
    """Base of option objects, which are dataclasses.

    A subclass names the checks of its fields in `_checks`; boolean fields need none.
    """

    __slots__ = ("_is_built",)  # neither a field nor in the __dict__ of the object

    # By field: takes its name and value, and returns the value in its usual form or raises `ConfigError`.
    _checks: ClassVar[Mapping[str, Callable[[str, Any], Any]]] = {}

    def __post_init__(self) -> None:
        self._check()
        self._set("_is_built", True)

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
        """Set a field without checks, of frozen options too."""
        object.__setattr__(self, name, value)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if not getattr(self, "_is_built", False):
            self._set(name, value)
            return
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]  # as above
        if name not in names:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, so setting it would do nothing.{suggest(name, names)} "
                f"Its fields are {', '.join(names)}."
            )
        before = getattr(self, name)
        self._set(name, value)
        try:
            self._check()
        except ConfigError:
            self._set(name, before)
            raise

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set("_is_built", True)


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
    values = {
        field.name: readers.get(field.type, environment.text)(variables[field.name])
        for field in dataclasses.fields(options)  # type: ignore[arg-type]  # as above
        if field.name in variables and getattr(options, field.name) == field.default
    }
    return {name: value for name, value in values.items() if value is not None}
