"""The options of the engines that can train a model, one field for each engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.config.kwargs import DistributedDataParallelKwargs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.config.env import Environment


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What `nb_accelerate.strategies.select.select_strategy` chooses by.

    Attributes:
        ddp: arguments of DistributedDataParallel, the engine of several ranks if no other one is asked for.
    """

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)


def resolve_engines(
    plugins: Mapping[str, Any],
    *,
    ddp: DistributedDataParallelKwargs,
    before: EngineOptions | None,
    environment: Environment,
) -> EngineOptions:
    """Choose the options of each engine: the argument, else those of an earlier `Accelerator`, else the environment.

    Args:
        plugins: arguments of the `Accelerator` by name, None for what was not given.
        ddp: arguments of DistributedDataParallel.
        before: the options of the newest `Accelerator` of this process, if it is to be followed.
        environment: variables that ask for an engine.

    Raises:
        ConfigError: a value is not supported.
    """
    del plugins, before, environment  # nothing to choose from yet
    return EngineOptions(ddp=ddp)
