"""Obey commands of the notebook while a training loop runs: pause, save, change the learning rate, stop.

::

    optimizer.step()  -> counted on the progress page
    next batch        -> is there a command? one word of memory is compared
                         all ranks agree on the step after which they obey: see `base.progress_page.commands`

Commands are obeyed between two batches, when all lines of the loop's body have run, and a checkpoint is whole; where no
prepared loader is iterated, after the optimizer's step. Not between the last batch of an epoch and the next one that
trains: what comes then belongs to the epoch.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.base.progress_page.commands import NO_EPOCH_LOOP, CommandKind
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from nb_accelerate.base.config.project import ProjectConfiguration
    from nb_accelerate.base.progress_page.commands import Command, CommandReader
    from nb_accelerate.training.data.loader import DataLoaderShard
    from nb_accelerate.training.optim import AcceleratedOptimizer, AcceleratedScheduler
    from nb_accelerate.training.state.choices import Prepared, SharedTraining

_DECISION_INTERVAL = 0.001
"""Seconds between two reads of the notebook's decision. Memory that is shared tells no events."""

_PAUSE_INTERVAL = 0.02
"""Seconds between two reads of the next command during a pause."""


class Steering:
    """Obeys the commands of a progress page, for one `Accelerator`.

    Loaders know this object as long as the process lives: it keeps nothing alive that was prepared. ``save`` takes a
    folder, or "" for the next numbered one of the project.

    Attributes:
        stops: training is to end after this epoch.
    """

    def __init__(
        self,
        commands: CommandReader,
        shared: SharedTraining,
        prepared: Prepared,
        project: ProjectConfiguration,
        save: Callable[[str], Path],
    ) -> None:
        self._commands = commands
        self._shared = shared
        self._prepared = weakref.ref(prepared)
        self._project = project
        self._loops = shared.loops
        self._save = weakref.WeakMethod(save)
        self._num_epoch_loops = 0
        self._is_paused = False
        self.stops = False

    def begin(self) -> None:
        """Obey in loops over loaders from now on: an `Accelerator` that prepares a model is the one that trains."""
        self._loops.between_batches = self.between_batches
        self._loops.when_a_loop_begins = self._note_what_it_could_obey

    def after_step(self) -> None:
        """Count an optimizer's step. Outside of loops over prepared loaders, obey."""
        number = self._commands.count_step()
        if number and self._loops.active is None:
            self._obey_if_due(number)

    def between_batches(self, loader: DataLoaderShard) -> None:
        """Obey between two batches of a loader, or before its first. Not of one in a loop over another."""
        number = self._commands.pending
        if number and self._loops.loaders[:1] in ((), (loader,)):
            self._obey_if_due(number)

    def epochs(self, epochs: range) -> Iterator[int]:
        """Yield numbers of epochs until training is to stop; if that is before the last one, say so on the page."""
        self._count_epoch_loop(1)
        try:
            for epoch in epochs:
                yield epoch
                if self.stops:
                    if epoch + 1 < epochs.stop:
                        self._commands.note_end(epoch + 1, epochs.stop)
                    break
        finally:
            self._count_epoch_loop(-1)
            self.stops = False

    def _count_epoch_loop(self, change: int) -> None:
        self._num_epoch_loops += change
        if self._loops.when_a_loop_begins == self._note_what_it_could_obey:  # no other `Accelerator` obeys
            self._note_what_it_could_obey()

    def _note_what_it_could_obey(self) -> None:
        """Say it on the page, which each call or cell clears: when a loop over a loader or over epochs begins."""
        self._commands.note_folder(self._project.project_dir is not None)
        self._commands.note_epoch_loop(self._num_epoch_loops > 0)

    def _obey_if_due(self, number: int) -> None:
        commands = self._commands
        if not commands.is_due(number):
            return
        while (holds := commands.holds(number)) is None:
            time.sleep(_DECISION_INTERVAL)
        if holds:
            self._obey(number)

    def _obey(self, number: int) -> None:
        """Obey, and answer. What cannot be obeyed is raised in the notebook; training goes on."""
        command = self._commands.read()
        try:
            said, failed = self._done(command), False
        except Exception as error:  # told to who gave the command
            said, failed = str(error) or type(error).__name__, True
        was_paused = self._is_paused
        self._is_paused = command.kind is CommandKind.PAUSE or (was_paused and command.kind is not CommandKind.RESUME)
        self._commands.note_paused(self._is_paused)
        self._commands.answer(number, said, failed=failed)
        if self._is_paused and not was_paused:
            self._wait()

    def _wait(self) -> None:
        """Wait for the command to go on, and obey others meanwhile."""
        page = here()
        before = page.phase
        page.enter(Phase.NOTHING)  # its time is that of no phase
        try:
            while self._is_paused:
                time.sleep(_PAUSE_INTERVAL)
                if number := self._commands.pending:
                    self._obey_if_due(number)
        finally:  # an interrupt ends a pause too
            page.enter(before)
            self._is_paused = False
            self._commands.note_paused(False)

    def _done(self, command: Command) -> str:
        """Do what a command says; return what to answer."""
        if command.kind is CommandKind.SAVE:
            save = self._save()
            if save is None:
                raise ConfigError("Nothing was saved: the Accelerator of this training is gone.")
            return str(save(command.text))
        if command.kind is CommandKind.LEARNING_RATE:
            prepared = self._prepared()
            schedulers = prepared.schedulers if prepared is not None else []
            return change_learning_rate(command.value, self._shared.optimizers, schedulers)
        if command.kind is CommandKind.STOP:
            if not self._num_epoch_loops:
                raise ConfigError(NO_EPOCH_LOOP)
            self.stops = True
        return ""


def change_learning_rate(
    rate: float, optimizers: Sequence[AcceleratedOptimizer], schedulers: Sequence[AcceleratedScheduler]
) -> str:
    """Set the learning rate of the first parameter group, change all others by the same factor, return the one before.

    Schedules that compute rates from ``base_lrs``, or from the rate before, go on from there. `OneCycleLR`, `CyclicLR`
    and the parts of a `SequentialLR` keep rates elsewhere, and are not followed. A rate of 0 has no multiples:
    `ConfigError`.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    before = float(groups[0]["lr"]) if groups else 0.0
    if not before:
        why = "it is 0 now, so a schedule could not go on from it" if groups else "no optimizer has one"
        raise ConfigError(f"The learning rate was not changed: {why}.")
    factor = rate / before
    for group in groups:
        group["lr"] = _times(group["lr"], factor)
    for scheduler in schedulers:
        if hasattr(scheduler.scheduler, "base_lrs"):
            scheduler.scheduler.base_lrs = [_times(base, factor) for base in scheduler.scheduler.base_lrs]
    return repr(before)


def _times(rate: Any, factor: float) -> Any:
    # Compiled optimizers have it in a tensor, which has to stay the same one.
    return rate.mul_(factor) if isinstance(rate, torch.Tensor) else rate * factor
