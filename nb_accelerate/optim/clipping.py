"""Limit gradients: on their true values, once per optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from nb_accelerate.optim.accumulation import AccumulationState
    from nb_accelerate.optim.optimizer import AcceleratedOptimizer
    from nb_accelerate.precision import Precision


def unscale(parameters: Sequence[Tensor], optimizers: Sequence[AcceleratedOptimizer], precision: Precision) -> None:
    """Make the gradients of ``parameters`` complete: of all ranks, and not multiplied with a loss scale."""
    wanted = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.complete_gradients()
    precision.unscale(parameters)  # of optimizers that another Accelerator prepared


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    optimizers: Sequence[AcceleratedOptimizer],
    accumulation: AccumulationState,
    precision: Precision,
) -> Tensor:
    """Scale gradients down so that their norm is at most ``max_norm``.

    Inside an accumulation window gradients are not complete: they are measured and left as they are.

    Args:
        parameters: whose gradients.
        max_norm: the greatest norm allowed.
        norm_type: 2 for the Euclidean norm, ``inf`` for the greatest element.
        optimizers: those that may own the parameters.
        accumulation: knows whether the window closes.
        precision: knows what gradients are multiplied with before they are unscaled.

    Returns:
        The norm before clipping: a tensor without dimensions.
    """
    items = _as_list(parameters)
    if not accumulation.sync_gradients:
        gradients = [item.grad for item in items if item.grad is not None]
        return precision.without_scale(nn.utils.get_total_norm(gradients, norm_type), items)
    unscale(items, optimizers, precision)
    return nn.utils.clip_grad_norm_(items, max_norm, norm_type)


def clip_grad_value(
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    *,
    optimizers: Sequence[AcceleratedOptimizer],
    accumulation: AccumulationState,
    precision: Precision,
) -> None:
    """Limit every element of the gradients to between ``-clip_value`` and ``clip_value``.

    Does nothing inside an accumulation window, where gradients are not complete.

    Args:
        parameters: whose gradients.
        clip_value: the greatest absolute value allowed.
        optimizers: those that may own the parameters.
        accumulation: knows whether the window closes.
        precision: knows what gradients are multiplied with before they are unscaled.
    """
    if not accumulation.sync_gradients:
        return
    items = _as_list(parameters)
    unscale(items, optimizers, precision)
    nn.utils.clip_grad_value_(items, clip_value)


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
