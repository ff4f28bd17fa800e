"""Report what this process holds in memory to the progress page: for the panel, and for when it does not suffice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from weakref import WeakMethod

from nb_accelerate.base.progress_page import RankMemory
from nb_accelerate.training.accelerator.reporting import only_reports

if TYPE_CHECKING:
    import torch

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.base.progress_page import ProgressPage
    from nb_accelerate.training.accelerator.prepared import Prepared
    from nb_accelerate.training.strategies.strategy import Strategy

_WHAT = "the figure of memory"

_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0
"""Seconds between two measurements. A thousand tensors take some milliseconds."""


class MemoryReport:
    """Writes what is held for prepared models and optimizers to the progress page, now and then.

    Whoever has the page can have it measured, too, when memory did not suffice. ``ranks`` of this machine share its
    memory.
    """

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
            own = method()
            if own is not None:
                own()

        page.measure = measure  # the page must not keep this, and so models, alive

    @only_reports(_WHAT)
    def prepared(self) -> None:
        """Measure after models or optimizers were prepared, or freed: what is held besides them is the base."""
        held = self._measured()
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
        """Measure now."""
        self._page.rank_memory(self._measured())

    def _measured(self) -> RankMemory:
        optimizers: list[torch.optim.Optimizer] = [optimizer.optimizer for optimizer in self._optimizers]
        found = self._strategy.model_memory(self._models, optimizers)
        used = self._kind.memory_used()
        left = self._kind.memory_left(self._ranks)
        return RankMemory(
            parameters=found.parameters,
            gradients=found.gradients,
            optimizer=found.optimizer,
            pending=found.pending,
            base=self._base,
            used=used,
            limit=used + left if used else 0,
            peak=max(self._kind.memory_peak(), used),
            sharding=self._strategy.sharding(self._models, optimizers),
        )
