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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nb_accelerate.errors.traceback_lines import calling_line
from nb_accelerate.training.comm import operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from nb_accelerate.training.comm import Collectives

logger = logging.getLogger("nb_accelerate")

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number

_COMPARED = 4096  # numbers of each gradient that are compared between ranks, once


class AveragesGradients:
    """A prepared model whose every backward averages gradients over ranks, without a call before."""

    averages_always: bool = True
    compares: bool = True  # gradients that differ between ranks were not averaged
    ignored: Iterable[Tensor] = ()  # parameters whose gradients are to stay those of each rank
    left_out: Iterable[Tensor] = ()  # those whose gradients it leaves to `GradientAverage`, as it was told to

    def __init__(self, averaged: Iterable[Tensor] = (), left_out: Iterable[Tensor] = ()) -> None:
        self.averaged = averaged
        self.left_out = left_out

    def check_averaged(self) -> None:
        """Raise `ConfigError` if the last backward could not average all gradients. Called before each step."""

    def num_exchanges(self) -> int | None:
        """Return a number that grows when forwards have prepared backward to average; None while ranks train apart."""
        return None


@dataclass(eq=False)
class _Trained:
    """What an optimizer trains of a wrapper."""

    parameters: set[int]  # ids
    at_step: int = 0  # what `AveragesGradients.num_exchanges` was at the last step
    is_all: bool = False  # the optimizer trains nothing else
    is_compared: bool = False  # ranks have compared its gradients
    differ: bool = False  # they differed then


class GradientAverage:
    """Averages what backward left alone of the gradients of one optimizer. Collective: called before each step.

    A wrapper that nobody uses any more may be alive on one rank and freed on another. So ranks do together only what
    follows from forwards of wrappers, and from the order of the optimizer's parameters. ``renew`` puts what is trained
    now in the place of parameters that users have from before ``prepare``.
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
        self._trained: weakref.WeakKeyDictionary[AveragesGradients, _Trained] = weakref.WeakKeyDictionary()
        for wrapper in wrappers():  # earlier forwards of theirs were for others
            if not wrapper.averages_always:
                self._trained[wrapper] = _Trained(set(), wrapper.num_exchanges() or 0)
        self._known: list[list[Tensor]] = []
        self._left_alone: set[int] = set()
        self._warned: set[str] = set()

    def __call__(self, steps: bool = True) -> None:
        """Average the gradients; a rank without a gradient for a parameter contributes zeros.

        Without ``steps``, they are clipped next.
        """
        groups = self._optimizer.param_groups
        if not (
            len(groups) == len(self._known)
            and all(
                len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
                for group, known in zip(groups, self._known, strict=True)
            )
        ):
            self._classify()
        averaged = set(self._left_alone)
        covered: set[int] = set()  # by wrappers whose backward averages where their forward was called
        differing: set[int] = set()
        to_compare: list[_Trained] = []
        for wrapper, trained in self._trained.items():
            if not trained.parameters:
                continue
            wrapper.check_averaged()
            covered |= trained.parameters
            number = wrapper.num_exchanges()
            if number == trained.at_step:
                continue  # no forward since the last step: backward has averaged nothing
            if number is not None and steps:
                trained.at_step = number
            if trained.is_all and (number is None or (trained.is_compared and not trained.differ)):
                return  # nearly every step
            averaged |= trained.parameters
            if trained.differ:
                differing |= trained.parameters
            if number is not None and not trained.is_compared:
                trained.is_compared = True
                if wrapper.compares:
                    to_compare.append(trained)
        parameters = [parameter for known in self._known for parameter in known]
        compared = {key for trained in to_compare for key in trained.parameters}
        if to_compare and self._differ([parameter for parameter in parameters if id(parameter) in compared]):
            for trained in to_compare:
                trained.differ = True
            differing |= compared
            self._warn(_DIFFERING)
        unseen = covered - averaged
        if any(id(parameter) in unseen and parameter.grad is not None for parameter in parameters):
            self._warn(_UNSEEN)
        left = {id(parameter) for parameter in parameters} - averaged | differing
        average(
            self._collectives,
            [parameter for parameter in parameters if parameter.requires_grad and id(parameter) in left],
        )

    def _classify(self) -> None:
        """Find out which parameters wrappers average, when the groups of the optimizer have changed."""
        if self._renew is not None:
            self._renew(self._optimizer)
        before = {id(parameter) for known in self._known for parameter in known}
        self._known = [list(group["params"]) for group in self._optimizer.param_groups]
        rest = {id(parameter): parameter for known in self._known for parameter in known}
        trained = set(rest)
        # What no wrapper has is averaged here from now on. It begins with the values of rank 0, unless it was trained
        # before, or its wrapper was told to leave it out.
        for wrapper in self._wrappers():
            averaged = trained & {id(parameter) for parameter in wrapper.averaged}
            self._left_alone |= trained & {id(parameter) for parameter in wrapper.ignored}
            before |= {id(parameter) for parameter in wrapper.left_out}
            if wrapper.averages_always:
                self._left_alone |= averaged
            else:
                record = self._trained.setdefault(wrapper, _Trained(set()))
                record.parameters, record.is_all = averaged, trained <= averaged | self._left_alone
            for key in averaged | self._left_alone:
                rest.pop(key, None)
        self._synchronise([new for key, new in rest.items() if key not in before and new.requires_grad])

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

    def _differ(self, parameters: list[Tensor]) -> bool:
        """Return whether ranks have other gradients of parameters; they look once, before the first step."""
        bits = 0  # a sum of the bits of some numbers of each gradient, which no order of summing changes
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                flat = parameter.grad.detach().flatten()[:_COMPARED]
                flat = torch.view_as_real(flat) if flat.is_complex() else flat
                bits += int(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))
        pair = torch.tensor([bits, -bits], device=self._collectives.device)
        greatest, least = operations.reduce(self._collectives, pair, "max").tolist()
        return bool(greatest != -least)

    def _warn(self, what: str) -> None:
        if what not in self._warned and self._collectives.rank == 0:
            logger.warning(
                "%s: %s They are averaged now, at the step, where it takes longer than during backward.",
                calling_line() or "optimizer.step",
                what,
            )
        self._warned.add(what)


def average(collectives: Collectives, parameters: Sequence[Tensor]) -> None:
    """Average gradients; a rank without one contributes zeros, and one that no rank has stays None. Collective."""
    if not parameters:
        return
    mine = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in parameters]
    has = [float(each.grad is not None) for each in parameters]
    # Both in one exchange. Who has all gradients need not wait for the device to read who has which.
    *means, anywhere = operations.reduce(collectives, [*mine, mine[0].new_tensor(has)], "mean")
    used = has if all(has) else anywhere.tolist()
    for parameter, mean, is_used in zip(parameters, means, used, strict=True):
        is_sparse = parameter.grad is not None and parameter.grad.is_sparse  # which optimizers such as SparseAdam want
        parameter.grad = None if not is_used else mean.to_sparse(1) if is_sparse else mean


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
