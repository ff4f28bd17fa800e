"""Phases of a step that only hooks can see: forward, and the wait for the exchange of gradients within backward.

A forward hook would make the call of each model slower by two microseconds, would be saved with it, and be refused by
TorchScript. What `torch.nn.Module.compile` sets is called in place of the model, and torch leaves it out when the model
is saved or copied.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.variable import Variable
from torch.utils.hooks import unserializable_hook

from nb_accelerate.base.progress_page import Phase, here

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nb_accelerate.base.progress_page import ProgressPage


_FORWARD = Phase.FORWARD  # Python 3.11 looks members of an enum up slowly
_CALL = "_compiled_call_impl"


class _TimedCall:
    """Calls a model, and says so before."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # so that the model goes when its last user does
        self._compiled = vars(model).get(_CALL)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model is not compiled, and not timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            page = here()
            page.enter(_FORWARD)
            page.saw_forward = True
        model: Any = self._model()
        call = self._compiled or model._call_impl  # noqa: SLF001 - what torch calls unless the model is compiled
        return call(*args, **kwargs)


def time_forward(model: nn.Module) -> None:
    """Make each call of a prepared model begin `Phase.FORWARD`, where somebody may read the page of this process."""
    page = here()
    if page.is_read:
        page.saw_forward = page.saw_forward or False
        if not isinstance(vars(model).get(_CALL), _TimedCall):
            vars(model)[_CALL] = _TimedCall(model)


_queue_callback: Any = Variable._execution_engine.queue_callback  # noqa: SLF001 - as FSDP of torch does


def time_exchange(loss: Tensor, page: ProgressPage) -> None:
    """Begin `Phase.WAITING` when the backward of a loss, which begins now, has computed all gradients.

    DistributedDataParallel waits for the exchange in a callback, which the autograd engine calls when there is nothing
    left to compute, in the order in which they were queued: this one by the first gradient. On a device that computes
    asynchronously the times say nothing.
    """
    if loss.requires_grad:

        @unserializable_hook  # type: ignore[untyped-decorator]
        def queue(_: Tensor) -> None:  # a loss that is returned is pickled without it, and without a warning
            _queue_callback(page.wait_after_backward)

        loss.register_hook(queue)  # type: ignore[no-untyped-call]
