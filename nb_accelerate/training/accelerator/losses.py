"""Report loss, memory, use of the device and phases of a step to the progress page, without waiting for the device.

What only tells about a run never stops it: see `only_reports`.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakMethod, WeakSet

import torch
import torch.distributed as dist
from torch.autograd.variable import Variable
from torch.utils.hooks import unserializable_hook

from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.base.seam import call_returned

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.base.progress_page import ProgressPage, RankMemory
    from nb_accelerate.training.state.choices import Prepared
    from nb_accelerate.training.strategies.strategy import Strategy


Report = TypeVar("Report", bound="Callable[..., None]")

logger = logging.getLogger("nb_accelerate")

# Least time between two reports. Each copies a number from the device, and the panel is redrawn no faster.
_REPORT_SECONDS = 0.1

# Least time between two queries of the utilisation: drivers average over up to a second and answer slowly.
_UTILISATION_SECONDS = 1.0

_WHAT = "the figure of memory"

_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0  # seconds between two measurements. A thousand tensors take some milliseconds.


def only_reports(what: str) -> Callable[[Report], Report]:
    """Decorate a method that reports about training, which goes on when the report fails."""

    def decorate(method: Report) -> Report:
        failed: WeakSet[Any] = WeakSet()

        @functools.wraps(method)
        def report(self: object, *args: Any, **kwargs: Any) -> None:
            if failed and self in failed:
                return
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                failed.add(self)
                logger.warning("Training goes on without %s, which failed (%s: %s)", what, type(error).__name__, error)

        return cast("Report", report)

    return decorate


@dataclass(eq=False)
class _LastLoss:
    """The newest loss that was not reported, since the one before was too new; the process, not an object, keeps it.

    When a call has returned, its `Accelerator` is gone.
    """

    loss: Tensor | None = None
    page: ProgressPage | None = None

    @only_reports("the last loss")
    def report(self) -> None:
        """Report it after all: it is the last one of a call, which tells runs apart that took a moment."""
        loss, self.loss = self.loss, None
        # A forked process has the loss of the one that it comes from, and another page.
        if loss is None or loss.numel() != 1 or self.page is not here():
            return
        # To read it from a device is to wait for all that is queued there, also for a collective that nobody joins.
        if loss.is_cpu or not dist.is_initialized():
            self.page.loss(float(loss))


_last = _LastLoss()
call_returned.subscribe(_last.report)


class LossReport:
    """Writes the loss of some steps, and the memory and utilisation of the device, to the progress page.

    A loss on a device is copied asynchronously into one buffer on the CPU. The value reported is the newest one whose
    copy has finished, as an event tells: usually the value of the report before.
    """

    def __init__(self, page: ProgressPage, kind: DeviceKind, held: MemoryReport) -> None:
        self._page = page
        self._held = held
        self._kind = kind
        self._reads_later = kind.reads_later
        self._due = 0.0
        self._arrived: Tensor | None = None
        self._copying: torch.Event | None = None
        self._computed: Tensor | None = None
        self._utilisation = kind.utilisation
        self._ask_at = 0.0

    @only_reports("the figures of loss and memory")
    def report(self, loss: Tensor) -> None:
        """Report the loss of a step, a tensor with one element; does nothing within `_REPORT_SECONDS` of the last."""
        now = time.monotonic()
        if self._reads_later:
            before, self._computed = self._computed, loss.detach()
            if now < self._due or before is None:
                return
            # It was computed with its step. On the host, what is done to it is no program that has to be compiled.
            loss = before.cpu()
        elif now < self._due:
            _last.loss = loss.detach()
            return
        _last.loss, _last.page = None, self._page
        self._due = now + _REPORT_SECONDS
        if loss.numel() == 1:
            self._report_loss(loss.detach().reshape(()))
        self._page.memory(self._kind.memory_allocated())
        self._held.report()
        if self._utilisation is not None and now >= self._ask_at:
            self._ask_at = now + _UTILISATION_SECONDS
            try:
                self._page.utilisation(self._utilisation())
            except Exception as error:  # those of NVML and amdsmi have no common base, and neither need be installed
                logger.debug("The utilisation of %s is not known: %s", self._kind.name, error)
                self._utilisation = None  # a missing driver or package stays missing

    def _report_loss(self, loss: Tensor) -> None:
        pins = self._kind.pins_memory and not loss.is_cpu
        if self._arrived is None or not pins:  # the first one may wait
            self._arrived = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=pins)
            self._page.loss(self._arrived.copy_(loss).item())
        elif self._copying is None or self._copying.query():
            if self._copying is not None:
                self._page.loss(self._arrived.item())
            self._arrived.copy_(loss, non_blocking=True)
            self._copying = torch.Event(loss.device)
            self._copying.record()


class MemoryReport:
    """Writes what is held for prepared models and optimizers to the progress page, now and then."""

    def __init__(
        self,
        page: ProgressPage,
        kind: DeviceKind,
        strategy: Strategy,
        prepared: Prepared,
        *,
        ranks: int,
    ) -> None:
        self._page = page
        self._kind = kind
        self._strategy = strategy
        self._models = prepared.models  # the list itself, which grows
        self._optimizers = prepared.optimizers
        self._ranks = ranks
        self._due = 0.0
        self._wait = _FIRST_WAIT
        self._base = 0
        method = WeakMethod(self.measure)

        def measure() -> None:
            register = method()
            if register is not None:
                register()

        page.measure = measure  # the page must not keep this, and so models, alive

    @only_reports(_WHAT)
    def prepared(self) -> None:
        """Measure after models or optimizers were prepared, or freed: what is held besides them is the base."""
        held = self.measured()
        self._base = max(0, held.used - held.states) if self._models else 0
        self._due, self._wait = 0.0, _FIRST_WAIT
        self.measure()

    @only_reports(_WHAT)
    def report(self) -> None:
        """Measure after a backward; seldom, and often only at first, when gradients and states come to be."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._wait
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self.measure()

    @only_reports(_WHAT)
    def measure(self) -> None:
        self._page.rank_memory(self.measured())

    def measured(self) -> RankMemory:
        """Return what this process holds now for models and optimizers, and what its device says."""
        optimizers: list[torch.optim.Optimizer] = [optimizer.optimizer for optimizer in self._optimizers]
        used = self._kind.memory_used()
        left = self._kind.memory_left(self._ranks)
        return replace(
            self._strategy.model_memory(self._models, optimizers),
            base=self._base,
            used=used,
            limit=used + left if used else 0,
            peak=max(self._kind.memory_peak(), used),
            sharding=self._strategy.sharding(self._models, optimizers),
        )


_FORWARD = Phase.FORWARD  # Python 3.11 looks members of an enum up slowly
_CALL = "_compiled_call_impl"


class _TimedCall:
    """Calls a model, and says so before.

    A forward hook would make the call of each model slower by two microseconds, would be saved with it, and be refused
    by TorchScript. What `torch.nn.Module.compile` sets is called in place of the model, and torch leaves it out when
    the model is saved or copied.
    """

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
    """Begin `Phase.WAITING` when the backward of a loss, which begins now, has computed all gradients."""
    # DistributedDataParallel waits for the exchange in a callback, which the autograd engine calls when there is
    # nothing left to compute, in the order in which they were queued: this one by the first gradient. On a device that
    # computes asynchronously the times say nothing.
    if loss.requires_grad:

        @unserializable_hook  # type: ignore[untyped-decorator]
        def queue(_: Tensor) -> None:  # a loss that is returned is pickled without it, and without a warning
            _queue_callback(page.wait_after_backward)

        loss.register_hook(queue)  # type: ignore[no-untyped-call]
