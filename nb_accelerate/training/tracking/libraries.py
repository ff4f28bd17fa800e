"""Libraries that are called alike under different names. The names are attributes of `LibraryTracker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.training.tracking.tracker import LibraryTracker, is_number, on_main_process, plain_values

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


class _ImageTracker(LibraryTracker):
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


class WandBTracker(_ImageTracker):
    """Record to Weights & Biases; ``WANDB_MODE=offline`` keeps the run on this machine.

    Args:
        run_name: the project.
        **kwargs: those of ``wandb.init``.
    """

    name = "wandb"

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(plain_values(values), allow_val_change=True)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table.

        Args:
            table_name: its name.
            columns: the names of its columns.
            data: its rows.
            dataframe: a pandas data frame instead of both.
            step: at which step.
            **kwargs: those of the run's ``log``.
        """
        table = self.library.Table(columns=columns, data=data, dataframe=dataframe)
        self.tracker.log({table_name: table}, step=step, **kwargs)


class SwanLabTracker(_ImageTracker):
    """Record to SwanLab; ``mode="local"`` among the arguments keeps the run on this machine.

    Args:
        run_name: the project.
        **kwargs: those of ``swanlab.init``.
    """

    name = "swanlab"
    config_call = "config.update"


class TrackioTracker(LibraryTracker):
    """Record to trackio, the dashboard of Hugging Face, which keeps runs on this machine unless it is told a space.

    Args:
        run_name: the project.
        **kwargs: those of ``trackio.init``.
    """

    name = "trackio"
    config_call = "config.update"


class CometMLTracker(LibraryTracker):
    """Record to Comet.

    Args:
        run_name: the project.
        **kwargs: those of ``comet_ml.start``.
    """

    name = "comet_ml"
    open_call, run_argument = "start", "project_name"
    config_call, close_call = "log_parameters", "end"
    writer = LibraryTracker.tracker
    """The experiment: `tracker` under the name that accelerate has for it."""

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


class AimTracker(LibraryTracker):
    """Record to an Aim repository.

    Args:
        run_name: the name of the run.
        logging_dir: the repository; by default the one of this folder.
        **kwargs: those of ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True
    close_call = "close"
    writer = LibraryTracker.tracker
    """The ``aim.Run``: `tracker` under the name that accelerate has for it."""

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir

    @override
    def open(self) -> Any:
        run = self.library.Run(**{"repo": self.logging_dir, **self.init_kwargs})
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
        kwargs = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = self.library.Image(image, caption=caption, **kwargs.get("aim_image", {}))
            self.tracker.track(picture, name=name, step=step, **kwargs.get("track", {}))


class DVCLiveTracker(LibraryTracker):
    """Record to DVCLive.

    Args:
        run_name: not used by DVCLive.
        live: your own ``dvclive.Live``; by default a new one.
        **kwargs: those of ``dvclive.Live``.
    """

    name = "dvclive"
    config_call, close_call = "log_params", "end"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self._given = live

    @property
    def live(self) -> Any:
        """The ``dvclive.Live``: `tracker` under the name that accelerate has for it."""
        return self._given if self.run is None else self.tracker

    @override
    def open(self) -> Any:
        return self.library.Live(**self.init_kwargs) if self._given is None else self._given

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if step is not None:
            self.tracker.step = step
        for name, value in plain_values(values).items():
            self.tracker.log_metric(name, value, **kwargs)
        self.tracker.next_step()
