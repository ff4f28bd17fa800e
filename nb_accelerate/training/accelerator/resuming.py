"""A loop over epochs that goes on from the newest checkpoint, and saves when it is time.

::

    newest whole checkpoint, if there is one --> epoch and batch to go on with --> for epoch ... for batch ...
                                                            a batch is over: due? asked to by a signal? --> save

All ranks save after the same batch. Intervals in steps and epochs are the same everywhere; clocks and signals are not,
so ranks ask each other now and then, and agree on when they ask again.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_flag, check_whole
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.project import SaveInterval
from nb_accelerate.base.progress_page import here
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator.checkpoints import CheckpointMixin
from nb_accelerate.training.checkpoint.fitting import position_here
from nb_accelerate.training.checkpoint.numbered import checkpoints_in, newest_of_others, next_number
from nb_accelerate.training.checkpoint.shared_staging import gather_from_all_ranks, run_on_all_ranks
from nb_accelerate.training.process.notes import note

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from types import FrameType

    from nb_accelerate.base.config.project import ProjectConfiguration
    from nb_accelerate.training.accelerator.core import Core
    from nb_accelerate.training.data import DataLoaderShard


_ASK_EVERY = 0.25  # seconds between two questions of ranks to each other. A question takes a fraction of a millisecond.

_MOST_STEPS = 1000  # upper limit of the steps between two questions, for steps that take almost no time


class CheckpointSchedule:
    """Decide when the next checkpoint is due, the same on all ranks. Without an interval, only signals ask for one."""

    def __init__(self, core: Core, interval: SaveInterval | None, project: ProjectConfiguration) -> None:
        self._core = core
        self._interval = interval
        self._signals = signals = project.signals
        self._saved_at_step = self._step
        self._saved_at = time.monotonic()
        self._asked_at = time.monotonic()
        self._steps_to_question = 1
        self._steps_since = 0
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._asks = core.steering.asks or (
            core.collectives.world_size > 1 and (bool(signals) or (interval is not None and interval.unit == "seconds"))
        )
        self.is_due = False
        self.is_asked_to_end = False

    @property
    def _step(self) -> int:
        return self._core.registry.progress.global_step or 0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            for number in self._signals:
                self._before[number] = signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; a second one does at once what it did before."""
        before = self._before.get(signal.Signals(number))
        # Nothing is saved in a handler: it may run amid a collective, which the other ranks would leave alone.
        if self._received is not None:
            if callable(before):
                before(number, frame)
            elif before != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        self._received = signal.Signals(number)

    def count_step(self) -> None:
        """Count a batch that is handed out."""
        self._core.registry.progress.global_step = self._step + 1
        self._steps_since += 1

    def end_step(self) -> None:
        """Decide whether a checkpoint is due after a batch that is not the last of its epoch."""
        if self._core.steering.has_uneven_batches:
            return
        interval = self._interval
        if interval is not None and interval.unit == "steps":
            self.is_due |= self._step - self._saved_at_step >= interval.amount
        self._steps_to_question -= 1
        if not self._asks:
            self._core.steering.agree()
            self._decide(self._time_is_over(), self._received is not None)
        elif self._steps_to_question <= 0:
            self._ask()

    def end_epoch(self, epoch: int, *, is_last: bool) -> None:
        """Decide whether a checkpoint is due when an epoch, and what the user does after it, is over.

        Raises:
            ConfigError: ranks come here with different numbers of batches, so that they cannot save together.
        """
        if self._core.steering.has_uneven_batches:
            raise ConfigError(
                "The loop over resumable stands inside join_uneven_inputs, in which ranks cannot save together. Write "
                "join_uneven_inputs inside the loop, around the batches of one epoch."
            )
        interval = self._interval
        has_news = self._step > self._saved_at_step
        if interval is not None:
            if interval.unit == "epochs":
                self.is_due |= (epoch + 1) % int(interval.amount) == 0
            elif interval.unit == "steps":
                self.is_due |= self._step - self._saved_at_step >= interval.amount
            self.is_due |= is_last and has_news
        if self._core.collectives.world_size > 1:
            self._ask()
        else:
            self._decide(self._time_is_over(), self._received is not None)

    def saved(self) -> None:
        """Note that a checkpoint was saved, and end training as before the handler if a signal has asked for that."""
        self.is_due = False
        self._saved_at_step = self._step
        self._saved_at = time.monotonic()
        if not self.is_asked_to_end:
            return
        number = self._received or self._signals[0]  # which another rank has received
        before: Callable[[int, Any], Any] | Any = self._before.get(number)
        # The handlers of before, or the one that is called next would come back here.
        self.__exit__()
        if callable(before):
            before(number, None)
        if number is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _time_is_over(self) -> bool:
        interval = self._interval
        if interval is None or interval.unit != "seconds":
            return False
        return time.monotonic() - self._saved_at >= interval.amount

    def _ask(self) -> None:
        """Agree on all ranks, by the clock of rank 0, which also sets the number of steps until the next time."""
        now = time.monotonic()
        seconds_per_step = (now - self._asked_at) / max(self._steps_since, 1)
        steps = min(max(int(_ASK_EVERY / max(seconds_per_step, 1e-9)), 1), _MOST_STEPS)
        steering = self._core.steering
        mine = (steps, self._time_is_over(), self._received is not None, self.is_due, steering.own)
        of_ranks = self._core.collectives.all_gather_object(mine)
        self._asked_at, self._steps_since = now, 0
        self._steps_to_question = of_ranks[0][0]
        self._decide(of_ranks[0][1], any(signalled for _, _, signalled, _, _ in of_ranks))
        self.is_due |= any(due for *_, due, _ in of_ranks)  # a rank with fewer batches has counted fewer steps
        steering.note(asked for *_, asked in of_ranks)

    def _decide(self, time_is_over: bool, signalled: bool) -> None:
        self.is_due |= time_is_over or signalled
        self.is_asked_to_end |= signalled


logger = logging.getLogger("nb_accelerate")


class ResumingMixin(CheckpointMixin):
    """Loops over epochs, and checkpoints that are saved and found again by themselves."""

    def epochs(self, number: int, *, start: int = 0) -> Iterator[int]:
        """Yield the numbers of epochs, as ``range(start, number)`` does, and have the panel say how long all will take.

        It obeys the notebook at the end of an epoch: ``launch.save_checkpoint()``, ``launch.stop_after_epoch()``.

        Examples:
            ```python
            for epoch in accelerator.epochs(3):
                for inputs, targets in loader:
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            ```

        `resumable` does all of it too.

        Args:
            number: of epochs, those before ``start`` included.
            start: the first one, counted from 0, of a run that goes on.

        Raises:
            ConfigError: ``number`` or ``start`` is not a whole number, or negative.
        """
        check_whole("number", number, at_least=0)
        check_whole("start", start, at_least=0)

        def obeying() -> Iterator[int]:  # so that wrong numbers are refused before the loop begins
            for epoch in self._counted(start, number):
                yield epoch
                self.core.steering.agree()
                self._save_if_asked()

        return obeying()

    def _counted(self, start: int, number: int) -> Iterator[int]:
        steering, page = self.core.steering, here()
        with steering.loop(can_save=self.core.recording.project.project_dir is not None):
            for epoch in range(start, number):
                page.tell_epoch(epoch + 1, number)
                yield epoch
                if steering.stops:
                    if epoch + 1 < number:
                        page.note_end(epoch + 1, number)
                    break

    def _save_if_asked(self) -> None:
        """Save if the notebook has asked for it, and the window of accumulated gradients is closed."""
        if self.core.accumulation.sync_gradients:

            def save() -> Path:
                saved = self._save_numbered()
                assert isinstance(saved, Path)  # a handle comes from saves in the background
                return saved

            self.core.steering.save_if_asked(save, is_main=self.core.process.topology.is_main)

    def resumable(
        self, dataloader: DataLoaderShard, epochs: int, *, resume: bool | None = None
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield the number of each epoch and its batches, from where the newest whole checkpoint of the project is.

        Examples:
            ```python
            from nb_accelerate import ProjectConfiguration

            project = ProjectConfiguration("runs/first", save_every="1 epoch", total_limit=2)
            accelerator = Accelerator(project_config=project)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for epoch, batches in accelerator.resumable(loader, epochs=3):
                for inputs, targets in batches:
                    ...
                evaluate(model)
            ```

        Started again after any end, this goes on with the batch after the checkpoint, with the same
        random numbers, and yields no epoch if the last one is over. An epoch that is left by ``break`` is over when the
        next one is asked for. Checkpoints are saved after a batch that closes an
        accumulation window, and after the last lines of an epoch; see ``save_every``, ``save_on_signal``, ``keep`` and
        ``total_limit`` of `ProjectConfiguration`. All processes call it together, after ``prepare``.

        Args:
            resume: whether to look for a checkpoint. By default as `notebook_launcher` was told, or if it starts the
                ranks again after a failure; elsewhere yes.

        Raises:
            CheckpointError: there are checkpoints and none is whole; or the newest does not fit; or one could not be
                saved.
            ConfigError: the project has no folder.
        """
        core, project = self.core, self.core.recording.project
        here().looked_for_state = True
        check_whole("epochs", epochs, at_least=1)
        if project.project_dir is None:
            raise ConfigError("resumable needs a folder for checkpoints: Accelerator(project_dir=...).")
        if dataloader not in core.prepared.loaders:
            raise ConfigError("resumable was given a loader that this Accelerator did not prepare.")
        interval = None if project.save_every is None else SaveInterval.parse(project.save_every)
        wanted = Environment().resume if resume is None else check_flag("resume", resume)
        is_restarted = bool(Environment().whole("TORCHELASTIC_RESTART_COUNT"))  # by torchrun
        resumes = wanted is not False or (resume is None and is_restarted)
        self._leave_earlier_run(begins_anew=resume is None and wanted is False)
        core.registry.loaded_from = None
        first = self._go_on(dataloader) if resumes else self._begin_anew()
        if core.process.topology.is_main:
            self._tell_where_it_begins(dataloader, first, epochs, is_asked_for=wanted is True)
        return self._epochs(dataloader, first, epochs, interval)

    def _tell_where_it_begins(
        self, dataloader: DataLoaderShard, first: int, epochs: int, *, is_asked_for: bool
    ) -> None:
        core, parent = self.core, self._numbered_folders()
        if first >= epochs:
            logger.warning(
                "The newest checkpoint in %s is at the end of epoch %d, and epochs=%d: nothing is left to train.",
                parent,
                first,
                epochs,
            )
        elif core.registry.loaded_from is not None:
            batch = dataloader.epoch_and_batch[1]
            after = f" after its batch {batch}" if batch else ""
            note(f"Training goes on from {core.registry.loaded_from}, with epoch {first + 1} of {epochs}{after}.")
        elif is_asked_for and not checkpoints_in(parent):
            note(f"There is no checkpoint in {parent} to go on from: training begins with the first epoch.")

    def _leave_earlier_run(self, *, begins_anew: bool) -> None:
        """Note which checkpoints are of an earlier run. Ranks that are started again go on from none of them."""
        core, parent, progress = self.core, self._numbered_folders(), self.core.registry.progress
        # Each machine may have launched its ranks, and a machine may have joined later, when others had saved.
        of_ranks = core.collectives.all_gather_object(progress.launches)
        progress.launches = sorted({launch for launches in of_ranks for launch in launches})
        earlier = gather_from_all_ranks(
            core.collectives, lambda: newest_of_others(parent, progress.launches) if begins_anew else -1
        )
        core.registry.first_of_run = 1 + max(earlier)

    def _go_on(self, dataloader: DataLoaderShard) -> int:
        """Load the newest checkpoint, and have the loader begin where it was; return the epoch that is next."""
        core = self.core
        checkpoints = run_on_all_ranks(core.collectives, lambda: checkpoints_in(self._numbered_folders()))
        of_run = [number for number, _ in checkpoints if number >= core.registry.first_of_run]
        if not any(core.collectives.all_gather_object(bool(of_run))):
            return self._begin_anew()
        self.load_state()
        manifest = core.registry.loaded
        if manifest is None:
            raise ConfigError("The newest checkpoint was not saved by nb_accelerate: where it was made is not known.")
        number = core.prepared.loaders.index(dataloader)
        world_size = core.data_collectives.world_size
        position = run_on_all_ranks(core.collectives, lambda: position_here(manifest, number, dataloader, world_size))
        epoch = manifest.epochs[number]
        if position and not dataloader.use_stateful_dataloader:
            dataloader.load_state_dict({"epoch": epoch, "position": position})
        core.registry.progress.global_step = manifest.global_step or 0
        return epoch

    def _begin_anew(self) -> int:
        core = self.core
        parent = self._numbered_folders()
        checkpoints = run_on_all_ranks(core.collectives, lambda: checkpoints_in(parent))
        newest = max((number for number, _ in checkpoints), default=-1)
        project = core.recording.project
        project.iteration = run_on_all_ranks(core.collectives, lambda: next_number(parent, newest))
        first = core.registry.first_of_run = core.registry.first_of_run or project.iteration
        earlier = [number for number, _ in checkpoints if number < first]
        if earlier and core.process.topology.is_local_main:
            limit = "" if project.total_limit is None else "; total_limit counts its own only"
            note(
                f"{parent} has checkpoints of an earlier run, the newest is checkpoint_{earlier[-1]}. This run begins "
                f"from the start and keeps them{limit}. To go on from there instead: resume=True."
            )
        core.registry.progress.global_step = 0
        return 0

    def _epochs(
        self, dataloader: DataLoaderShard, first: int, epochs: int, interval: SaveInterval | None
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        project = self.core.recording.project
        schedule = CheckpointSchedule(self.core, interval, project)
        unsaved = project.iteration
        with schedule:
            steering = self.core.steering
            for epoch in self._counted(first, epochs):
                batches = self._batches(dataloader, schedule)
                yield epoch, batches
                if inspect.getgeneratorstate(batches) == inspect.GEN_SUSPENDED:  # left by a break
                    batches.close()
                    dataloader.leave_epoch()
                steering.agree()
                schedule.end_epoch(epoch, is_last=steering.stops or epoch == epochs - 1)
                self._save_if_due(schedule)
                saves = interval is not None or bool(project.signals) or project.iteration != unsaved
                if not saves and epoch == first < epochs - 1 and self.core.process.topology.is_main:
                    logger.warning(
                        "The first epoch is over and no checkpoint was saved that resumable could go on from. Write "
                        'Accelerator(project_config=nb_accelerate.ProjectConfiguration(folder, save_every="1 epoch")).'
                    )
        self.wait_for_checkpoint()

    def _batches(self, dataloader: DataLoaderShard, schedule: CheckpointSchedule) -> Generator[Any, None, None]:
        for batch in dataloader:
            is_last = dataloader.end_of_dataloader
            # Before its lines, like the position of the loader: who saves in them goes on with the batch after it.
            schedule.count_step()
            yield batch
            if not is_last:  # after the last one, lines of the user's are still to come that belong to the epoch
                schedule.end_step()
                self._save_if_due(schedule)

    def _save_if_due(self, schedule: CheckpointSchedule) -> None:
        self._save_if_asked()
        if schedule.is_due and self.core.accumulation.sync_gradients:
            self._save_numbered(async_save=self.core.recording.project.async_save and not schedule.is_asked_to_end)
            schedule.saved()
