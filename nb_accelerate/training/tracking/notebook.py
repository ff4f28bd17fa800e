"""Trackers that need no library: curves in the panel of the notebook, and files of JSON lines."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.progress_page import MAX_RECORD, here
from nb_accelerate.base.records import RunRecord, kept
from nb_accelerate.base.records.files import first_line, read_run, write_end, write_lines
from nb_accelerate.training.tracking.tracker import GeneralTracker, is_number, on_main_process, plain_values

if TYPE_CHECKING:
    import os


_MAX_TEXT = 200  # characters that are kept of a value that is not a number


class NotebookTracker(GeneralTracker):
    """Draw what is logged in the panel, beside earlier runs of the name. `nb_accelerate.runs` has all of them.

    Examples:
        ```python
        accelerator = Accelerator(log_with="notebook")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": loss, "accuracy": accuracy}, step=step)
        ```

    Args:
        run_name: what the run is called; a second one of the name gets a number.
        run_id: by which the notebook knows it; several trackers of a run have the same.
    """

    name = "notebook"
    requires_logging_directory = False
    accepts_run_id = True

    def __init__(self, run_name: str, run_id: str = "") -> None:
        super().__init__()
        self.run_name = run_name
        self._id = run_id or uuid.uuid4().hex
        self._record = RunRecord(name=run_name)

    @property
    def tracker(self) -> RunRecord:
        """What was logged by this process; in a notebook, its curves."""
        return self._record

    @override
    @on_main_process
    def start(self) -> None:
        self._send({"name": self.run_name})

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        kept = short(values)
        self._record.config.update(kept)
        self._send_parts("config", kept)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        kept = short(values)
        always: dict[str, Any] = {"time": round(time.time(), 3)}
        if step is not None:
            always["step"] = step
        self._record.add({**always, **kept})
        self._send_parts("row", kept, always)

    @override
    @on_main_process
    def finish(self) -> None:
        self._record.end("done")
        self._send({"end": "done"})

    def _send_parts(self, kind: str, values: dict[str, Any], always: dict[str, Any] | None = None) -> None:
        """Send some values; in two halves if they are too many for one record."""
        if self._send({kind: {**(always or {}), **values}}) or len(values) < 2:
            return
        names = list(values)
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            self._send_parts(kind, {name: values[name] for name in half}, always)

    def _send(self, entry: dict[str, Any]) -> bool:
        return tell(self._id, {"name": self.run_name, **entry})


def tell(run_id: str, entry: dict[str, Any]) -> bool:
    """Tell the notebook of a run; what `nb_accelerate.runs` shows in this process, if it is no rank.

    Returns:
        False if it is too long.
    """
    data = json.dumps({"run": run_id, **entry}).encode()
    if len(data) > MAX_RECORD:
        return False
    (here().outlet or kept.take)(data)
    return True


def short(values: dict[str, Any]) -> dict[str, Any]:
    """Return numbers as they are, and the beginning of the text of anything else."""
    plain = plain_values(values).items()
    return {name: value if is_number(value) or value is None else str(value)[:_MAX_TEXT] for name, value in plain}


class JSONLinesTracker(GeneralTracker):
    """Write each call of ``log`` as a line of a file, which any program, or a notebook, can read while it grows.

    Examples:
        ```python
        accelerator = Accelerator(log_with="jsonl", project_dir="runs")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": loss}, step=step)

        runs(project_dir="runs")          # in a cell, also tomorrow: a table of all of them
        read_run("runs/digits.jsonl")     # the curves of one
        ```

    Args:
        run_name: the file is called that; a second run of the name gets a number.
        logging_dir: where the file goes; the working directory by default.
        run_id: by which a notebook knows it; several trackers of a run have the same.

    Attributes:
        path: the file; None until `start`.
    """

    name = "jsonl"
    requires_logging_directory = False
    accepts_logging_directory = True
    accepts_run_id = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = None, run_id: str = "") -> None:
        super().__init__()
        self._id = run_id or uuid.uuid4().hex
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
                write_lines(path, first_line())
                self._tell()

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"config": plain_values(values)})
        self._tell(config=short(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        entry: dict[str, Any] = {} if step is None else {"step": step}
        self._write({**entry, "time": round(time.time(), 3), **plain_values(values), **kwargs})
        self._tell()  # it goes on, in another cell say

    @override
    @on_main_process
    def finish(self) -> None:
        if self.path is not None:
            write_end(self.path, "done")
            self._tell(end="done")

    def _write(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            self.start()
        assert self.path is not None
        write_lines(self.path, entry)

    def _tell(self, **entry: Any) -> None:
        """Tell the notebook that there is a file, which it reads."""
        tell(self._id, {"name": self.run_name, "file": str(self.path and self.path.resolve()), **entry})
