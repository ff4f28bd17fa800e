"""See to it that gradients are those of all ranks, at the step of their optimizer.

DistributedDataParallel averages the gradients of the model inside, while backward runs. A temperature that is learned,
a soft prompt or an image is a tensor of no model, and a layer may be made trainable after its model was wrapped: their
gradients are averaged here.
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
    """A model in a wrapper that averages gradients over ranks while backward runs."""

    def averaged(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients it averages."""
        ...

    def check_averaged(self) -> None:
        """Refuse gradients that it could not average, because there are parameters that got none."""
        ...


class GradientAverage:
    """Completes the gradients of one optimizer. All ranks call it together, before each step.

    Args:
        optimizer: whose gradients.
        collectives: how ranks talk to each other.
        wrappers: returns those that average gradients in backward.
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
        self._alone: list[Tensor] = []

    def __call__(self) -> None:
        """Average gradients that no wrapper averages; a rank that has none of a parameter takes part with zeros.

        Raises:
            ConfigError: parameters of a model got no gradient, and it was not told to expect that.
        """
        groups = self._optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self._known):
            self._find_out([parameter for group in groups for parameter in group["params"]])
        for wrapper in self._own:
            wrapper.check_averaged()
        alone = [parameter for parameter in self._alone if parameter.requires_grad]
        if not alone:
            return
        collectives = self._collectives
        has = torch.tensor([parameter.grad is not None for parameter in alone], dtype=torch.uint8)
        has = operations.reduce(collectives, has.to(collectives.device), "max")
        used = [parameter for parameter, anywhere in zip(alone, has.tolist(), strict=True) if anywhere]
        if not used:
            return
        mine = [torch.zeros_like(one) if one.grad is None else one.grad.to_dense() for one in used]
        for parameter, mean in zip(used, operations.reduce(collectives, mine, "mean"), strict=True):
            parameter.grad = mean

    def _find_out(self, parameters: list[Tensor]) -> None:
        """Look which parameters, of those that came since the last time, no wrapper takes care of."""
        new = {id(parameter): parameter for parameter in parameters if id(parameter) not in self._known}
        self._known = {id(parameter) for parameter in parameters}
        for wrapper in self._wrappers():
            averaged = {id(parameter) for parameter in wrapper.averaged()}
            if not averaged.isdisjoint(self._known):
                self._own.add(wrapper)
            new = {number: parameter for number, parameter in new.items() if number not in averaged}
        self._alone += new.values()
        self._begin([parameter for parameter in new.values() if parameter.requires_grad])

    def _begin(self, parameters: list[Tensor]) -> None:
        """Give parameters the values of rank 0, as prepared models get them, and say that they travel by themselves."""
        if not parameters:
            return
        with torch.no_grad():
            values = operations.broadcast(self._collectives, [parameter.detach() for parameter in parameters])
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        if self._collectives.rank == 0:
            logger.warning(
                "%d tensors that %s trains (the first has the shape %s) belong to no prepared model, so nobody "
                "averages their gradients over ranks while backward runs. They are averaged at each step. If they "
                "belong to a model, prepare it: model = accelerator.prepare(model).",
                len(parameters),
                type(self._optimizer).__name__,
                tuple(parameters[0].shape),
            )
