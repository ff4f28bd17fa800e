"""The options of the engines that can train a model, one field for each engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from nb_accelerate.config.kwargs import DistributedDataParallelKwargs


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What `nb_accelerate.strategies.select.select_strategy` chooses by.

    Attributes:
        ddp: arguments of DistributedDataParallel, the engine of several ranks if no other one is asked for.
    """

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
