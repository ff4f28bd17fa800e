"""Clip gradients when they are complete: averaged over all ranks, and divided by the loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from nb_accelerate.training.optim.accumulation import AccumulationState
    from nb_accelerate.training.optim.optimizer import AcceleratedOptimizer
    from nb_accelerate.training.precision import Precision


class ClipsGradients(Protocol):
    """The part of `training.strategies.Strategy` that clipping needs; the arguments are described there."""

    def current_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that are trained in place of those given."""
        ...

    def grad_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of all gradients together."""
        ...

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients down to a norm, and return the norm before."""
        ...

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Limit every element of the gradients."""
        ...


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    optimizers: Sequence[AcceleratedOptimizer],
    accumulation: AccumulationState,
    precision: Precision,
    strategy: ClipsGradients,
) -> Tensor:
    """Scale gradients down so that their norm is at most ``max_norm``.

    Inside an accumulation window gradients are not complete: the norm is returned, and they are not changed.

    Args:
        norm_type: 2 for the Euclidean norm, ``inf`` for the greatest absolute value.
        optimizers: those that may own the parameters.
        accumulation: knows whether the window closes.
        precision: divides gradients by the loss scale.
        strategy: computes norms, also of gradients that are sharded over ranks.

    Returns:
        The norm before clipping: a tensor of shape ``()``.
    """
    items = strategy.current_parameters(_as_iterable(parameters))
    if not accumulation.sync_gradients:
        return precision.without_scale(strategy.grad_norm(items, norm_type), items)
    _complete(items, optimizers, precision)
    return strategy.clip_grad_norm(items, max_norm, norm_type)


def clip_grad_value(
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    *,
    optimizers: Sequence[AcceleratedOptimizer],
    accumulation: AccumulationState,
    precision: Precision,
    strategy: ClipsGradients,
) -> None:
    """Limit every element of the gradients to between ``-clip_value`` and ``clip_value``.

    Does nothing inside an accumulation window, where gradients are not complete.

    Args:
        optimizers: see `clip_grad_norm`.
        accumulation: see `clip_grad_norm`.
        precision: see `clip_grad_norm`.
        strategy: see `clip_grad_norm`.
    """
    if not accumulation.sync_gradients:
        return
    items = strategy.current_parameters(_as_iterable(parameters))
    _complete(items, optimizers, precision)
    strategy.clip_grad_value(items, clip_value)


def _complete(parameters: Sequence[Tensor], optimizers: Sequence[AcceleratedOptimizer], precision: Precision) -> None:
    """Average gradients over all ranks, and divide them by the loss scale."""
    incomplete = [optimizer for optimizer in optimizers if optimizer.completes_gradients]
    if incomplete:
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in incomplete:
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.complete_gradients()
    precision.unscale(parameters)  # of optimizers that another Accelerator prepared


def _as_iterable(parameters: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else parameters
