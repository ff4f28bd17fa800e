"""Record to Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.training.tracking.tracker import on_main_process, plain_values
from nb_accelerate.training.tracking.wandb_like import WandBLikeImageTracker

if TYPE_CHECKING:
    from collections.abc import Sequence


class WandBTracker(WandBLikeImageTracker):
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
