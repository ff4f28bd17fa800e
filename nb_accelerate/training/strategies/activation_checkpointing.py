"""Keep only the inputs of a block for its backward, and compute the rest again there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.devices import DeviceKind


class CheckpointedForward:
    """Call the forward of a block; in training, keep its inputs alone. Pickles and deep-copies with the block.

    It takes the place of ``block.forward``, so that names of parameters stay as they are.
    """

    def __init__(self, forward: Callable[..., Any], *, offload: bool, kind: DeviceKind) -> None:
        self.__wrapped__ = forward  # inspect.signature follows it to the arguments of the block
        self.offload = offload
        self._device_type, self._pins = kind.name, kind.pins_memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs. Called by the block for each batch."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        kept: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.offload:  # pinned, so that copies to and from the device do not wait
            kept = torch.autograd.graph.save_on_cpu(self._pins, self._device_type)
        with kept:
            return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)
