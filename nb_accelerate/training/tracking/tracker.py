"""Base classes of experiment trackers: `GeneralTracker` for users, `LibraryTracker` for the adapters here."""

from __future__ import annotations

import functools
import importlib
import operator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from typing_extensions import override

from nb_accelerate.errors import MissingDependencyError, NotPreparedError
from nb_accelerate.training.process import context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

P = ParamSpec("P")
R = TypeVar("R")


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Make a method of a tracker run on the main process only, where ``main_process_only`` says so.

    Use it as a decorator on every method of a tracker that talks to its service.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        everywhere = not getattr(args[0], "main_process_only", False)
        return function(*args, **kwargs) if everywhere or context.topology_here().is_main else None

    return run


class GeneralTracker:
    """Record the values of a run. Base class of all trackers, those of users too.

    A subclass has three attributes: ``name``, ``requires_logging_directory`` and ``tracker``, the object of the
    library underneath. An `Accelerator` calls `start` when `Accelerator.init_trackers` is called, then
    `store_init_configuration`; `log` as often as the loop does; `finish` once, at the end.

    Args:
        _blank: used for processes on which nothing is tracked.

    Attributes:
        name: the name that ``log_with`` and ``get_tracker`` use.
        requires_logging_directory: whether it writes files, so that its constructor needs a ``logging_dir``.
        accepts_logging_directory: whether its constructor takes a ``logging_dir``, and does without if there is none.
        accepts_run_id: whether its constructor takes a ``run_id``, which is the same for all trackers of a run.
        main_process_only: whether its methods do nothing on other processes.

    Raises:
        NotImplementedError: the subclass lacks one of the three.
    """

    name: str
    requires_logging_directory: bool
    accepts_logging_directory: bool = False
    accepts_run_id: bool = False
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [
            wanted
            for wanted in ("name", "requires_logging_directory", "tracker")
            if not hasattr(type(self), wanted) and wanted not in vars(self)
        ]
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}. A tracker is a class with name = '...', "
                "requires_logging_directory = True or False, and a property `tracker`."
            )

    def start(self) -> None:
        """Open the run. Called by ``init_trackers``, once the processes are connected."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings of the run. Called by ``init_trackers`` with its ``config``."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values. Called by ``Accelerator.log``.

        Args:
            values: by name.
            step: at which step.
            **kwargs: for this tracker, from ``log_kwargs``.
        """

    def finish(self) -> None:
        """Close the run. Called by ``end_training``."""


class BlankTracker(GeneralTracker):
    """Do nothing in any method. `Accelerator.get_tracker` returns one on processes that record nothing."""

    name = ""
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        super().__init__(_blank=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


class LibraryTracker(GeneralTracker):
    """Record to a run of a library, which `start` opens. Base class of the adapters.

    Most libraries are called alike, and under the names of Weights & Biases. Where one differs, a subclass has its
    names, or the method that calls it.

    Args:
        run_name: what the run, or its project, is called.
        **kwargs: for the library, from ``init_kwargs``.

    Attributes:
        open_call: what returns a run, in the module of the library, which has the name of the tracker.
        run_argument: its argument that takes ``run_name``.
        config_call: what takes the settings, in the run; if empty, they are not recorded.
        close_call: what ends the run.
    """

    requires_logging_directory = False
    open_call = "init"
    run_argument = "project"
    config_call = ""
    close_call = "finish"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run of the library.

        Raises:
            NotPreparedError: it was not opened yet.
        """
        if self.run is None and context.topology_here().is_main:
            raise NotPreparedError(
                f"The run of {self.name} is not open. Call accelerator.init_trackers('my project') before, and "
                "end_training after the last use."
            )
        return self.run

    @property
    def library(self) -> Any:
        """The module of the library."""
        return load_library(self.name, self.name)

    @override
    @on_main_process
    def start(self) -> None:
        self.run = self.open()

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if self.config_call:
            operator.attrgetter(self.config_call)(self.tracker)(plain_values(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.log(plain_values(values), step=step, **kwargs)

    @override
    @on_main_process
    def finish(self) -> None:
        if self.run is not None:
            self.close()

    def open(self) -> Any:
        """Return a new run. Called by `start`, on the main process."""
        return getattr(self.library, self.open_call)(**{self.run_argument: self.run_name, **self.init_kwargs})

    def close(self) -> None:
        """Close ``run``, which is open. Called by `finish`, on the main process."""
        getattr(self.run, self.close_call)()


def load_library(
    module: str, tracker: str, *, package: str | None = None, missing_ok: bool = False
) -> ModuleType | None:
    """Import the library of a tracker; None if it is not installed, and ``missing_ok``.

    ``package`` is its name on the package index, if that differs from ``module``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".", maxsplit=1)[0]:
            raise  # the library is installed, and one of its own imports is missing
        if missing_ok:
            return None
        raise MissingDependencyError(package or module, needed_for=f"log_with={tracker!r}") from error


def plain(value: Any) -> Any:
    """Return a number instead of a tensor or numpy scalar that holds just one; anything else as it is."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value.item() if getattr(value, "shape", None) == (1,) and hasattr(value, "item") else value


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with numbers in place of tensors that hold just one."""
    return {name: plain(value) for name, value in values.items()}


def is_number(value: Any) -> bool:
    """Return whether a tracker can draw a value as a point of a curve."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
