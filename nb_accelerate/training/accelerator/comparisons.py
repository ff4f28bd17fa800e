"""Notice losses of ranks that are equal: ranks train with the same rows.

They are compared through the store by which ranks have met: no rank waits, and nothing is exchanged between steps.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import TYPE_CHECKING

import torch.distributed as dist

from nb_accelerate.errors.traceback_lines import calling_line
from nb_accelerate.training.accelerator.losses import only_reports

if TYPE_CHECKING:
    from torch import Tensor

    from nb_accelerate.training.data import LoaderTracker
    from nb_accelerate.training.strategies import Strategy


logger = logging.getLogger("nb_accelerate")

_COMPARED = 3
"""Losses that are compared. Those of different rows differ in the first one already."""

_COMPARED_AFTER = 6
"""Steps after which rank 0 compares: the others are one step behind it at most, since ranks wait for one another when
gradients are averaged."""

_counter = itertools.count()


class EqualLosses:
    """Compares the first losses of the ranks, each of which is to have rows of its own, while `is_on`.

    So a loop draws its batches by hand, or goes over a loader that was not prepared: over a prepared one (``tracker``)
    rows are shared out. With ``reads_later``, reading a loss would have a program compiled.
    """

    def __init__(self, strategy: Strategy, tracker: LoaderTracker, *, reads_later: bool) -> None:
        world_size = strategy.data_collectives.world_size
        self.is_on = False
        self._is_of_use = 1 < world_size == strategy.collectives.world_size and not reads_later
        self._rank = strategy.collectives.rank
        self._world_size = world_size
        self._tracker = tracker
        self._key = ""
        self._losses: list[float] = []

    def begin(self) -> None:
        """Compare the losses that follow: another model was prepared."""
        self.is_on = self._is_of_use
        self._key = f"nb_accelerate/losses {next(_counter)} of rank"
        self._losses = []

    @only_reports("the comparison of losses")
    def add(self, loss: Tensor) -> None:
        """Take the loss of a step. Waits for the device in the first few steps."""
        self.is_on = self._tracker.active is None and loss.numel() == 1 and dist.is_initialized()
        if not self.is_on:
            return
        self._losses.append(float(loss.detach()) if len(self._losses) < _COMPARED else math.nan)
        own = self._losses[:_COMPARED]
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only one that all ranks are sure to share
        if len(self._losses) == _COMPARED:
            # Where nothing is learnt, rows say nothing.
            self.is_on = all(map(math.isfinite, own)) and len(set(own)) > 1
            if self.is_on:
                store.set(f"{self._key} {self._rank}", repr(own))
                self.is_on = self._rank == 0
        elif len(self._losses) == _COMPARED_AFTER:
            self.is_on = False
            keys = [f"{self._key} {rank}" for rank in range(self._world_size)]
            if store.check(keys) and len({bytes(store.get(key)) for key in keys}) == 1:
                self._is_of_use = False
                logger.warning(
                    "%s: the first losses are equal to the last bit on all %d processes, so each of them trains with "
                    "the same rows, and no work is shared. Prepare a DataLoader, and loop over it; or give each "
                    "process rows of its own: set_seed(seed, device_specific=True) before batches are drawn, or "
                    "rows[accelerator.process_index :: accelerator.num_processes]",
                    calling_line() or "accelerator.backward",
                    self._world_size,
                )
