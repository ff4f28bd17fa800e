"""Names of ``accelerate.optimizer``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nb_accelerate.training.optim import AcceleratedOptimizer
from nb_accelerate.training.pytree import send_to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["AcceleratedOptimizer", "move_to_device", "patch_optimizer_step"]

P = ParamSpec("P")
R = TypeVar("R")


def move_to_device(state: Any, device: torch.device | str | int) -> Any:
    """Return the state of an optimizer, or any other pytree, with all tensors on ``device``."""
    return send_to_device(state, device)


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Callable[P, R]) -> Callable[P, R]:
    """Return ``method``, the ``step`` of an optimizer, so that it notes when it runs.

    It sets ``accelerated_optimizer._accelerate_step_called`` to True: a scaler that skips the step does not call it.
    Prepared optimizers know by themselves, see `AcceleratedOptimizer.step_was_skipped`.

    Args:
        accelerated_optimizer: where to note it.
        method: the method.
    """

    @functools.wraps(method)
    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        vars(accelerated_optimizer)["_accelerate_step_called"] = True
        return method(*args, **kwargs)

    return noted
