"""Record to Comet."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from nb_accelerate.training.tracking.tracker import (
    LibraryTracker,
    is_number,
    load_library,
    on_main_process,
    plain_values,
)


class CometMLTracker(LibraryTracker):
    """Record to Comet.

    Args:
        run_name: the project.
        **kwargs: those of ``comet_ml.start``.
    """

    name = "comet_ml"

    @property
    def writer(self) -> Any:
        """The experiment: `tracker` under the name that accelerate has for it."""
        return self.tracker

    @override
    def open(self) -> Any:
        comet: Any = load_library("comet_ml", self.name)
        return comet.start(**{"project_name": self.run_name, **self.init_kwargs})

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.log_parameters(plain_values(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if step is not None:
            self.tracker.set_step(step)
        for name, value in plain_values(values).items():
            if is_number(value):
                self.tracker.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, dict):
                self.tracker.log_metrics(plain_values(value), step=step, **kwargs)
            else:
                self.tracker.log_other(name, value, **kwargs)

    @override
    def close(self) -> None:
        self.run.end()
