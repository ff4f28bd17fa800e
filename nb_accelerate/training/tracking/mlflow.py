"""Record to MLflow."""

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
    on_main_process,
    plain_values,
)

if TYPE_CHECKING:
    import os

logger = logging.getLogger(__name__)

_MAX_PARAMS = 100
"""Parameters that MLflow takes in one request."""


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
        given = environment.text("MLFLOW_TAGS") or arguments["tags"]
        arguments["tags"] = json.loads(given) if isinstance(given, str) else given
        found = self.library.get_experiment_by_name(name) if name else None
        if found is not None:
            arguments["experiment_id"] = found.experiment_id
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
