"""A warning for a launched function that trains a model on each rank, with nothing that averages their gradients."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

from nb_accelerate.worker.groups import has_group

logger = logging.getLogger("nb_accelerate")

_CONTEXT = "nb_accelerate.process.context"
_AVERAGING = ("torch_xla", "deepspeed", "horovod")
"""Libraries that average gradients without a process group of torch.distributed that could be seen."""


def warn_of_plain_training() -> None:
    """Warn at the first step of an optimizer if this rank has then neither an `Accelerator` nor a process group.

    Does nothing where there is one rank, on all ranks but the first, and where torch's optimizers are not imported yet.
    """
    optimizers: Any = sys.modules.get("torch.optim.optimizer")
    world_size = os.environ.get("WORLD_SIZE", "1")
    if optimizers is not None and world_size != "1" and os.environ.get("RANK") == "0":
        _watch(optimizers, world_size)


@functools.cache  # a rank of a pool answers many calls, and each hook would be called at every step
def _watch(optimizers: Any, world_size: str) -> None:
    is_first = True

    def look(*_: object) -> None:
        # It stays registered: torch iterates over its hooks while it calls this one.
        nonlocal is_first
        if not is_first:
            return
        is_first = False
        context: Any = sys.modules.get(_CONTEXT)
        has_accelerator = context is not None and context.current() is not None
        if has_accelerator or has_group() or any(name in sys.modules for name in _AVERAGING):
            return
        logger.warning(
            "There is no Accelerator on the ranks, so each of the %s processes trains a model of its own with all of "
            "its rows. To train one model together: accelerator = Accelerator(); model, optimizer, loader = "
            "accelerator.prepare(model, optimizer, loader); and accelerator.backward(loss) in place of "
            "loss.backward()",
            world_size,
        )

    optimizers.register_optimizer_step_pre_hook(look)
