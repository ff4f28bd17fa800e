"""Record to DVCLive."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from nb_accelerate.training.tracking.tracker import LibraryTracker, load_library, on_main_process, plain_values


class DVCLiveTracker(LibraryTracker):
    """Record to DVCLive.

    Args:
        run_name: not used by DVCLive.
        live: your own ``dvclive.Live``; by default a new one.
        **kwargs: those of ``dvclive.Live``.
    """

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self._given = live

    @property
    def live(self) -> Any:
        """The ``dvclive.Live``: `tracker` under the name that accelerate has for it."""
        return self._given if self.run is None else self.tracker

    @override
    def open(self) -> Any:
        if self._given is not None:
            return self._given
        dvclive: Any = load_library("dvclive", self.name)
        return dvclive.Live(**self.init_kwargs)

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.log_params(plain_values(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if step is not None:
            self.tracker.step = step
        for name, value in plain_values(values).items():
            self.tracker.log_metric(name, value, **kwargs)
        self.tracker.next_step()

    @override
    def close(self) -> None:
        self.run.end()
