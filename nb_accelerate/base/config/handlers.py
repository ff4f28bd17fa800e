"""`Handlers`: the ``kwargs_handlers`` of an `Accelerator`, sorted by kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import described, shown
from nb_accelerate.base.config.kwargs import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from nb_accelerate.base.config.precision import AORecipeKwargs
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nb_accelerate.base.config.kwargs import KwargsHandler


_FIELDS: dict[type[KwargsHandler], str] = {
    DistributedDataParallelKwargs: "ddp",
    GradScalerKwargs: "scaler",
    InitProcessGroupKwargs: "process_group",
    AutocastKwargs: "autocast",
    AORecipeKwargs: "fp8",
    ProfileKwargs: "profile",
}


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """One handler of each kind: the user's, or one with defaults."""

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    process_group: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    fp8: AORecipeKwargs | None = None
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)

    @classmethod
    def collect(cls, given: Iterable[KwargsHandler] | None) -> Handlers:
        """Sort a list of handlers by kind; there may be one of each kind."""
        known = ", ".join(kind.__name__ for kind in _FIELDS)
        if not isinstance(given, (list, tuple, set, NoneType)):
            raise ConfigError(
                f"kwargs_handlers={shown(given)} is {described(given)}, not a list of handlers. Write "
                f"kwargs_handlers=[...] with instances of: {known}."
            )
        found: dict[str, Any] = {}
        for handler in given or ():
            name = _FIELDS.get(type(handler))
            if name is None:
                raise ConfigError(
                    f"kwargs_handlers holds {handler!r} ({described(handler)}), which is not a handler this version "
                    f"knows. Write instances of: {known}, with `from nb_accelerate.utils import ...`."
                )
            if name in found:
                raise ConfigError(f"kwargs_handlers holds two {type(handler).__name__}. Write one with all fields.")
            found[name] = handler
        return cls(**found)
