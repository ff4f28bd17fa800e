"""Record to ClearML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.training.tracking.tracker import (
    LibraryTracker,
    is_number,
    on_main_process,
    plain_values,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

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
