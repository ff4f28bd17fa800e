"""Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.tracking.load import load
from nb_accelerate.tracking.tracker import LibraryTracker, on_main_process, plain_values

if TYPE_CHECKING:
    from collections.abc import Sequence


class WandBTracker(LibraryTracker):
    """Record to Weights & Biases; ``WANDB_MODE=offline`` keeps the run on this machine.

    Args:
        run_name: the project.
        **kwargs: those of ``wandb.init``.
    """

    name = "wandb"

    @override
    def open(self) -> Any:
        wandb: Any = load("wandb", self.name)
        return wandb.init(**{"project": self.run_name, **self.init_kwargs})

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(plain_values(values), allow_val_change=True)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.log(plain_values(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: lists of images by name; arrays, PIL images or files.
            step: at which step.
            **kwargs: those of the run's ``log``.
        """
        wandb: Any = load("wandb", self.name)
        pictures = {name: [wandb.Image(image) for image in images] for name, images in values.items()}
        self.tracker.log(pictures, step=step, **kwargs)

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
        wandb: Any = load("wandb", self.name)
        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.tracker.log({table_name: table}, step=step, **kwargs)

    @override
    @on_main_process
    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
