"""Where a run writes its files, and what it records."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice, check_options, check_whole
from nb_accelerate.base.config.distributed import Word
from nb_accelerate.base.config.options import Options
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

_SIGNALS = ("sigterm", "sigint", "sigusr1", "sigusr2", "sighup")


class LoggerType(Word):
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


class ComputeEnvironment(Word):
    """Where a run takes place, as configuration files say it."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


@dataclass(frozen=True)
class SaveInterval:
    """How often a checkpoint is saved, in ``"steps"``, ``"seconds"`` or ``"epochs"``. Made by `parse`."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: object) -> SaveInterval:
        """Parse ``"500 steps"``, ``"10 min"`` or ``"1 epoch"``; a whole number counts steps."""
        words = f"{text} steps" if isinstance(text, int) and not isinstance(text, bool) else str(text)
        match = _INTERVAL.fullmatch(words.strip().lower())
        unit, factor = _UNITS.get(match[2], ("", 0.0)) if match else ("", 0.0)
        amount = float(match[1]) * factor if match else 0.0
        is_whole = unit == "seconds" or amount.is_integer()
        if not unit or amount <= 0 or not is_whole:
            raise ConfigError(
                f"save_every={text!r} is not an interval. Write a number and a unit: '500 steps', '10 min', '1 epoch'."
            )
        return cls(amount, unit)


_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_UNITS = {
    **dict.fromkeys(("step", "steps", "batch", "batches"), ("steps", 1.0)),
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1.0)),
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1.0)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600.0)),
}


@dataclass
class ProjectConfiguration(Options):
    """Where a run writes its files, and which checkpoints it keeps. Fields may be changed at any time.

    Attributes:
        project_dir: folder of checkpoints.
        logging_dir: folder of trackers that write files; ``project_dir`` by default.
        automatic_checkpoint_naming: save checkpoints to numbered folders, ``checkpoints/checkpoint_0`` and so on.
        total_limit: number of checkpoints to keep; None keeps all. Checkpoints of an earlier run stay, too, where
            `Accelerator.resumable` starts from the beginning.
        iteration: the number of the next checkpoint.
        save_on_each_node: write checkpoints on every machine, for disks that machines do not share.
        save_every: how often `Accelerator.resumable` saves a checkpoint: ``"500 steps"``, ``"10 min"``, ``"1 epoch"``.
            It saves one at the end too. None saves none.
        async_save: whether `Accelerator.resumable` saves in the background.
        save_on_signal: names of signals after which `Accelerator.resumable` saves a checkpoint and ends: ``"SIGTERM"``
            for machines that are preempted, ``"SIGUSR1"`` for SLURM's warning, ``"SIGINT"`` for an interrupt (a
            notebook waits a second or two for its ranks then). A second signal has its usual effect at once.
        keep: which checkpoints to keep with a ``total_limit``, besides the last one: the ``"newest"``, or the
            ``"best"`` by the value ``monitor``.
        monitor: the name of a value that is passed to `Accelerator.log`.
        mode: ``"min"`` if the smallest value is the best, ``"max"`` if the largest is.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    save_every: str | int | None = None
    async_save: bool = False
    save_on_signal: str | Sequence[str] = ()
    keep: str = "newest"
    monitor: str = "loss"
    mode: str = "min"

    _checks: ClassVar[dict[str, Any]] = {
        "total_limit": partial(check_whole, at_least=1),
        "iteration": partial(check_whole, at_least=0),
        "keep": partial(check_choice, choices=("newest", "best")),
        "mode": partial(check_choice, choices=("min", "max")),
    }

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_directories(self.project_dir)

    @override
    def _check(self) -> None:
        super()._check()
        if self.save_every is not None:
            SaveInterval.parse(self.save_every)
        _ = self.signals

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals of ``save_on_signal``."""
        names = (self.save_on_signal,) if isinstance(self.save_on_signal, str) else tuple(self.save_on_signal)
        for name in names:
            check_choice("save_on_signal", name, _SIGNALS)
        return tuple(signal.Signals[name.upper()] for name in names)

    @property
    def worth(self) -> Callable[[Mapping[str, float]], float] | None:
        """A function of logged values that returns the score of a checkpoint; None with ``keep="newest"``."""
        if self.keep == "newest":
            return None
        sign = 1.0 if self.mode == "max" else -1.0
        name = self.monitor

        def worth(metrics: Mapping[str, float]) -> float:
            value = sign * metrics.get(name, float("nan"))
            return float("-inf") if value != value else value  # noqa: PLR0124 - not a number

        return worth

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` too if there is none yet."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def resolve_project(
    project_dir: str | os.PathLike[str] | None, given: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Merge the ``project_dir`` argument of `Accelerator` into its ``project_config``, and return that."""
    config = check_options("project_config", given, ProjectConfiguration) or ProjectConfiguration()
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    return config
