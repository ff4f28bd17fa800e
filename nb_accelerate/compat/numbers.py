"""Mixed precision without an `Accelerator` at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.config.env import Environment
from nb_accelerate.config.kwargs import AutocastKwargs, GradScalerKwargs
from nb_accelerate.config.precision import resolve_precision
from nb_accelerate.precision import select_precision
from nb_accelerate.state.choices import current_process, newest_choices

if TYPE_CHECKING:
    import contextlib

    from nb_accelerate.config.distributed import DistributedType


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return a block that computes in the precision of the newest `Accelerator`.

    Args:
        native_amp: False returns a block that changes nothing.
        autocast_kwargs: arguments of `torch.autocast`.
    """
    choices = newest_choices()
    chosen = resolve_precision(choices.mixed_precision if choices and native_amp else "no", Environment())
    options = autocast_kwargs or AutocastKwargs()
    return select_precision(chosen, current_process().kind, autocast=options, scaler=GradScalerKwargs()).autocast(
        options
    )


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this process's device.

    Args:
        distributed_type: accepted; plain scalers do for all setups there are.
        **kwargs: those of `torch.amp.GradScaler`.
    """
    del distributed_type
    return torch.amp.GradScaler(current_process().device.type, **kwargs)
