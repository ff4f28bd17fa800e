"""Where a run writes its files, and what it records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.config.checks import check_flag, check_options, check_whole
from nb_accelerate.config.options import Options

if TYPE_CHECKING:
    import os


class LoggerType(str, Enum):
    """The experiment trackers that ``Accelerator(log_with=...)`` knows by name; ``ALL`` means those installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    JSONL = "jsonl"
    NOTEBOOK = "notebook"

    def __str__(self) -> str:
        return self.value


class ComputeEnvironment(str, Enum):
    """Where a run takes place, as configuration files say it."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"

    def __str__(self) -> str:
        return self.value


@dataclass
class ProjectConfiguration(Options):
    """Where a run writes its files. May be changed at any time: each is read when it is used.

    Attributes:
        project_dir: for checkpoints.
        logging_dir: for trackers that write files; ``project_dir`` by default.
        automatic_checkpoint_naming: number checkpoints by themselves.
        total_limit: keep that many checkpoints; None keeps all.
        iteration: the number of the next checkpoint.
        save_on_each_node: write checkpoints on every machine, for disks that machines do not share.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_directories(self.project_dir)

    @override
    def _check(self) -> None:
        check_flag("automatic_checkpoint_naming", self.automatic_checkpoint_naming)
        check_flag("save_on_each_node", self.save_on_each_node)
        check_whole("iteration", self.iteration, at_least=0)
        if self.total_limit is not None:
            check_whole("total_limit", self.total_limit, at_least=1)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` too if there is none yet."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def resolve_project(
    project_dir: str | os.PathLike[str] | None, given: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Merge the ``project_dir`` argument of `Accelerator` into its ``project_config``."""
    config = check_options("project_config", given, ProjectConfiguration) or ProjectConfiguration()
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    return config
