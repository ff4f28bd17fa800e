"""Draw curves in the panel of the notebook that launched the ranks, and tell it of runs. Needs no library."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from typing_extensions import override

from nb_accelerate.base.progress_page import MAX_RECORD, here
from nb_accelerate.base.records import RunRecord, kept
from nb_accelerate.training.tracking.tracker import GeneralTracker, is_number, on_main_process, plain_values

_MAX_TEXT = 200
"""Characters that are kept of a value that is not a number."""


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
