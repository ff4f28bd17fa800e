"""The panel of a kernel whose front end is a terminal: what to draw there is sent, a `Block` at the other end draws it.

::

    kernel: View --> Relay --display_data--> front end --> the lines --> Block
                                                     `---> what is left at the end --> the saved notebook
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.notebook.display.drawing import text
from nb_accelerate.notebook.display.drawing.block import Block
from nb_accelerate.notebook.display.drawing.lines import bundle
from nb_accelerate.notebook.display.panel import Drawing

if TYPE_CHECKING:
    from nb_accelerate.notebook.display.drawing.lines import Output
    from nb_accelerate.notebook.display.view import View

PANEL = "application/vnd.nb_accelerate.panel+json"
"""The type of what is sent: an object with the panel's ``id`` and its ``lines``, none when it has ended. It is for the
moment only, and nothing of it belongs into a notebook; what is there beside it does."""


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
