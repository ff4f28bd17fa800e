"""Average, before an optimizer steps, the gradients that backward has not averaged.

DistributedDataParallel averages the gradients of the model that it wraps while backward runs. It does not know tensors
outside of models (a learned temperature, a soft prompt, an image), nor layers that were made trainable after their
model was wrapped. `GradientAverage` averages their gradients.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from nb_accelerate.comm import operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from nb_accelerate.comm import Collectives

logger = logging.getLogger("nb_accelerate")


class AveragesGradients(Protocol):
    """A prepared model whose backward averages gradients over ranks."""

    def averaged(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients its backward averages."""
        ...

    def left_out(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients it leaves to `GradientAverage`, as it was told to."""
        ...

    def check_averaged(self) -> None:
        """Check that the last backward averaged all gradients. Called before each step.

        Raises:
            ConfigError: it could not, because parameters got no gradient, and the wrapper was not told to expect that.
        """
        ...


class GradientAverage:
    """Averages what backward left alone of the gradients of one optimizer. Collective: called before each step.

    Args:
        optimizer: whose gradients.
        collectives: how ranks exchange data.
        wrappers: returns the prepared models whose backward averages gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        collectives: Collectives,
        wrappers: Callable[[], Iterable[AveragesGradients]],
    ) -> None:
        self._optimizer = optimizer
        self._collectives = collectives
        self._wrappers = wrappers
        self._own: weakref.WeakSet[AveragesGradients] = weakref.WeakSet()
        self._known: set[int] = set()
        self._unaveraged: list[Tensor] = []

    def __call__(self) -> None:
        """Average the gradients; a rank without a gradient for a parameter contributes zeros.

        Raises:
            ConfigError: see `AveragesGradients.check_averaged`.
        """
        groups = self._optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self._known):
            self._classify([parameter for group in groups for parameter in group["params"]])
        for wrapper in self._own:
            wrapper.check_averaged()
        unaveraged = [parameter for parameter in self._unaveraged if parameter.requires_grad]
        if not unaveraged:
            return
        collectives = self._collectives
        has = torch.tensor([parameter.grad is not None for parameter in unaveraged], dtype=torch.uint8)
        has = operations.reduce(collectives, has.to(collectives.device), "max")
        used = [parameter for parameter, anywhere in zip(unaveraged, has.tolist(), strict=True) if anywhere]
        if not used:
            return
        mine = [torch.zeros_like(one) if one.grad is None else one.grad.to_dense() for one in used]
        for parameter, mean in zip(used, operations.reduce(collectives, mine, "mean"), strict=True):
            parameter.grad = mean

    def _classify(self, parameters: list[Tensor]) -> None:
        """Find out which of the parameters that were added since the last call no wrapper averages."""
        new = {id(parameter): parameter for parameter in parameters if id(parameter) not in self._known}
        self._known = {id(parameter) for parameter in parameters}
        for wrapper in self._wrappers():
            averaged = {id(parameter) for parameter in wrapper.averaged()}
            if not averaged.isdisjoint(self._known):
                self._own.add(wrapper)
            new = {number: parameter for number, parameter in new.items() if number not in averaged}
        self._unaveraged += new.values()
        left_out = {id(parameter) for wrapper in self._wrappers() for parameter in wrapper.left_out()}
        new = {number: parameter for number, parameter in new.items() if number not in left_out}
        self._synchronise([parameter for parameter in new.values() if parameter.requires_grad])

    def _synchronise(self, parameters: list[Tensor]) -> None:
        """Broadcast the values of rank 0, as for prepared models, and warn that no model averages their gradients."""
        if not parameters:
            return
        with torch.no_grad():
            values = operations.broadcast(self._collectives, [parameter.detach() for parameter in parameters])
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        if self._collectives.rank == 0:
            logger.warning(
                "%d tensors that %s trains (the first has the shape %s) belong to no prepared model, so "
                "backward does not average their gradients over ranks. They are averaged at each step. If they "
                "belong to a model, prepare it: model = accelerator.prepare(model).",
                len(parameters),
                type(self._optimizer).__name__,
                tuple(parameters[0].shape),
            )
