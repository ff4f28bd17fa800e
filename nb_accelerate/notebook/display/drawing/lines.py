"""The panel where there are no widgets: a line now and then, and the whole at the end."""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from nb_accelerate.notebook.display.drawing import html, text
from nb_accelerate.notebook.display.drawing.block import Block
from nb_accelerate.notebook.display.panel import Drawing

if TYPE_CHECKING:
    from nb_accelerate.notebook.display.view import View


_FIRST = 5.0
_LONGEST = 60.0
# How much slower, in a warning that is otherwise the same. Seconds come after what is compared.
_CHANGES = re.compile(r"\d+\.\d+x")


class Output(Protocol):
    """Where lines and displays go."""

    own_stream: Any  # for lines of this package's own

    def write(self, stream: Any, text: str) -> None:
        """Take lines."""

    def display(self, kind: str, content: dict[str, Any]) -> None:
        """Take something rich."""


class Lines(Drawing):
    """For a log: a line after five seconds, ten, twenty ..., then one each minute, and each problem at once.

    What was shorter leaves nothing but its bars, since those were not printed.
    """

    every = 1.0
    shows_rows = False

    def __init__(self, output: Output, *, is_notebook: bool) -> None:
        self._output = output
        self._is_notebook = is_notebook
        self._said: set[str] = set()
        self._calls = 0.0
        self._next = _FIRST
        self._wrote = False

    @override
    def draw(self, view: View) -> None:
        if view.state == "starting":
            return
        self._calls += self.every
        self._warn(view)
        if self._calls >= self._next and view.has_steps:
            self._next = self._calls + min(self._calls, _LONGEST)
            self._output.write(self._output.own_stream, f"{text.line(view)}\n")
            self._wrote = True

    def _warn(self, view: View) -> None:
        for warning in view.warnings:
            cause = _CHANGES.sub("", warning.split(" for ")[0].split(":")[0])
            if cause not in self._said:
                self._said.add(cause)
                self._output.write("stderr", f"{warning}\n")
        if not view.warnings:
            self._said.clear()

    @override
    def finish(self, view: View, *, was_drawn: bool) -> None:
        self._warn(view)  # what a short run never had drawn
        if not (self._wrote or view.bars or view.charts):
            return
        if self._is_notebook:
            self._output.display("display_data", bundle(view))
        else:
            self._output.write(self._output.own_stream, f"{text.line(view)}\n")


def bundle(view: View, *, with_style: bool = True) -> dict[str, Any]:
    """Return a view as the content of a message that displays it, good for ever: nothing in it needs a kernel."""
    at = time.strftime("%H:%M:%S on %d %B") if view.state in ("starting", "running") else ""
    return {
        "data": {
            "text/html": (html.style() if with_style else "") + html.render(view, at=at) + html.render_charts(view),
            "text/plain": text.table(view),
        },
        "metadata": {},
        "transient": {},
    }


# The type of what is sent: an object with the panel's ``id`` and its ``lines``, none when it has ended. It is for the
# moment only, and nothing of it belongs into a notebook; what is there beside it does.
PANEL = "application/vnd.nb_accelerate.panel+json"


class Relay(Drawing):
    """Sends the panel to a front end that has asked for it, see `FROM_TERMINAL`."""

    every = Block.every

    def __init__(self, output: Output) -> None:
        self._output = output
        self._id = uuid.uuid4().hex
        self._lines: list[str] = []

    @override
    def draw(self, view: View) -> None:
        lines = text.table(view, bars=True).split("\n")
        if lines != self._lines:
            self._lines = lines
            self._send({"data": {}, "metadata": {}, "transient": {}}, lines)

    @override
    def finish(self, view: View, *, was_drawn: bool) -> None:
        left = bundle(view) if view.is_worth_keeping else {"data": {}, "metadata": {}, "transient": {}}
        self._send(left, [])

    def _send(self, content: dict[str, Any], lines: list[str]) -> None:
        panel = {"id": self._id, "lines": lines}
        self._output.display("display_data", {**content, "data": {**content["data"], PANEL: panel}})
