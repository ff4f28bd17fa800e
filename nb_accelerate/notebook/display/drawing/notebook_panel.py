"""The panel in a notebook: a table that is plain output, and buttons below it that are widgets.

::

    View --> HTML --display_data, then update_display_data--> the table: stays in the saved notebook, needs no kernel
    style sheet --display_data, once-----------------------> for the table while it moves; the last table has its own
    buttons, a log, stacks --comm of ipywidgets------------> below it, and gone when the run is over
    HTML, once a page asks for all widgets ----------------> in a page that was reloaded, in place of the table

A reloaded page knows no display ids, so the table in it stands still. It does ask for the state of the
widgets that it was saved with (`notebook.display.widgets.shell_channel`): from then on one of them draws the panel.

Clicks are answered while the cell runs (see `notebook.display.widgets.shell_channel`). In a kernel where they could not
be, there are no buttons. The kernel's own interrupt always works.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.notebook.display.drawing import html
from nb_accelerate.notebook.display.drawing.lines import bundle
from nb_accelerate.notebook.display.panel import Drawing
from nb_accelerate.notebook.display.widgets.controls import Controls
from nb_accelerate.notebook.display.widgets.shell_channel import answer_messages, can_answer, stop_answering

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.drawing.lines import Output
    from nb_accelerate.notebook.display.panel import PanelSource
    from nb_accelerate.notebook.display.view import View

_WAIT = 10.0  # seconds for the thread that makes the buttons to end
_CHARTS_EVERY = 4  # drawings of a panel for one that is sent when it has charts, which are larger and move less


class NotebookPanel(Drawing):
    """A panel in a cell."""

    every = 0.5
    shows_notes = True

    def __init__(
        self,
        output: Output,
        kernel: Any,
        ranks: Sequence[int],
        source: PanelSource,
        *,
        display_id: str = "",
    ) -> None:
        self._output = output
        self._kernel = kernel
        self._id = display_id or uuid.uuid4().hex
        self._buttons_id = uuid.uuid4().hex
        self._style_id = uuid.uuid4().hex
        self._controls = Controls(kernel, ranks, source) if can_answer(kernel) else None
        self._last: dict[str, Any] = {}
        self._is_shown = self.is_announced = bool(display_id)
        self._draws = 0
        self._is_made = self._has_buttons = False
        self._thread: HelperThread | None = None
        if self.is_announced:  # the table has its place already, and what ranks print before it is drawn goes below
            self._reserve(self._buttons_id)
            self._reserve(self._style_id)

    @override
    def draw(self, view: View) -> None:
        if not self._draws:
            kind = "update_display_data" if self.is_announced else "display_data"
            self._send(kind, self._style_id, {"text/html": html.style(), "text/plain": ""})
            if self._controls is not None:
                answer_messages(self._kernel)
                # ipywidgets takes a while to import.
                self._thread = HelperThread(self._make, self._controls, name="panel")
                self._thread.start()
        self._draws += 1
        if not view.charts or self._draws % _CHARTS_EVERY == 1:
            content = bundle(view, with_style=False)
            if content != self._last:
                self._last = content
                self._show(content["data"])
        if self._draws == 1 and not self.is_announced:
            self._reserve(self._buttons_id)
        if self._controls is None or not self._is_made:
            return
        self._controls.draw(view)
        if not self._has_buttons:
            self._has_buttons = True
            self._send("update_display_data", self._buttons_id, self._controls.bundle())

    @override
    def finish(self, view: View, *, was_drawn: bool) -> None:
        if self._thread is not None:
            self._thread.join(_WAIT)
        controls = self._controls if self._is_made else None
        if view.is_worth_keeping and (was_drawn or view.bars or view.charts or view.warnings):
            self._show(bundle(view)["data"])
        elif self._is_shown or view.notes:
            took = f": {view.state} in {view.elapsed}" if was_drawn else ""
            brief = [f"{view.facts.brief}{took}"] if self.is_announced else []
            self._show({"text/plain": "\n".join([*brief, *view.notes])})
        if self._draws:
            self._send("update_display_data", self._buttons_id, {})
            self._send("update_display_data", self._style_id, {})
        if controls is not None:
            controls.close(view)
        if self._thread is not None:
            stop_answering(self._kernel)

    def _make(self, controls: Controls) -> None:
        controls.make()
        self._is_made = True

    def _reserve(self, display_id: str) -> None:
        """Display nothing, below the table, to keep the place for a later display: output until then comes below it."""
        self._send("display_data", display_id, {})

    def _show(self, data: dict[str, Any]) -> None:
        kind = "update_display_data" if self._is_shown else "display_data"
        self._is_shown = True
        self._send(kind, self._id, data)

    def _send(self, kind: str, display_id: str, data: dict[str, Any]) -> None:
        self._output.display(kind, {"data": data, "metadata": {}, "transient": {"display_id": display_id}})
