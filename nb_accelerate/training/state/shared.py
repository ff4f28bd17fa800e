"""State that all `Accelerator` objects of a process share.

A cell that makes an `Accelerator` may run twice, and an evaluation may make a second one. Objects that the first one
prepared stay usable, because the state of the loop, of its loaders and of the loss scaler is kept here, once for each
process. Options (length of the accumulation window, how loaders are sharded) belong to each `Accelerator`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

from nb_accelerate.base.seam import group_replaced
from nb_accelerate.training.data.tracker import LoaderTracker
from nb_accelerate.training.optim.accumulation import AccumulationState, Window
from nb_accelerate.training.process import context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
    from nb_accelerate.training.optim import AcceleratedOptimizer
    from nb_accelerate.training.precision.scaler import LossScaler


@dataclass(kw_only=True)
class SharedTraining:
    """The prepared objects of this process, and the position of the training loop.

    Attributes:
        scaler: None until an `Accelerator` uses fp16.
        accumulations: positions in accumulation windows, of `Accelerator` objects that are still referred to.
        models: prepared models that are still referred to.
        given_optimizers: optimizers that were given to ``prepare``.
        before_step: called with each optimizer of this process before its step, prepared or not.
    """

    tracker: LoaderTracker = field(default_factory=LoaderTracker)
    window: Window = field(default_factory=Window)
    scaler: LossScaler | None = None
    accumulations: WeakSet[AccumulationState] = field(default_factory=WeakSet)
    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    given_optimizers: WeakSet[Optimizer] = field(default_factory=WeakSet)
    before_step: Callable[[Optimizer], None] | None = None
    _optimizers: list[ref[AcceleratedOptimizer]] = field(default_factory=list)

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """Prepared optimizers that are still referred to, in the order of preparation, which all ranks share."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def add_optimizer(self, optimizer: AcceleratedOptimizer) -> None:
        """Add a prepared optimizer, unless it is in the list."""
        with contextlib.suppress(TypeError):  # an engine's need not be one of torch
            self.given_optimizers.add(optimizer.optimizer)
        if not any(known is optimizer for known in self.optimizers):
            self._optimizers = [*map(ref, self.optimizers), ref(optimizer)]

    def accumulation(self, options: GradientAccumulationPlugin) -> AccumulationState:
        """Return the position of a new `Accelerator` in its accumulation window."""
        state = AccumulationState(options, self.tracker, self.window)
        self.accumulations.add(state)
        return state

    def begin_anew(self) -> None:
        """Begin new accumulation windows, and drop the gradients of all prepared models and optimizers.

        Called when a pool of ranks goes on after a failure: some ranks have accumulated batches that others have not,
        or gradients that are averaged on some ranks only.
        """
        for state in self.accumulations:
            state.step = 0
        self.window.join()
        for model in self.models:
            model.zero_grad()
        for optimizer in self.optimizers:
            optimizer.drop_gradients()


def shared_training() -> SharedTraining:
    """Return the `SharedTraining` of this process."""
    rank = context.this_rank()
    if rank.training is None:
        rank.training = SharedTraining()
    shared: SharedTraining = rank.training
    return shared


def _begin_anew() -> None:
    if context.this_rank().training is not None:
        shared_training().begin_anew()


group_replaced.subscribe(_begin_anew)
