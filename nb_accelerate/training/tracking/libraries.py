"""Trackers of libraries. What they call alike is in `LibraryTracker`, and the names of the calls are its attributes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.env import Environment
from nb_accelerate.training.tracking.tracker import (
    LibraryTracker,
    is_number,
    load_library,
    on_main_process,
    plain,
    plain_values,
)

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
    """Record to the project ``run_name`` of SwanLab, by ``swanlab.init``; ``mode="local"`` keeps it on this machine."""

    name = "swanlab"
    config_call = "config.update"


class TrackioTracker(LibraryTracker):
    """Record to the project ``run_name`` of trackio, by ``trackio.init``; on this machine unless it is told a space."""

    name = "trackio"
    config_call = "config.update"


class CometMLTracker(LibraryTracker):
    """Record to the project ``run_name`` of Comet, by ``comet_ml.start``."""

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


_SERIES = ("eval", "test", "train")


class ClearMLTracker(LibraryTracker):
    """Record to the ClearML task of this process, or to a new one.

    Args:
        run_name: the project and the task.
        **kwargs: those of ``clearml.Task.init``.
    """

    name = "clearml"

    config_call, close_call = "connect_configuration", "close"
    task = LibraryTracker.tracker
    """The task: `tracker` under the name that accelerate has for it."""

    @override
    def open(self) -> Any:
        task = self.library.Task.current_task()
        self._owned = task is None
        if task is not None:
            return task  # who made it, closes it
        return self.library.Task.init(**{"project_name": self.run_name, "task_name": self.run_name, **self.init_kwargs})

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        logger = self.tracker.get_logger()
        for name, value in plain_values(values).items():
            if not is_number(value):
                logger.report_text(f"{name}: {value}", **kwargs)
            elif step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = title_and_series(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images, given by name."""
        logger = self.tracker.get_logger()
        for name, image in values.items():
            title, series = title_and_series(name)
            logger.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

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
        """Record a table. See `WandBTracker.log_table`; other arguments are those of the logger's ``report_table``.

        Raises:
            ValueError: neither rows nor a data frame were given.
        """
        if dataframe is None and data is None:
            raise ValueError("log_table was given neither data nor a dataframe. Give it one of them.")
        table = dataframe if data is None else [*([list(columns)] if columns else []), *map(list, data)]
        title, series = title_and_series(table_name)
        self.tracker.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    @override
    def close(self) -> None:
        if self._owned:
            super().close()


def title_and_series(name: str) -> tuple[str, str]:
    """Return in which chart a value is drawn, and as which line: ``eval_loss`` is line eval of chart loss."""
    prefix, _, rest = name.partition("_")
    return (rest, prefix) if rest and prefix in _SERIES else (name, "train")


logger = logging.getLogger(__name__)

_MAX_PARAMS = 100  # parameters that MLflow takes in one request


class MLflowTracker(LibraryTracker):
    """Record to MLflow: to ``logging_dir``, to ``MLFLOW_TRACKING_URI``, or to the folder MLflow takes by default.

    Args:
        experiment_name: the experiment; else ``MLFLOW_EXPERIMENT_NAME``.
        logging_dir: where its artifacts go.
        run_id: a run to take up again; else ``MLFLOW_RUN_ID``.
        tags: of the run.
        nested_run: put the run inside the one that is open.
        run_name: the name of the run.
        description: of the run.
    """

    name = "mlflow"
    accepts_logging_directory = True
    active_run = LibraryTracker.tracker
    """The run: `tracker` under the name that accelerate has for it."""

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name or experiment_name or "")
        self.experiment_name = experiment_name
        self.logging_dir = logging_dir
        self.init_kwargs = {
            "run_id": run_id,
            "run_name": run_name,
            "nested": nested_run,
            "tags": tags,
            "description": description,
        }

    @override
    def open(self) -> Any:
        environment = Environment()
        name = environment.text("MLFLOW_EXPERIMENT_NAME") or self.experiment_name
        arguments = dict(self.init_kwargs)
        arguments["run_id"] = environment.text("MLFLOW_RUN_ID") or arguments["run_id"]
        tags = environment.text("MLFLOW_TAGS") or arguments["tags"]
        arguments["tags"] = json.loads(tags) if isinstance(tags, str) else tags
        experiment = self.library.get_experiment_by_name(name) if name else None
        if experiment is not None:
            arguments["experiment_id"] = experiment.experiment_id
        elif name:
            location = None if self.logging_dir is None else Path(self.logging_dir).absolute().as_uri()
            arguments["experiment_id"] = self.library.create_experiment(name, artifact_location=location)
        return self.library.start_run(**arguments)

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        longest = self.library.utils.validation.MAX_PARAM_VAL_LENGTH
        short = {name: value for name, value in plain_values(values).items() if len(str(value)) <= longest}
        for name in values.keys() - short.keys():
            logger.warning(
                "The value of %r is longer than the %d characters that MLflow takes, and left out.", name, longest
            )
        items = list(short.items())
        for start in range(0, len(items), _MAX_PARAMS):
            self.library.log_params(dict(items[start : start + _MAX_PARAMS]))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        plain = plain_values(values)
        metrics = {name: value for name, value in plain.items() if is_number(value)}
        for name in plain.keys() - metrics.keys():
            logger.warning(
                "%r is a %s, and MLflow records numbers only; it is left out.", name, type(plain[name]).__name__
            )
        self.library.log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a figure of matplotlib or plotly as a file of the run."""
        self.library.log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record a file, in the folder ``artifact_path`` of the run."""
        self.library.log_artifact(local_path, artifact_path=artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record a folder, as the folder ``artifact_path`` of the run."""
        self.library.log_artifacts(local_dir, artifact_path=artifact_path)

    @override
    def close(self) -> None:
        self.library.end_run()


class TensorBoardTracker(LibraryTracker):
    """Write event files that ``tensorboard --logdir`` shows.

    Args:
        run_name: the name of the folder below ``logging_dir``.
        logging_dir: where runs are.
        **kwargs: those of `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    close_call = "close"
    writer = LibraryTracker.tracker
    """The ``SummaryWriter``: `tracker` under the name that accelerate has for it."""

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = Path(logging_dir) / run_name

    @override
    def open(self) -> Any:
        plain = load_library("tensorboard", self.name, missing_ok=True)
        package = "tensorboardX" if plain is None else "torch.utils.tensorboard"
        library: Any = load_library(package, self.name, package="tensorboard")
        return library.SummaryWriter(str(self.logging_dir), **self.init_kwargs)

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        values = plain_values(values)
        plain = {
            name: value if isinstance(value, (int, float, str, bool)) else str(value) for name, value in values.items()
        }
        self.tracker.add_hparams(plain, metric_dict={})
        self.tracker.flush()
        self.logging_dir.mkdir(parents=True, exist_ok=True)
        # JSON is YAML; the name is the one that TensorBoard's users look for.
        text = json.dumps(values, indent=2, default=str)
        (self.logging_dir / "hparams.yml").write_text(f"{text}\n", encoding="utf-8")

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, value in values.items():
            point = plain(value)
            if is_number(point) or isinstance(point, bool):
                self.tracker.add_scalar(name, point, global_step=step, **kwargs)
            elif isinstance(point, str):
                self.tracker.add_text(name, point, global_step=step, **kwargs)
            elif isinstance(point, dict):
                self.tracker.add_scalars(name, plain_values(point), global_step=step, **kwargs)
            else:
                self.tracker.add_histogram(name, point, global_step=step, **kwargs)
        self.tracker.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record batches of images.

        Args:
            values: arrays of shape (images, channels, height, width) by name, or as ``dataformats`` says.
            step: at which step.
            **kwargs: those of ``SummaryWriter.add_images``.
        """
        for name, images in values.items():
            self.tracker.add_images(name, images, global_step=step, **kwargs)
