"""Record to Aim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.training.tracking.tracker import LibraryTracker, load_library, on_main_process, plain_values

if TYPE_CHECKING:
    import os


class AimTracker(LibraryTracker):
    """Record to an Aim repository.

    Args:
        run_name: the name of the run.
        logging_dir: the repository; by default the one of this folder.
        **kwargs: those of ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir

    @property
    def writer(self) -> Any:
        """The ``aim.Run``: `tracker` under the name that accelerate has for it."""
        return self.tracker

    @override
    def open(self) -> Any:
        aim: Any = load_library("aim", self.name)
        run = aim.Run(**{"repo": self.logging_dir, **self.init_kwargs})
        run.name = self.run_name
        return run

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker["hparams"] = plain_values(values)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, value in plain_values(values).items():
            self.tracker.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record images.

        Args:
            values: images by name; or tuples of an image and its caption.
            step: at which step.
            kwargs: arguments for ``aim.Image`` under ``"aim_image"``, and for the run's ``track`` under ``"track"``.
        """
        aim: Any = load_library("aim", self.name)
        kwargs = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = aim.Image(image, caption=caption, **kwargs.get("aim_image", {}))
            self.tracker.track(picture, name=name, step=step, **kwargs.get("track", {}))

    @override
    def close(self) -> None:
        self.run.close()
