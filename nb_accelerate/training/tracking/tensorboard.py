"""Record to TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

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
        known = {
            name: value if isinstance(value, (int, float, str, bool)) else str(value) for name, value in values.items()
        }
        self.tracker.add_hparams(known, metric_dict={})
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
