"""Engines: each starts one host process on every machine of a launch, and does nothing else there."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, cast

from nb_accelerate.base.config.engine import ENGINES

if TYPE_CHECKING:
    from nb_accelerate.base.config.engine import EngineOptions
    from nb_accelerate.notebook.launch.engines.engine import Engine


def open_engine(options: EngineOptions) -> Engine:
    """Return the engine that options name, whose machines are not reached yet."""
    return cast("Engine", pkgutil.resolve_name(ENGINES[options.engine].opens)(options))
