"""`RecordingMixin`: log values to trackers, profile, save objects."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import ConfigError, NbAccelerateError, NotPreparedError
from nb_accelerate.errors.traceback_lines import calling_line
from nb_accelerate.training.accelerator.checkpoint_parts import save
from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.checkpoint.background import saves
from nb_accelerate.training.process import context, group
from nb_accelerate.training.tracking import BlankTracker, make_trackers

if TYPE_CHECKING:
    import os
    from argparse import Namespace
    from collections.abc import Iterator

    from torch.profiler import profile

    from nb_accelerate.base.config.kwargs import ProfileKwargs
    from nb_accelerate.base.config.project import LoggerType, ProjectConfiguration
    from nb_accelerate.training.tracking import GeneralTracker

logger = logging.getLogger("nb_accelerate")


class RecordingMixin(CoreMixin):
    """The methods of `Accelerator` about trackers, folders and profiles."""

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The folders and numbering of checkpoints and logs."""
        return self.core.recording.project

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """The folder of checkpoints; None if none was given."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder of trackers that write files; None if none was given."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with ``automatic_checkpoint_naming``."""
        return self.project_configuration.iteration

    @property
    def log_with(self) -> list[str | LoggerType | GeneralTracker]:
        """The trackers that `init_trackers` opens."""
        return self.core.recording.log_with

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The open trackers."""
        return self.core.recording.trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | Namespace | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Open a run in every tracker of ``log_with``. All processes call it.

        Examples:
            ```python
            accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            accelerator.init_trackers("digits", config={"learning_rate": 0.1})
            accelerator.log({"loss": 0.5}, step=1)
            accelerator.end_training()
            ```

        Args:
            project_name: the name of the run or of its project, depending on the tracker.
            config: hyperparameters to record with the run; also an `argparse.Namespace` or a dataclass.
            init_kwargs: arguments for the library of a tracker, by its name: ``{"wandb": {"entity": "me"}}``.

        Raises:
            ConfigError: ``init_kwargs`` names a tracker that is not in ``log_with``.
        """
        opened = make_trackers(self.log_with, project_name, logging_dir=self.logging_dir, init_kwargs=init_kwargs or {})
        for tracker in self._recording(opened):
            tracker.start()
        self.trackers[:] = opened
        if config is not None:
            settings = dict(config) if isinstance(config, Mapping) else dict(vars(config))
            for tracker in self._recording(opened):
                tracker.store_init_configuration(settings)

    def _recording(self, trackers: list[GeneralTracker]) -> list[GeneralTracker]:
        """Return the trackers that record on this process; none where it only rehearses."""
        if context.rehearsal() is not None:
            return []
        is_main = self.core.process.topology.is_main
        return [tracker for tracker in trackers if is_main or not tracker.main_process_only]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return an open tracker. On processes that do not record, return a `BlankTracker`, which does nothing.

        Args:
            name: the name of the tracker, such as ``"tensorboard"``.
            unwrap: return the run object of its library instead.

        Raises:
            NotPreparedError: ``init_trackers`` was not called.
            ConfigError: no tracker of that name is open.
        """
        tracker = next((tracker for tracker in self.trackers if tracker.name == name), None)
        if tracker is None:
            names = [tracker.name for tracker in self.trackers]
            if not names:
                raise NotPreparedError(
                    f"No tracker {name!r} is open: init_trackers was not called. Write "
                    f"Accelerator(log_with={name!r}), then accelerator.init_trackers('my project')."
                )
            raise ConfigError(
                f"No tracker {name!r} is open, only {', '.join(names)}.{suggest(name, names)} Write "
                f"Accelerator(log_with={[*names, name]!r})."
            )
        if tracker.main_process_only and tracker not in self._recording([tracker]):
            return BlankTracker()
        return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record values in every open tracker. All processes may call it; the main one records.

        What a tracker does not take is left out, and told once: training does not end for it.

        Args:
            values: numbers by name; some trackers take text and other values too.
            log_kwargs: arguments for the library of a tracker, by the name of the tracker.
        """
        self.core.page.log(values)
        self.core.registry.progress.note(values)
        refused = self.core.recording.refused
        if self.log_with and not self.trackers and not refused and self.core.process.topology.is_main:
            refused.add(("no tracker", ""))
            logger.warning(
                "%s: no tracker records this, since none is open. Write accelerator.init_trackers('my run') before.",
                calling_line() or "accelerator.log",
            )
        for tracker in self._recording(self.trackers):
            self._log(tracker, values, step, (log_kwargs or {}).get(tracker.name, {}))

    def _log(self, tracker: GeneralTracker, values: dict[str, Any], step: int | None, kwargs: dict[str, Any]) -> None:
        """Log the values that a tracker takes."""
        refused = self.core.recording.refused
        try:
            tracker.log(values, step=step, **kwargs)
        except NbAccelerateError:  # says what is wrong in the program
            raise
        except Exception as error:
            if len(values) > 1:  # it may take the others
                for name, value in values.items():
                    self._log(tracker, {name: value}, step, kwargs)
                return
            told = tracker.name, next(iter(values), "")
            if told not in refused:
                refused.add(told)
                logger.warning("%s does not take %r, so it is left out (%s: %s)", *told, type(error).__name__, error)

    def end_training(self) -> None:
        """Close the trackers, wait for background saves, and destroy the process group if an `Accelerator` made it."""
        for tracker in self._recording(self.trackers):
            tracker.finish()
        self.trackers.clear()
        try:
            saves.join()  # ranks tell each other through the store of the group
        finally:
            group.close_owned()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object on the main process; on others, do nothing.

        Examples:
            ```python
            accelerator.save({"epoch": 3, "best_loss": 0.25}, "progress.pt")
            ```

        Args:
            obj: the object; with ``safe_serialization`` a dict of tensors.
            safe_serialization: write safetensors instead of what `torch.save` writes.
        """
        with self.core.shown_as_saving():
            save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    @contextlib.contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[profile]:
        """Profile a block, and write a Chrome trace for each process if ``output_trace_dir`` is set.

        Examples:
            ```python
            with accelerator.profile(ProfileKwargs(output_trace_dir="traces")) as profiler:
                train()
            accelerator.print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10))
            ```

        Args:
            profile_handler: options of the profiler; by default those in ``kwargs_handlers`` of the `Accelerator`.
        """
        options = profile_handler or self.core.recording.profile
        with options.build() as profiler:
            yield profiler
        if options.output_trace_dir is None:
            return
        folder = Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{self.core.process.topology.rank}.json"))
        self.core.collectives.barrier()  # afterwards every process can read all traces
