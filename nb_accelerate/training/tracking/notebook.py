"""Draw curves in the panel of the notebook that launched the ranks. Needs no library."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from typing_extensions import override

from nb_accelerate.base.progress_page import MAX_RECORD, here
from nb_accelerate.base.records import RunRecord
from nb_accelerate.training.tracking.tracker import GeneralTracker, is_number, on_main_process, plain_values

_MAX_TEXT = 200
"""Characters that are kept of a value that is not a number."""


class NotebookTracker(GeneralTracker):
    """Draw what is logged in the panel, beside earlier runs of the name. `nb_accelerate.runs` has all of them.

    Without a notebook that listens, in a script say, the values are only in `tracker`.

    Examples:
        ```python
        accelerator = Accelerator(log_with="notebook")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": loss, "accuracy": accuracy}, step=step)
        ```

    Args:
        run_name: what the run is called; a second one of the name gets a number.
    """

    name = "notebook"
    requires_logging_directory = False

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name = run_name
        self._id = uuid.uuid4().hex
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
        kept = {name: _kept(value) for name, value in plain_values(values).items()}
        self._record.config.update(kept)
        self._send_parts("config", kept)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        kept = {name: _kept(value) for name, value in plain_values(values).items()}
        always: dict[str, Any] = {"time": round(time.time(), 3)}
        if step is not None:
            always["step"] = step
        self._record.add({**always, **kept})
        self._send_parts("row", kept, always)

    def _send_parts(self, kind: str, values: dict[str, Any], always: dict[str, Any] | None = None) -> None:
        """Send some values; in two halves if they are too many for one record."""
        if self._send({kind: {**(always or {}), **values}}) or len(values) < 2:
            return
        names = list(values)
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            self._send_parts(kind, {name: values[name] for name in half}, always)

    def _send(self, entry: dict[str, Any]) -> bool:
        data = json.dumps({"run": self._id, **entry}).encode()
        if len(data) > MAX_RECORD:
            return False
        here().outlet(data)
        return True


def _kept(value: Any) -> Any:
    return value if is_number(value) or value is None else str(value)[:_MAX_TEXT]
