"""Average, before an optimizer steps, the gradients that backward has not averaged.

DistributedDataParallel averages the gradients of the model that it wraps, in the first backward after each of its own
forwards. It does not see

- tensors outside of models (a learned temperature, a soft prompt, an image), layers that were made trainable or put in
  the place of others after their model was wrapped: they are averaged at each step;
- forwards of the model inside of it: what comes of them is averaged at the step that no forward of its own preceded;
- a second backward after one forward: all its gradients are averaged at each step if they differ in the first one.

An average of what is averaged already changes nothing. What is done depends on forwards of the wrapper, in which ranks
exchange data anyway, and on what ranks find out together: no rank decides by itself.
"""

from __future__ import annotations

import logging
import operator
import weakref
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nb_accelerate.errors.traceback_lines import calling_line
from nb_accelerate.training.comm import operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from nb_accelerate.training.comm import Collectives

logger = logging.getLogger("nb_accelerate")

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number."""

_COMPARED = 4096
"""Numbers of each gradient that are compared between ranks, once."""


class AveragesGradients:
    """A prepared model whose backward averages gradients over ranks; by default all of them, whatever was called."""

    compares: bool = True
    """Whether gradients that differ between ranks were not averaged."""

    @abstractmethod
    def averaged(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients its backward averages."""

    def ignored(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients are to stay those of each rank."""
        return ()

    def left_out(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients it leaves to `GradientAverage`, as it was told to."""
        return ()

    def check_averaged(self) -> None:
        """Check that the last backward averaged all gradients. Called before each step.

        Raises:
            ConfigError: it could not, because parameters got no gradient, and the wrapper was not told to expect that.
        """

    def num_exchanges(self) -> int | None:
        """Return a number that grows when forwards have prepared backward to average gradients.

        None if every backward averages, and if ranks train apart on purpose.
        """
        return None


@dataclass(eq=False)
class _Own:
    """What an optimizer trains of a wrapper.

    Attributes:
        parameters: those that it trains.
        at_step: what `AveragesGradients.num_exchanges` was at the last step.
        is_compared: whether ranks have compared its gradients.
        differ: whether they differed then.
        is_told: whether a warning was given.
    """

    parameters: list[Tensor]
    at_step: int = 0
    is_compared: bool = False
    differ: bool = False
    is_told: bool = False


class GradientAverage:
    """Averages what backward left alone of the gradients of one optimizer. Collective: called before each step.

    Args:
        wrappers: returns the prepared models whose backward averages gradients.
        renew: puts what is trained now in the place of parameters that users have from before ``prepare``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        collectives: Collectives,
        wrappers: Callable[[], Iterable[AveragesGradients]],
        renew: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._collectives = collectives
        self._wrappers = wrappers
        self._renew = renew
        self._own: weakref.WeakKeyDictionary[AveragesGradients, _Own] = weakref.WeakKeyDictionary()
        self._known: list[list[Tensor]] = []
        self._unaveraged: list[Tensor] = []

    def __call__(self, steps: bool = True) -> None:
        """Average the gradients; a rank without a gradient for a parameter contributes zeros.

        Args:
            steps: whether the optimizer steps next; else gradients are clipped before.

        Raises:
            ConfigError: see `AveragesGradients.check_averaged`.
        """
        if not self._knows_all():
            self._classify()
        unaveraged = self._unaveraged
        for wrapper, own in self._own.items():
            wrapper.check_averaged()
            number = wrapper.num_exchanges()
            if number is None:
                continue
            if number == own.at_step:
                unaveraged = unaveraged + own.parameters
                if any(one.grad is not None for one in own.parameters):
                    self._tell(own, _UNSEEN)
            elif own.differ or (not own.is_compared and self._differ(wrapper, own)):
                unaveraged = unaveraged + own.parameters
            if steps:
                own.at_step = number
        if unaveraged:
            self._average([parameter for parameter in unaveraged if parameter.requires_grad])

    def _knows_all(self) -> bool:
        groups = self._optimizer.param_groups
        return len(groups) == len(self._known) and all(
            len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
            for group, known in zip(groups, self._known, strict=True)
        )

    def _classify(self) -> None:
        """Find out which parameters wrappers average, when the groups of the optimizer have changed."""
        if self._renew is not None:
            self._renew(self._optimizer)
        before = {id(parameter) for known in self._known for parameter in known}
        self._known = [list(group["params"]) for group in self._optimizer.param_groups]
        rest = {id(parameter): parameter for known in self._known for parameter in known}
        earlier, self._own = self._own, weakref.WeakKeyDictionary()
        left_out: set[int] = set()
        for wrapper in self._wrappers():
            trained = [rest.pop(id(parameter)) for parameter in wrapper.averaged() if id(parameter) in rest]
            if trained:
                self._own[wrapper] = own = earlier.get(wrapper) or _Own(trained)
                own.parameters = trained
            for parameter in wrapper.ignored():
                rest.pop(id(parameter), None)
            left_out |= {id(parameter) for parameter in wrapper.left_out()}
        self._unaveraged = list(rest.values())
        known_before = before | left_out
        self._synchronise([one for key, one in rest.items() if key not in known_before and one.requires_grad])

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

    def _differ(self, wrapper: AveragesGradients, own: _Own) -> bool:
        """Return whether ranks have other gradients of a wrapper; they look once, before the first step."""
        own.is_compared = True
        if wrapper.compares:
            bits = sum(_bits(one.grad) for one in own.parameters if one.grad is not None)
            pair = torch.tensor([bits, -bits], device=self._collectives.device)
            greatest, least = operations.reduce(self._collectives, pair, "max").tolist()
            own.differ = greatest != -least
            if own.differ:
                self._tell(own, _DIFFERING)
        return own.differ

    def _tell(self, own: _Own, what: str) -> None:
        if not own.is_told and self._collectives.rank == 0:
            logger.warning(
                "%s: %s They are averaged now, at the step, where it takes longer than during backward.",
                calling_line() or "optimizer.step",
                what,
            )
        own.is_told = True

    def _average(self, parameters: list[Tensor]) -> None:
        if not parameters:
            return
        collectives = self._collectives
        has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        has = operations.reduce(collectives, has.to(collectives.device), "max")
        used = [parameter for parameter, anywhere in zip(parameters, has.tolist(), strict=True) if anywhere]
        if not used:
            return
        mine = [torch.zeros_like(one) if one.grad is None else one.grad.to_dense() for one in used]
        for parameter, mean in zip(used, operations.reduce(collectives, mine, "mean"), strict=True):
            parameter.grad = mean


_UNSEEN = (
    "backward has not averaged these gradients over ranks, because no forward of the prepared model came before it. It "
    "was called through unwrap_model(model), model.module, a part of it, or what held it before prepare. Call what "
    "prepare returned, outputs = model(inputs), and other methods inside of forward only."
)

_DIFFERING = (
    "backward has not averaged all of these gradients over ranks, as after two backwards for one forward, or where a "
    "part of the model was called by itself. Call accelerator.backward once for each model(inputs), with the sum of "
    "the losses."
)


def _bits(gradient: Tensor) -> int:
    """Return a sum of the bits of some numbers of a gradient, which no order of summing changes."""
    if gradient.is_sparse:
        return 0
    flat = gradient.detach().flatten()[:_COMPARED]
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    return int(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))
