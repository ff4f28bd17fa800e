"""Measure, within backward, the wait for the exchange of gradients apart from their computation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd.variable import Variable
from torch.utils.hooks import unserializable_hook

if TYPE_CHECKING:
    from torch import Tensor

    from nb_accelerate.base.progress_page import ProgressPage

_queue_callback: Any = Variable._execution_engine.queue_callback  # noqa: SLF001 - as FSDP of torch does


def time_exchange(loss: Tensor, page: ProgressPage) -> None:
    """Begin `Phase.WAITING` when the backward of a loss has computed all gradients.

    Wrappers such as DistributedDataParallel wait for the exchange in a callback, which the autograd engine calls when
    there is nothing left to compute. The engine calls them in the order in which they were queued, and this one is
    queued by the first gradient.
    Called before the backward. On a device that computes asynchronously the times say nothing.
    """
    if loss.requires_grad:
        page.times_waits()

        @unserializable_hook  # type: ignore[untyped-decorator]
        def queue(_: Tensor) -> None:  # a loss that is returned is pickled without it, and without a warning
            _queue_callback(page.wait_after_backward)

        loss.register_hook(queue)  # type: ignore[no-untyped-call]
