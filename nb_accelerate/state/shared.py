"""What every `Accelerator` of a process shares, as accelerate's scripts expect.

A cell that makes an `Accelerator` runs twice, and an evaluation makes one of its own. Objects that another one prepared
stay usable: where the loop is, which loader it reads and how losses are scaled is known here, once per process. What an
`Accelerator` was told (how long windows are, how loaders are shared out) is its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

from nb_accelerate.data.tracker import LoaderTracker
from nb_accelerate.optim.accumulation import Window
from nb_accelerate.process import context

if TYPE_CHECKING:
    from torch import nn

    from nb_accelerate.optim import AcceleratedOptimizer
    from nb_accelerate.precision.scaler import LossScaler


@dataclass(kw_only=True)
class SharedTraining:
    """What is trained in this process, and how far its loop is.

    Attributes:
        tracker: which loaders are being iterated.
        window: whether the current batch closes an accumulation window.
        scaler: what multiplies losses in fp16; None until that is asked for.
        models: those that were prepared and are still there.
    """

    tracker: LoaderTracker = field(default_factory=LoaderTracker)
    window: Window = field(default_factory=Window)
    scaler: LossScaler | None = None
    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    _optimizers: list[ref[AcceleratedOptimizer]] = field(default_factory=list)

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """Optimizers that were prepared and are still there, in that order: all ranks have the same."""
        return [optimizer for one in self._optimizers if (optimizer := one()) is not None]

    def add_optimizer(self, optimizer: AcceleratedOptimizer) -> None:
        """Note that an optimizer was prepared."""
        if not any(one is optimizer for one in self.optimizers):
            self._optimizers = [*map(ref, self.optimizers), ref(optimizer)]


def shared_training() -> SharedTraining:
    """Return what every `Accelerator` of this process shares."""
    if context.training.value is None:
        context.training.value = SharedTraining()
    shared: SharedTraining = context.training.value
    return shared
