"""SwanLab."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from nb_accelerate.tracking.load import load
from nb_accelerate.tracking.tracker import LibraryTracker, on_main_process, plain_values


class SwanLabTracker(LibraryTracker):
    """Record to SwanLab; ``mode="local"`` among the arguments keeps the run on this machine.

    Args:
        run_name: the project.
        **kwargs: those of ``swanlab.init``.
    """

    name = "swanlab"

    @override
    def open(self) -> Any:
        swanlab: Any = load("swanlab", self.name)
        return swanlab.init(**{"project": self.run_name, **self.init_kwargs})

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(plain_values(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.log(plain_values(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: lists of images by name.
            step: at which step.
            **kwargs: those of the run's ``log``.
        """
        swanlab: Any = load("swanlab", self.name)
        pictures = {name: [swanlab.Image(image) for image in images] for name, images in values.items()}
        self.tracker.log(pictures, step=step, **kwargs)

    @override
    @on_main_process
    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
