"""The base of all distributed setups. Its defaults are those of one process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn

    from nb_accelerate.comm import Collectives
    from nb_accelerate.config.kwargs import DistributedDataParallelKwargs


class Strategy:
    """How models are trained on the ranks of a run.

    Args:
        device: where models live.
        collectives: how ranks talk to each other.
    """

    def __init__(self, device: torch.device, collectives: Collectives) -> None:
        self.device = device
        self.collectives = collectives

    def prepare_model(self, model: nn.Module, *, place: bool = True, training: bool = True) -> nn.Module:
        """Return the model as it is to be trained. Called by ``prepare``, after the precision.

        Args:
            model: the user's model.
            place: move it to the device.
            training: False when it will only be evaluated, so that no gradients need to travel.
        """
        if place:
            model.to(self.device)
        return self.wrap(model) if training else model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model whose gradients are those of all ranks."""
        return model

    def use_ddp_options(self, options: DistributedDataParallelKwargs) -> None:
        """Wrap models with other options from now on, where they are wrapped in DistributedDataParallel."""

    def no_sync(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any] | None:
        """Return a block in which gradients stay on their rank, or None if they never travel."""
        del models
        return None

    def accumulate(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any] | None:
        """Return a block for a batch that does not close an accumulation window; None if there is nothing to do."""
        return self.no_sync(models)

    def complete_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[], None] | None:
        """Return what makes the gradients of an optimizer those of all ranks; None if backward did all of it.

        Called by ``prepare``; what it returns is called before each step of the optimizer, and before clipping.

        Args:
            optimizer: the user's.
            models: those that were prepared; looked at when the first step comes.
        """
        del optimizer, models
        return None

    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a block whose backward lets gradients travel, although the forward was in a `no_sync` block."""
        return contextlib.nullcontext()

    def join(self, models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a block in which ranks may have different numbers of batches. Called by ``join_uneven_inputs``."""
        return contextlib.nullcontext()
