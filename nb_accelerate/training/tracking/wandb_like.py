"""Base classes for libraries with the interface of Weights & Biases: ``init``, ``run.log``, ``run.finish``."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from nb_accelerate.training.tracking.tracker import LibraryTracker, load_library, on_main_process, plain_values


class WandBLikeTracker(LibraryTracker):
    """Record to a library whose module has the tracker's name.

    Args:
        run_name: the project.
        **kwargs: those of the library's ``init``.
    """

    @property
    def library(self) -> Any:
        """The module of the library."""
        return load_library(self.name, self.name)

    @override
    def open(self) -> Any:
        return self.library.init(**{"project": self.run_name, **self.init_kwargs})

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(plain_values(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.log(plain_values(values), step=step, **kwargs)

    @override
    def close(self) -> None:
        self.run.finish()


class WandBLikeImageTracker(WandBLikeTracker):
    """Record images too, to a library that has an ``Image`` class."""

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: lists of images by name; arrays, PIL images or files.
            step: at which step.
            **kwargs: those of the run's ``log``.
        """
        make = self.library.Image
        pictures = {name: [make(image) for image in images] for name, images in values.items()}
        self.tracker.log(pictures, step=step, **kwargs)
