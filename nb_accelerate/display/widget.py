"""The panel as a widget of a notebook; at the end it becomes HTML that needs no kernel.

The widget is made in a thread of its own, in an empty context: its buttons then belong to no cell, so that newer
kernels answer them while the cell that shows them still runs. Older ones answer after it; the kernel's own
interrupt always works.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from html import escape
from textwrap import indent
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.display import html
from nb_accelerate.display.lines import bundle
from nb_accelerate.display.panel import Drawing
from nb_accelerate.display.words import named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.display.lines import Paper
    from nb_accelerate.display.panel import Watched
    from nb_accelerate.display.view import View

_WAIT = 10.0
_NOBODY = -1
_CHARTS_EVERY = 5
"""Drawings of the panel for one of its charts, which are larger and move less."""


class Widget(Drawing):
    """A panel in a cell.

    Args:
        paper: the cell.
        kernel: it runs in.
        ranks: for the choice of a log.
        watched: what the buttons are about.
        where: says where a rank is, from a dump of its stacks.
        place: id of a display that this takes the place of; "" for a new one.
    """

    every = 0.3

    def __init__(
        self,
        paper: Paper,
        kernel: Any,
        ranks: Sequence[int],
        watched: Watched,
        where: Callable[[str], str],
        *,
        place: str = "",
    ) -> None:
        self._paper = paper
        self._kernel = kernel
        self._ranks = ranks
        self._watched = watched
        self._where = where
        self._id = place or uuid.uuid4().hex
        self._box: Any = None
        self._panel: Any = None
        self._aside: Any = None
        self._shown: Callable[[], str] | None = None
        self._last = ""
        self._is_shown = bool(place)
        self._draws = 0
        self._charts: Any = None
        self._thread: threading.Thread | None = None

    @override
    def draw(self, view: View) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name="nb_accelerate-panel", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            return
        if self._panel is None:
            return
        now = html.render(view)
        if now != self._last:
            self._last = self._panel.value = now
        self._draws += 1
        if self._draws % _CHARTS_EVERY == 1:
            charts = html.render_charts(view)
            if charts != self._charts.value:
                self._charts.value = charts
        if self._shown is not None:
            said = self._shown()
            if said != self._aside.value:
                self._aside.value = said
        if not self._box.layout.display:
            return
        self._box.layout.display = None
        data: dict[str, Any] = {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self._box.model_id,
            },
            "text/plain": view.facts.name,
        }
        self._show({"data": data, "metadata": {}})

    @override
    def finish(self, view: View, *, was_drawn: bool) -> None:
        if self._thread is not None:
            self._thread.join(_WAIT)
        if view.is_worth_keeping:
            self._show(bundle(view))
        elif self._is_shown:
            self._show({"data": {"text/plain": view.facts.details}, "metadata": {}})
        if self._box is not None:
            self._close()

    def _show(self, content: dict[str, Any]) -> None:
        kind = "update_display_data" if self._is_shown else "display_data"
        self._is_shown = True
        self._paper.display(kind, {**content, "transient": {"display_id": self._id}})

    def _make(self) -> None:
        parent = getattr(self._kernel, "_shell_parent", None)
        if parent is not None:
            parent.set({})  # this thread's context only
        import ipywidgets

        style = ipywidgets.HTML(html.style())
        style.layout.display = "none"
        self._panel = ipywidgets.HTML()
        self._charts = ipywidgets.HTML()
        self._aside = ipywidgets.HTML()
        buttons = [
            *(self._button(action.title, action.hint, action.do) for action in self._watched.actions()),
            self._button("Stacks", "show where every rank is", self._show_stacks),
        ]
        logs = ipywidgets.Dropdown(
            # Not None for nothing: a dropdown takes that as having no choice at all, and is blank.
            options=[("log of ...", _NOBODY), *((f"log of rank {rank}", rank) for rank in self._ranks)],
            layout={"width": "auto"},
        )
        logs.observe(lambda change: self._show_log(change["new"]), "value")
        controls = ipywidgets.HBox([*buttons, logs], layout={"margin": "0 0 0 5px"})
        self._box = ipywidgets.VBox([style, self._panel, self._charts, controls, self._aside])
        self._box.layout.display = "none"  # until there is something in it

    def _button(self, title: str, hint: str, action: Callable[[], object]) -> Any:
        import ipywidgets

        button = ipywidgets.Button(description=title, tooltip=hint, layout={"width": "auto"})
        button.on_click(lambda _: action())
        return button

    def _show_stacks(self) -> None:
        if self._shown == self._stacks:
            self._shown, self._aside.value = None, ""
            return
        self._watched.ask()
        self._shown = self._stacks

    def _stacks(self) -> str:
        found = self._watched.stacks()
        lines = [f"{named([rank])}:\n{indent(self._where(dump), '  ')}" for rank, dump in sorted(found.items()) if dump]
        return _pre("\n\n".join(lines) or "no answer yet")

    def _show_log(self, rank: int) -> None:
        if rank == _NOBODY:
            self._shown, self._aside.value = None, ""
            return
        self._shown = lambda: _pre("".join(self._watched.log(rank).splitlines(keepends=True)[-40:]) or "nothing yet")

    def _close(self) -> None:
        def all_of(widget: Any) -> list[Any]:
            looks = (getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name))  # widgets as well
            return [widget, *looks, *(one for child in getattr(widget, "children", ()) for one in all_of(child))]

        for widget in all_of(self._box):
            with contextlib.suppress(Exception):  # the front end may be gone
                widget.close()


def _pre(text: str) -> str:
    return f'<div class="nba"><pre class="nba-aside">{escape(text)}</pre></div>'
