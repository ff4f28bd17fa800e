"""Notice weights of ranks that have come to differ, and losses that are equal: ranks train with the same rows.

Both are compared through the store by which ranks have met: no rank waits, and nothing is exchanged between steps.
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nb_accelerate.errors.traceback_lines import calling_line
from nb_accelerate.training.accelerator.losses import only_reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nb_accelerate.training.data import LoaderTracker
    from nb_accelerate.training.state.choices import Prepared
    from nb_accelerate.training.strategies import Strategy


logger = logging.getLogger("nb_accelerate")

_PARAMETERS = 16
"""Parameters that are looked at, evenly spaced."""

_VALUES = 4
"""Values of each of them."""

_TOLERANCE = 1e-3
"""Relative difference that is none: GPUs of different types round differently."""

_KEPT = 4
"""Positions of which rank 0 keeps its own weights: others are that far ahead of it at most."""

_COMPARED = 3
"""Losses that are compared. Those of different rows differ in the first one already."""

_COMPARED_AFTER = 6
"""Steps after which rank 0 compares: the others are one step behind it at most, since ranks wait for one another when
gradients are averaged."""

_counter = itertools.count()


class Replicas:
    """Compares the weights of models of which each rank has a whole one: ``load_state_dict`` may make them differ, say.

    When a pass over a prepared loader begins, each rank writes some of its weights to the store; rank 0 compares them
    when its passes begin and end. Ranks may be out of step: weights are compared that were written after equally many
    optimizer steps, and passes since.
    """

    def __init__(self, strategy: Strategy, prepared: Prepared) -> None:
        self._strategy = strategy
        self._prepared = weakref.ref(prepared)
        self._key = f"nb_accelerate/weights {next(_counter)} of rank"
        self._num_steps = -1
        self._num_passes = 0
        self._own: dict[str, list[float]] = {}
        self._is_told = False

    @only_reports("the comparison of weights")
    def check(self, begins: bool) -> None:
        """Look at the weights; called when a pass over a loader begins and ends."""
        prepared = self._prepared()
        collectives = self._strategy.collectives
        if prepared is None or collectives.world_size == 1 or self._is_told or not dist.is_initialized():
            return
        try:
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only one that all are sure to share
            if begins and (values := _some_of(self._strategy.replicated(prepared.models))):
                num_steps = sum(optimizer.num_steps for optimizer in prepared.optimizers)
                self._num_passes = self._num_passes + 1 if num_steps == self._num_steps else 0
                self._num_steps = num_steps
                position = f"{num_steps} {self._num_passes}"
                store.set(f"{self._key} {collectives.rank}", f"{position}: {' '.join(map(repr, values))}")
                self._own = dict([*self._own.items(), (position, values)][-_KEPT:])
            if collectives.rank == 0 and self._own:
                self._compare(store, collectives.world_size)
        except (dist.DistError, OSError):  # who serves the store has gone
            logger.debug("the weights of the ranks cannot be compared", exc_info=True)

    def prepared_again(self) -> None:
        """Note that models were given the weights of rank 0."""
        self._own.clear()
        self._is_told = False

    def _compare(self, store: Any, world_size: int) -> None:
        for rank in range(1, world_size):
            key = f"{self._key} {rank}"
            if not store.check([key]):
                continue
            position, _, values = store.get(key).decode().partition(":")
            own, their = self._own.get(position, []), [*map(float, values.split())]
            if len(own) == len(their) and any(map(_differ, own, their)):
                self._is_told = True
                logger.warning(
                    "%s: the weights on rank %d are not those on rank 0, as after load_state_dict with other weights "
                    "on each rank, or a step that only some ranks took. They stay different, and so do results. Load "
                    "the same weights on all ranks; or give all those of rank 0: model = accelerator.prepare(model)",
                    calling_line() or "a loop over a prepared loader",
                    rank,
                )
                return


def _differ(own: float, other: float) -> bool:
    return abs(own - other) > _TOLERANCE * max(abs(own), abs(other))


def _some_of(parameters: Sequence[Tensor]) -> list[float]:
    """Return some values, the same ones on all ranks."""
    values: list[float] = []
    for parameter in parameters[:: max(1, len(parameters) // _PARAMETERS)]:
        flat = parameter.detach().reshape(-1)
        values += flat[:: max(1, len(flat) // _VALUES)][:_VALUES].double().tolist()
    return values


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
