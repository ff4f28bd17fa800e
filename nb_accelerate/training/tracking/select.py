"""Choose trackers by name. A new one is a module of this folder and a row of `TRACKERS`."""

from __future__ import annotations

import importlib
import logging
import uuid
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.base.config.kwargs import ProfileKwargs
from nb_accelerate.base.config.project import LoggerType, ProjectConfiguration, resolve_project
from nb_accelerate.base.config.versions import is_installed
from nb_accelerate.errors import ConfigError, MissingDependencyError
from nb_accelerate.training.tracking.tracker import GeneralTracker

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackerEntry:
    """One tracker of the table."""

    module: str  # of this package, that has the class; unused where ``registered`` is given
    cls: str
    libraries: tuple[str, ...] = ()  # import names; one has to be installed
    registered: type[GeneralTracker] | None = None  # the class itself, if a program registered it

    @property
    def is_available(self) -> bool:
        """Whether one of its libraries is installed, or it needs none."""
        return not self.libraries or any(map(is_installed, self.libraries))

    def load(self) -> type[GeneralTracker]:
        """Return the class, importing its module but not its library."""
        if self.registered is not None:
            return self.registered
        kind: type[GeneralTracker] = getattr(
            importlib.import_module(f"nb_accelerate.training.tracking.{self.module}"), self.cls
        )
        return kind


TRACKERS = {
    "tensorboard": TrackerEntry("libraries", "TensorBoardTracker", ("tensorboard", "tensorboardX")),
    "wandb": TrackerEntry("libraries", "WandBTracker", ("wandb",)),
    "trackio": TrackerEntry("libraries", "TrackioTracker", ("trackio",)),
    "comet_ml": TrackerEntry("libraries", "CometMLTracker", ("comet_ml",)),
    "aim": TrackerEntry("libraries", "AimTracker", ("aim",)),
    "mlflow": TrackerEntry("libraries", "MLflowTracker", ("mlflow",)),
    "clearml": TrackerEntry("libraries", "ClearMLTracker", ("clearml",)),
    "dvclive": TrackerEntry("libraries", "DVCLiveTracker", ("dvclive",)),
    "swanlab": TrackerEntry("libraries", "SwanLabTracker", ("swanlab",)),
    "jsonl": TrackerEntry("notebook", "JSONLinesTracker"),
    "notebook": TrackerEntry("notebook", "NotebookTracker"),
}


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose library is installed."""
    return [name for name, entry in TRACKERS.items() if entry.is_available]


def tracker_class(name: str) -> type[GeneralTracker]:
    entry = TRACKERS.get(name)
    if entry is None:
        known = ", ".join(repr(known) for known in ("all", *TRACKERS))
        raise ConfigError(
            f"log_with={name!r} is not a tracker.{suggest(name, TRACKERS)} Write one of {known}, or an object of your "
            "own subclass of GeneralTracker."
        )
    if not entry.is_available:
        raise MissingDependencyError(entry.libraries[0], needed_for=f"log_with={name!r}")
    return entry.load()


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None
) -> list[str | LoggerType | GeneralTracker]:
    """Return the trackers that ``log_with`` selects.

    Args:
        log_with: a name, a `LoggerType`, a tracker object, a list of those, or None. ``"all"`` means every tracker
            whose library is installed, except trackers that need a folder if ``logging_dir`` is None.
        logging_dir: folder for trackers that write files.

    Raises:
        ConfigError: an item is neither a tracker object nor the name of a tracker, or a tracker needs a folder and
            none was given.
        MissingDependencyError: a library is not installed.
    """
    wanted = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    for item in wanted:
        if isinstance(item, type) and issubclass(item, GeneralTracker):
            raise ConfigError(f"log_with has the class {item.__name__}. Write an object: {item.__name__}('my run').")
        if not isinstance(item, (str, GeneralTracker)):
            raise ConfigError(f"log_with has {item!r}, which is neither the name of a tracker nor a GeneralTracker.")
    chosen: list[str | LoggerType | GeneralTracker] = [item for item in wanted if isinstance(item, GeneralTracker)]
    names = list(dict.fromkeys(str(item) for item in wanted if isinstance(item, str)))
    takes_all = str(LoggerType.ALL) in names
    for name in get_available_trackers() if takes_all else names:
        if not tracker_class(name).requires_logging_directory or logging_dir is not None:
            chosen.append(name)
        elif takes_all:
            logger.info("%s is left out: it writes files, and there is no project_dir", name)
        else:
            raise ConfigError(
                f"log_with={name!r} writes files, and there is no folder for them. Write "
                f"Accelerator(log_with={name!r}, project_dir='runs')."
            )
    return chosen


def make_trackers(
    chosen: Sequence[str | LoggerType | GeneralTracker],
    project_name: str,
    *,
    logging_dir: str | os.PathLike[str] | None,
    init_kwargs: dict[str, dict[str, Any]],
) -> list[GeneralTracker]:
    """Make a tracker for each name; tracker objects are returned as they are."""
    names = [tracker.name if isinstance(tracker, GeneralTracker) else str(tracker) for tracker in chosen]
    for name in init_kwargs.keys() - names:
        listed = ", ".join(names) or "none"
        raise ConfigError(
            f"init_kwargs has arguments for {name!r}, which is not among the trackers of this run ({listed})."
            f"{suggest(name, names)}"
        )
    made: list[GeneralTracker] = []
    run_id = uuid.uuid4().hex
    for tracker in chosen:
        if isinstance(tracker, GeneralTracker):
            made.append(tracker)
            continue
        cls: Any = tracker_class(str(tracker))
        arguments = dict(init_kwargs.get(str(tracker), {}))
        if cls.requires_logging_directory or cls.accepts_logging_directory:
            arguments.setdefault("logging_dir", logging_dir)
        if cls.accepts_run_id:
            arguments.setdefault("run_id", run_id)
        made.append(cls(project_name, **arguments))
    return made


@dataclass(kw_only=True)
class Recording:
    """The trackers, folders and profile options of an `Accelerator`."""

    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    log_with: list[str | LoggerType | GeneralTracker] = field(default_factory=list)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)
    trackers: list[GeneralTracker] = field(default_factory=list)
    refused: set[tuple[str, str]] = field(default_factory=set)  # names of trackers and values that the user was told of


def resolve_recording(
    log_with: Any,
    project_dir: str | os.PathLike[str] | None,
    project_config: ProjectConfiguration | None,
    profile: ProfileKwargs,
) -> Recording:
    """Check the arguments of an `Accelerator` that are about recording."""
    project = resolve_project(project_dir, project_config)
    return Recording(project=project, log_with=filter_trackers(log_with, project.logging_dir), profile=profile)


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Register your own tracker class, for ``log_with="its name"``. Use it as a decorator.

    A cell that defines a tracker may run again. Another class with the same ``name`` replaces the first, with a
    warning.

    Raises:
        ConfigError: the class is not a `GeneralTracker`, or lacks ``name`` or ``requires_logging_directory``.
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
    TRACKERS[name] = TrackerEntry("", tracker_class.__name__, registered=tracker_class)
    return tracker_class
