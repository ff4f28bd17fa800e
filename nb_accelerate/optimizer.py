"""Under the names of ``accelerate.optimizer``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.nested import send_to_device
from nb_accelerate.optim import AcceleratedOptimizer

if TYPE_CHECKING:
    import torch

__all__ = ["AcceleratedOptimizer", "move_to_device"]


def move_to_device(state: Any, device: torch.device | str | int) -> Any:
    """Return the state of an optimizer, or any other structure, with all tensors on ``device``."""
    return send_to_device(state, device)
