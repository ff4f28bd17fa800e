"""Record to a file of JSON lines, one for each run. Needs no library."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.records import read_run
from nb_accelerate.training.tracking.tracker import GeneralTracker, on_main_process, plain_values

if TYPE_CHECKING:
    import os

    from nb_accelerate.base.records import RunRecord


class JSONLinesTracker(GeneralTracker):
    """Write each call of ``log`` as a line of a file, which any program, or a notebook, can read while it grows.

    Examples:
        ```python
        accelerator = Accelerator(log_with="jsonl", project_dir="runs")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": loss}, step=step)

        read_run("runs/digits.jsonl")     # in a cell: the curves
        ```

    Args:
        run_name: the file is called that; a second run of the name gets a number.
        logging_dir: where the file goes; the working directory by default.

    Attributes:
        path: the file; None until `start`.
    """

    name = "jsonl"
    requires_logging_directory = False
    accepts_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.run_name = run_name
        self.folder = Path(logging_dir or ".")
        self.path: Path | None = None

    @property
    def tracker(self) -> RunRecord | None:
        """What was recorded so far; None on processes that record nothing."""
        return None if self.path is None else read_run(self.path)

    @override
    @on_main_process
    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while self.path is None:
            name = self.run_name if number == 1 else f"{self.run_name}-{number}"
            path = self.folder / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)  # a name such as "digits/small" is a folder and a file
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                number += 1
            else:
                self.path = path

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"config": plain_values(values)})

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        entry: dict[str, Any] = {} if step is None else {"step": step}
        self._write({**entry, "time": round(time.time(), 3), **plain_values(values), **kwargs})

    def _write(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            self.start()
        assert self.path is not None
        line = json.dumps(entry, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
        # Opened for each line: nothing is open, or lost, when the process is killed.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
