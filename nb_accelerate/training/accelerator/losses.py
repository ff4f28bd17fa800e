"""Report the loss and the use of the device to the progress page, without waiting for the device."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from nb_accelerate.training.accelerator.reporting import only_reports

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.base.progress_page import ProgressPage
    from nb_accelerate.training.accelerator.memory_report import MemoryReport

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 0.1
"""Least time between two reports. Each copies a number from the device, and the panel is redrawn no faster."""

_UTILISATION_SECONDS = 1.0
"""Least time between two queries of the utilisation: drivers average over up to a second and answer slowly."""


class LossReport:
    """Writes the loss of some steps, and the memory and utilisation of the device, to the progress page.

    A loss on a device is copied asynchronously into one buffer on the CPU. The value reported is the newest one whose
    copy has finished, usually that of the report before.
    """

    def __init__(self, page: ProgressPage, kind: DeviceKind, held: MemoryReport) -> None:
        self._page = page
        self._held = held
        self._kind = kind
        self._reads_later = kind.reads_later
        self._due = 0.0
        self._arrived: Tensor | None = None
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
            return
        self._due = now + _REPORT_SECONDS
        if loss.numel() == 1:
            if self._arrived is None:
                pins = self._kind.pins_memory
                self._arrived = torch.full((), float("nan"), dtype=torch.float32, pin_memory=pins)
                self._arrived.copy_(loss.detach().reshape(()))  # the first one may wait
            else:
                self._arrived.copy_(loss.detach().reshape(()), non_blocking=True)
            self._page.loss(self._arrived.item())
        self._page.memory(self._kind.memory_allocated())
        self._held.report()
        if self._utilisation is not None and now >= self._ask_at:
            self._ask_at = now + _UTILISATION_SECONDS
            self._ask(self._utilisation)

    def _ask(self, utilisation: Callable[[], int]) -> None:
        """Query the utilisation; after one failure never again, since a missing driver or package stays missing."""
        try:
            percent = utilisation()
        except Exception as error:  # those of NVML and amdsmi have no common base, and neither need be installed
            logger.debug("The utilisation of %s is not known: %s", self._kind.name, error)
            self._utilisation = None
        else:
            self._page.utilisation(percent)
