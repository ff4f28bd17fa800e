"""The options of the engines that can train a model, one field for each engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.config.fsdp import resolve_fsdp
from nb_accelerate.config.kwargs import DistributedDataParallelKwargs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.config.env import Environment
    from nb_accelerate.config.fsdp import FullyShardedDataParallelPlugin


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What `nb_accelerate.strategies.select.select_strategy` chooses by.

    Attributes:
        ddp: arguments of DistributedDataParallel, the engine of several ranks if no other one is asked for.
        fsdp: how models are sharded; None if they are not.
    """

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    fsdp: FullyShardedDataParallelPlugin | None = None


def resolve_engines(
    plugins: Mapping[str, Any],
    *,
    ddp: DistributedDataParallelKwargs,
    before: EngineOptions | None,
    environment: Environment,
) -> EngineOptions:
    """Choose the options of each engine: the argument, else those of an earlier `Accelerator`, else the environment.

    Args:
        plugins: arguments of the `Accelerator` by name, such as ``fsdp_plugin``; None for what was not given.
        ddp: arguments of DistributedDataParallel.
        before: the options of the newest `Accelerator` of this process, if it is to be followed.
        environment: variables that ask for an engine.

    Raises:
        ConfigError: a value is not supported.
    """
    given = plugins.get("fsdp_plugin")
    fsdp = before.fsdp if given is None and before is not None else given
    return EngineOptions(ddp=ddp, fsdp=resolve_fsdp(fsdp, environment))
