"""`Handlers`: the ``kwargs_handlers`` of an `Accelerator`, sorted by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nb_accelerate.base.config.checks import described, shown
from nb_accelerate.base.config.fp8 import AORecipeKwargs
from nb_accelerate.base.config.kwargs import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from nb_accelerate.base.config.profiling import ProfileKwargs
from nb_accelerate.errors import ConfigError


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
        """Sort a list of handlers by kind.

        Raises:
            ConfigError: ``given`` is not a list, an item is not a handler, or two are of one kind.
        """
        places: dict[type[KwargsHandler], str] = {
            DistributedDataParallelKwargs: "ddp",
            GradScalerKwargs: "scaler",
            InitProcessGroupKwargs: "process_group",
            AutocastKwargs: "autocast",
            AORecipeKwargs: "fp8",
            ProfileKwargs: "profile",
        }
        known = ", ".join(kind.__name__ for kind in places)
        if isinstance(given, KwargsHandler):
            fields = ", ".join(f"{name}={value!r}" for name, value in given.to_kwargs().items())
            raise ConfigError(
                f"kwargs_handlers was given one {type(given).__name__}, not a list. Write "
                f"kwargs_handlers=[{type(given).__name__}({fields})]."
            )
        if isinstance(given, (Mapping, str)) or (given is not None and not isinstance(given, Iterable)):
            raise ConfigError(
                f"kwargs_handlers={shown(given)} is {described(given)}, not a list of handlers. Write a list of "
                f"instances of: {known}."
            )
        found: dict[str, Any] = {}
        for handler in given or ():
            place = places.get(type(handler))
            if place is None:
                raise ConfigError(
                    f"kwargs_handlers holds {handler!r} ({described(handler)}), which is not a handler this version "
                    f"knows. Write instances of: {known}, with `from nb_accelerate.utils import ...`."
                )
            if place in found:
                raise ConfigError(f"kwargs_handlers holds two {type(handler).__name__}. Write one with all fields.")
            found[place] = handler
        return cls(**found)
