"""Choose trackers by name. A new one is a file and a row of the table."""

from __future__ import annotations

import importlib
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.config.checks import suggest
from nb_accelerate.config.installed import is_installed
from nb_accelerate.config.project import LoggerType
from nb_accelerate.errors import ConfigError, MissingDependencyError
from nb_accelerate.tracking.tracker import GeneralTracker

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One tracker of the table: where its class is, and which of some libraries it needs."""

    module: str
    cls: str
    libraries: tuple[str, ...] = ()

    @property
    def is_available(self) -> bool:
        """Whether its library is installed."""
        return not self.libraries or any(map(is_installed, self.libraries))

    def load(self) -> type[GeneralTracker]:
        """Return the class."""
        found: type[GeneralTracker] = getattr(
            importlib.import_module(f"nb_accelerate.tracking.{self.module}"), self.cls
        )
        return found


TRACKERS = {
    "tensorboard": Row("tensorboard", "TensorBoardTracker", ("tensorboard", "tensorboardX")),
    "wandb": Row("wandb", "WandBTracker", ("wandb",)),
    "trackio": Row("trackio", "TrackioTracker", ("trackio",)),
    "comet_ml": Row("comet", "CometMLTracker", ("comet_ml",)),
    "aim": Row("aim", "AimTracker", ("aim",)),
    "mlflow": Row("mlflow", "MLflowTracker", ("mlflow",)),
    "clearml": Row("clearml", "ClearMLTracker", ("clearml",)),
    "dvclive": Row("dvclive", "DVCLiveTracker", ("dvclive",)),
    "swanlab": Row("swanlab", "SwanLabTracker", ("swanlab",)),
    "jsonl": Row("jsonl", "JSONLinesTracker"),
    "notebook": Row("notebook", "NotebookTracker"),
}


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose library is installed."""
    return [name for name, row in TRACKERS.items() if row.is_available]


def tracker_class(name: str) -> type[GeneralTracker]:
    """Return the class of a tracker.

    Raises:
        ConfigError: there is no tracker of that name.
        MissingDependencyError: its library is not installed.
    """
    row = TRACKERS.get(name)
    if row is None:
        known = ", ".join(repr(one) for one in ("all", *TRACKERS))
        raise ConfigError(
            f"log_with={name!r} is no tracker.{suggest(name, TRACKERS)} Write one of {known}, or an object of a "
            "class of yours that is a GeneralTracker."
        )
    if not row.is_available:
        raise MissingDependencyError(row.libraries[0], needed_for=f"log_with={name!r}", extra=name)
    return row.load()


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None
) -> list[str | LoggerType | GeneralTracker]:
    """Return which trackers ``log_with`` means.

    Args:
        log_with: a name, a `LoggerType`, a tracker object, a list of those, or None. ``"all"`` means every tracker
            whose library is installed, and which gets what it needs.
        logging_dir: for trackers that write files.

    Raises:
        ConfigError: a name is no tracker, or a tracker needs a folder and there is none.
        MissingDependencyError: a library is not installed.
    """
    wanted = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    names = {str(one) for one in wanted if isinstance(one, str)}
    chosen: list[str | LoggerType | GeneralTracker] = [one for one in wanted if isinstance(one, GeneralTracker)]
    for one in wanted:
        if isinstance(one, type) and issubclass(one, GeneralTracker):
            raise ConfigError(f"log_with has the class {one.__name__}. Write an object: {one.__name__}('my run').")
        if not isinstance(one, (str, GeneralTracker)):
            raise ConfigError(f"log_with has {one!r}, which is neither the name of a tracker nor a GeneralTracker.")
    if str(LoggerType.ALL) in names:
        return [*chosen, *_all_that_work(logging_dir)]
    for name in dict.fromkeys(str(one) for one in wanted if isinstance(one, str)):
        if tracker_class(name).requires_logging_directory and logging_dir is None:
            raise ConfigError(
                f"log_with={name!r} writes files, and there is no folder for them. Write "
                f"Accelerator(log_with={name!r}, project_dir='runs')."
            )
        chosen.append(name)
    return chosen


def _all_that_work(logging_dir: str | os.PathLike[str] | None) -> list[str]:
    found = []
    for name in get_available_trackers():
        if logging_dir is None and tracker_class(name).requires_logging_directory:
            logger.info("%s is left out: it writes files, and there is no project_dir", name)
        else:
            found.append(name)
    return found


def make_trackers(
    chosen: Sequence[str | LoggerType | GeneralTracker],
    project_name: str,
    *,
    logging_dir: str | os.PathLike[str] | None,
    init_kwargs: dict[str, dict[str, Any]],
) -> list[GeneralTracker]:
    """Return a tracker for each name, and objects as they are.

    Args:
        chosen: what `filter_trackers` returned.
        project_name: what they call the run or its project.
        logging_dir: for trackers that write files.
        init_kwargs: arguments for the library of a tracker, by its name.

    Raises:
        ConfigError: ``init_kwargs`` has a name that is not chosen.
    """
    names = [one.name if isinstance(one, GeneralTracker) else str(one) for one in chosen]
    _check_names("init_kwargs", init_kwargs, names)
    made: list[GeneralTracker] = []
    for one in chosen:
        if isinstance(one, GeneralTracker):
            made.append(one)
            continue
        cls: Any = tracker_class(str(one))
        arguments = dict(init_kwargs.get(str(one), {}))
        if cls.requires_logging_directory or str(one) in _MAY_HAVE_FOLDER:
            arguments.setdefault("logging_dir", logging_dir)
        made.append(cls(project_name, **arguments))
    return made


_MAY_HAVE_FOLDER = ("jsonl", "mlflow")


def _check_names(argument: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(
                f"{argument} has arguments for {name!r}, which is not among the trackers of this run ({listed})."
                f"{suggest(name, known)}"
            )


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Make a tracker of yours known by its name: ``log_with="its name"``. Use it as a decorator.

    A cell that defines a tracker may run again; another class of the same name takes the place of the first, with a
    warning.

    Raises:
        ConfigError: the class is not a tracker, or lacks what one says of itself.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigError(f"{tracker_class!r} is not a GeneralTracker. Write class MyTracker(GeneralTracker).")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{tracker_class.__name__} has no name to be found by. Write name = 'my_tracker' in it.")
    if not isinstance(getattr(tracker_class, "requires_logging_directory", None), bool):
        raise ConfigError(
            f"{tracker_class.__name__} does not say whether it writes files. Write requires_logging_directory = False "
            "in it, or True if it takes a folder as its second argument."
        )
    if name in TRACKERS and TRACKERS[name].cls != tracker_class.__name__:
        warnings.warn(f"{tracker_class.__name__} takes the place of the tracker called {name!r}.", stacklevel=2)
    TRACKERS[name] = RegisteredRow("", tracker_class.__name__, (), tracker_class)
    return tracker_class


@dataclass(frozen=True)
class RegisteredRow(Row):
    """A tracker that a program registered."""

    registered: type[GeneralTracker] = GeneralTracker

    def load(self) -> type[GeneralTracker]:
        """Return the class."""
        return self.registered
