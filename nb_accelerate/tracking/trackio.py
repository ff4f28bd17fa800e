"""Trackio: Hugging Face's local dashboard."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from nb_accelerate.tracking.load import load
from nb_accelerate.tracking.tracker import LibraryTracker, on_main_process, plain_values


class TrackioTracker(LibraryTracker):
    """Record to trackio, which keeps runs on this machine unless it is told a space.

    Args:
        run_name: the project.
        **kwargs: those of ``trackio.init``.
    """

    name = "trackio"

    @override
    def open(self) -> Any:
        trackio: Any = load("trackio", self.name)
        return trackio.init(**{"project": self.run_name, **self.init_kwargs})

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(plain_values(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.log(plain_values(values), step=step, **kwargs)

    @override
    @on_main_process
    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
