"""`Options`: the base of dataclasses whose values are checked when they are built and when they are changed."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import Any

from typing_extensions import override

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import ConfigError


@dataclasses.dataclass
class Use:
    """Record that an object was made from options, and does not follow later changes of them.

    Attributes:
        made: the object that was made: ``"the model that was prepared"``.
        advice: a sentence that says where to set the options instead.
        values: the values of all fields at that time.
    """

    made: str
    advice: str
    values: dict[str, Any]


class Options:
    """Base of option objects, which are dataclasses.

    A subclass refuses wrong values in `_check`. Setting a field after something was made from the options (`note_use`)
    is a warning that says what keeps its old value.
    """

    __slots__ = ("_uses",)  # neither a field nor in the __dict__ of the object
    _uses: list[Use]

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_uses", [])

    def _check(self) -> None:
        """Refuse wrong values, and convert others to their usual form.

        Called when the object is built, and after each change.
        """

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        uses = getattr(self, "_uses", None)
        if uses is None:  # being built
            object.__setattr__(self, name, value)
            return
        known = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]  # as in `note_use`
        if name not in known:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, so setting it would do nothing.{suggest(name, known)} "
                f"Its fields are {', '.join(known)}."
            )
        before = getattr(self, name)
        object.__setattr__(self, name, value)
        try:
            self._check()
        except ConfigError:
            object.__setattr__(self, name, before)
            raise
        self._tell(name, getattr(self, name))

    def _tell(self, name: str, value: Any) -> None:
        """Warn if a change has no effect on objects that were made before."""
        told = set()
        for use in self._uses:
            old = use.values[name]
            if old != value and use.made not in told:
                told.add(use.made)
                warnings.warn(
                    f"{type(self).__name__}.{name} = {value!r} has no effect on {use.made} with {name}={old!r}. "
                    f"{use.advice}",
                    stacklevel=_levels_to_the_user(),
                )

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # nothing was made from a copy yet

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        object.__setattr__(self, "_uses", [])


def note_use(options: Options, made: str, *, advice: str) -> None:
    """Record that an object was made from options, so that setting them afterwards gives a warning.

    Args:
        made: the object, with an article: ``"the model that was prepared"``.
        advice: a sentence that says where to set the options instead.
    """
    fields = dataclasses.fields(options)  # type: ignore[arg-type]  # subclasses are dataclasses
    use = Use(made, advice, {field.name: getattr(options, field.name) for field in fields})
    if use not in options._uses:  # noqa: SLF001 - kept out of sight: users see plain dataclasses
        options._uses.append(use)  # noqa: SLF001 - as above


def _levels_to_the_user() -> int:
    """Return the ``stacklevel`` that makes a warning of the caller point at the line outside of this package."""
    levels, frame = 1, sys._getframe(1)  # noqa: SLF001 - the standard library does the same
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "nb_accelerate":
        levels, frame = levels + 1, frame.f_back
    return levels
