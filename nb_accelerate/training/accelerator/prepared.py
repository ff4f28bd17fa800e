"""`Prepared`: the objects that went through ``prepare``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from nb_accelerate.training.data import DataLoaderShard
    from nb_accelerate.training.optim import AcceleratedOptimizer, AcceleratedScheduler


@dataclass(kw_only=True)
class Prepared:
    """Objects that went through ``prepare``, in order."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    loaders: list[DataLoaderShard] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all objects."""
        for things in (self.models, self.optimizers, self.loaders, self.schedulers):
            things.clear()
