"""The panel in a notebook: a table that is plain output, and buttons below it that are widgets.

::

    View --> HTML --display_data, then update_display_data--> the table: stays in the saved notebook, needs no kernel
    buttons, a log, stacks --comm of ipywidgets------------> below it, and gone when the run is over
    HTML, once a page asks for all widgets ----------------> in a page that was loaded anew, in place of the table

A page that is loaded anew knows no display ids, so the table in it stands still. It does ask for the state of the
widgets that it was saved with (see `nb_accelerate.display.new_pages`): from then on one of them draws the panel too.

The widgets are made in a thread of their own, in an empty context: buttons then belong to no cell, so that newer
kernels answer them while the cell that shows them still runs. Older ones answer after it; the kernel's own
interrupt always works.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.display import asides, html, notification
from nb_accelerate.display.lines import bundle
from nb_accelerate.display.new_pages import answer_new_pages, stop_answering
from nb_accelerate.display.page_title import REPEAT_EVERY, percent_of, title_script
from nb_accelerate.display.panel import PAUSE, RESUME, Drawing
from nb_accelerate.display.strips import kinds_named
from nb_accelerate.helper_threads import HelperThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nb_accelerate.display.lines import Paper
    from nb_accelerate.display.panel import Action, Watched
    from nb_accelerate.display.view import View

_ACTIONS_EVERY = 2.0
"""Seconds between two looks whether buttons can be pressed: each reads the pages of all ranks."""

_WAIT = 10.0
"""Seconds for the thread that makes the buttons to end."""

_ASK_EVERY = 3.0
"""Seconds between two questions for the stacks that are shown."""

_CHARTS_EVERY = 4
"""Drawings of a panel for one that is sent when it has charts, which are larger and move less."""


_TO_KEEP = (
    '<div class="nba"><p class="nba-dim">This page was loaded while it ran, so the saved notebook lacks this '
    "panel. To keep it: nb_accelerate.attach() in a cell, before the kernel ends.</p></div>"
)

_LINES_MISSING = (
    '<div class="nba"><p class="nba-dim">This page was loaded while it ran: what ranks print is in their logs, below, '
    "and no longer in this cell.</p></div>"
)


class NotebookPanel(Drawing):
    """A panel in a cell.

    Args:
        paper: the cell.
        kernel: it runs in.
        ranks: those whose log one can look at.
        watched: what the buttons are about.
        where: returns the frames of a rank, users' and others, innermost first, from a dump of its stacks.
        place: id of a display that this takes the place of; "" for a new one.
    """

    every = 0.5
    is_redrawn = True

    def __init__(
        self,
        paper: Paper,
        kernel: Any,
        ranks: Sequence[int],
        watched: Watched,
        where: Callable[[str], tuple[list[str], list[str]]],
        *,
        place: str = "",
    ) -> None:
        self._paper = paper
        self._kernel = kernel
        self._ranks = ranks
        self._watched = watched
        self._where = where
        self._id = place or uuid.uuid4().hex
        self._buttons_id = uuid.uuid4().hex
        self._box: Any = None
        self._aside: Any = None
        self._all_frames: Any = None
        self._copy: Any = None
        self._actions: list[tuple[Action, Any]] = []
        self._look_at_actions = 0.0
        self._controls: Any = None
        self._memory_table = ""
        self._again: Any = None
        self._title: Any = None
        self._percent: int | None = None
        self._title_at = 0.0
        self._began = time.monotonic()
        self._shown: Callable[[], str] | None = None
        self._ask_at = 0.0
        self._log_of = min(ranks)
        self._has_opened_log = False
        self._last: dict[str, Any] = {}
        self._is_shown = self.is_announced = bool(place)
        self._draws = 0
        self._named: frozenset[str] = frozenset()
        self._has_buttons = False
        self._thread: HelperThread | None = None
        if self.is_announced:  # the table has its place already, and what ranks print before it is drawn goes below
            self._keep_place_for_buttons()

    @override
    def draw(self, view: View) -> None:
        if self._thread is None:
            self._thread = HelperThread(self._make, name="panel")
            self._thread.start()
            answer_new_pages(self._kernel)
        self._draws += 1
        self._named |= kinds_named(view.times, self._named)
        view = replace(view, named=self._named)
        self._memory_table = view.memory
        if not view.charts or self._draws % _CHARTS_EVERY == 1:
            content = bundle(view)
            if content != self._last:
                self._last = content
                self._show(content)
        if self._draws == 1 and not self.is_announced:
            self._keep_place_for_buttons()
        if self._thread.is_alive() or self._box is None:
            return
        self._show_in_title(percent_of(view))
        if self._pause is not None:
            self._change(self._pause, description=RESUME if view.is_paused else PAUSE)
        if time.monotonic() >= self._look_at_actions:
            self._look_at_actions = time.monotonic() + _ACTIONS_EVERY
            for action, button in self._actions:
                why_not = action.why_not()
                self._change(button, disabled=bool(why_not), tooltip=why_not or action.hint)
        if self._again.is_asked_for:
            at = time.strftime("%H:%M:%S on %d %B")
            missing = _LINES_MISSING if self._has_log else ""
            self._again.value = html.style() + html.render(view, at=at) + html.render_charts(view) + missing
            if missing and not self._has_opened_log:  # once: who closes it wants it closed
                self._has_opened_log = True
                self._open_log()
        if self._shown is not None:
            if self._shown == self._stacks and time.monotonic() >= self._ask_at:
                self._ask()
            said = self._shown()
            if said != self._aside.value:
                self._aside.value = said
        if not self._has_buttons:
            self._has_buttons = True
            self._send("update_display_data", self._buttons_id, {"data": self._view_of_buttons(), "metadata": {}})

    @override
    def finish(self, view: View, *, was_drawn: bool) -> None:
        if self._thread is not None:
            self._thread.join(_WAIT)
            stop_answering(self._kernel)
        if self._box is not None:  # and its display still there: without one nothing is run in the page
            self._tell_end(view)
        if view.is_worth_keeping and (was_drawn or view.bars or view.charts):
            self._show(bundle(view))
        elif self._is_shown:
            took = f": {view.state} in {view.elapsed}" if was_drawn else ""
            self._show(
                {"data": {"text/plain": f"{view.facts.brief}{took}" if self.is_announced else ""}, "metadata": {}}
            )
        if self._draws:
            self._send("update_display_data", self._buttons_id, {"data": {}, "metadata": {}})
        if self._box is None:
            return
        if self._again.is_asked_for:  # the page knows no display that could be left in the place of widgets
            logs = asides.logs({rank: asides.last_lines(self._watched.log(rank)) for rank in self._ranks})
            self._again.value = html.style() + html.render(view) + html.render_charts(view) + logs + _TO_KEEP
            self._box.children = (self._again,)
            _close(self._controls)
            _close(self._title)
            _close(self._aside)
        else:
            _close(self._box)

    @property
    def _has_log(self) -> bool:
        return any(self._watched.log(rank) for rank in self._ranks)

    def _open_log(self) -> None:
        """Show what ranks print, unless the user looks at something else."""
        if self._shown is None:
            self._log_of = next(rank for rank in self._ranks if self._watched.log(rank))
            self._open(self._log)

    def _keep_place_for_buttons(self) -> None:
        """Display nothing, below the table, where the buttons come to stand whatever is printed until they are made."""
        self._send("display_data", self._buttons_id, {"data": {}, "metadata": {}})

    def _show(self, content: dict[str, Any]) -> None:
        kind = "update_display_data" if self._is_shown else "display_data"
        self._is_shown = True
        self._send(kind, self._id, content)

    def _show_in_title(self, percent: int | None) -> None:
        now = time.monotonic()
        if percent != self._percent or (percent is not None and now >= self._title_at):
            self._percent, self._title_at = percent, now + REPEAT_EVERY
            self._title.value = title_script(self._buttons_id, percent, self._draws)

    def _change(self, button: Any, **values: object) -> None:
        """Change a button that is not so already, in an empty context.

        ipykernel 7.4 sends clicks of a widget to the shell whose request has changed it last, and that of the cell that
        runs answers none.
        """
        if all(getattr(button, name) == value for name, value in values.items()):
            return
        context = contextvars.copy_context()
        parent = getattr(self._kernel, "_shell_parent", None)
        if parent is not None:
            context.run(parent.set, {})
        context.run(_set, button, values)

    def _tell_end(self, view: View) -> None:
        last = title_script(self._buttons_id, None, self._draws)
        if time.monotonic() >= self._began + notification.LEAST_SECONDS:
            last += notification.notify_script(self._buttons_id, view)
        self._title.value = last

    def _send(self, kind: str, place: str, content: dict[str, Any]) -> None:
        self._paper.display(kind, {**content, "transient": {"display_id": place}})

    def _view_of_buttons(self) -> dict[str, Any]:
        model = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        return {"application/vnd.jupyter.widget-view+json": model}

    def _make(self) -> None:
        parent = getattr(self._kernel, "_shell_parent", None)
        if parent is not None:
            parent.set({})  # this thread's context only
        import ipywidgets

        self._pause: Any = None
        self._aside = ipywidgets.HTML()
        self._again = _html_of_new_pages()
        self._title = ipywidgets.HTML(layout={"display": "none"})
        self._actions = [
            (action, self._button(action.title, action.hint, action.do)) for action in self._watched.actions()
        ]
        self._pause = next((button for action, button in self._actions if action.title == PAUSE), None)
        actions = [button for _, button in self._actions]
        views = [
            self._button("Stacks", "show where every rank is", lambda: self._toggle(self._stacks)),
            self._button("Memory", "show what every rank holds", lambda: self._toggle(self._memory)),
        ]
        self._all_frames = ipywidgets.ToggleButton(
            description="All frames",
            tooltip="show each frame of libraries as well",
            layout={"width": "auto", "flex": "0 0 auto", "display": "none"},
        )
        self._copy = ipywidgets.HTML(asides.COPY_BUTTON, layout={"flex": "0 0 auto", "display": "none"})
        notify = ipywidgets.HTML(notification.notify_button(self._buttons_id), layout={"flex": "0 0 auto"})
        margin = {"margin": "0 0 0 5px", "flex_flow": "row wrap"}
        self._controls = ipywidgets.HBox(
            [*actions, notify, *views, *self._logs(), self._all_frames, self._copy], layout=margin
        )
        self._box = ipywidgets.VBox([self._again, self._controls, self._aside, self._title])
        self._box.add_class("nba-asides")

    def _button(self, title: str, hint: str, action: Callable[[], object]) -> Any:
        import ipywidgets

        button = ipywidgets.Button(description=title, tooltip=hint, layout={"width": "auto", "flex": "0 0 auto"})
        button.on_click(lambda _: action())
        return button

    def _toggle(self, aside: Callable[[], str]) -> None:
        """Show something below the panel, or no longer."""
        self._open(None if self._shown == aside else aside)

    def _open(self, aside: Callable[[], str] | None) -> None:
        self._shown = aside
        if aside is None:
            self._aside.value = ""
        if aside == self._stacks:
            self._ask()
        self._all_frames.layout.display = "" if aside == self._stacks else "none"
        self._copy.layout.display = "none" if aside is None else ""

    def _ask(self) -> None:
        self._ask_at = time.monotonic() + _ASK_EVERY
        self._watched.ask()

    def _stacks(self) -> str:
        found = {rank: self._where(dump) for rank, dump in self._watched.stacks().items() if dump}
        return asides.stacks(found, whole=self._all_frames.value)

    def _memory(self) -> str:
        return asides.memory(self._memory_table)

    def _log(self) -> str:
        if self._log_of not in self._ranks:
            return asides.log(f"rank {self._log_of} does not run this", self._log_of)
        return asides.log(self._watched.log(self._log_of), self._log_of)

    def _logs(self) -> list[Any]:
        """Make a button for the log of a rank, and a field that chooses the rank.

        No list to choose from: in a cell's output JupyterLab takes the arrow keys, and all letters, for itself, but
        where one can write.
        """
        import ipywidgets

        button = self._button("Log", "show what a rank printed last", lambda: self._toggle(self._log))
        if len(self._ranks) == 1:
            return [button]
        field = ipywidgets.BoundedIntText(
            value=self._log_of,
            min=self._log_of,
            max=max(self._ranks),
            description="of rank",
            tooltip="rank whose log is shown",
            style={"description_width": "initial"},
            layout={"width": "92px"},
        )
        field.observe(lambda change: self._show_log(change["new"]), "value")
        # One box, so that a narrow cell does not part them.
        return [ipywidgets.HBox([button, field], layout={"flex": "0 0 auto"})]

    def _show_log(self, rank: int) -> None:
        self._log_of = rank
        self._open(self._log)


def _html_of_new_pages() -> Any:
    """Return an HTML widget with an attribute ``is_asked_for``: a page has asked for its state since it was made."""
    import ipywidgets

    class HTMLOfNewPages(ipywidgets.HTML):  # type: ignore[misc]
        is_asked_for = False

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
            # All of its state is sent when it is made, and when a page asks for all widgets.
            self.is_asked_for |= key is None and self.comm is not None
            return super().get_state(key, drop_defaults)

    widget = HTMLOfNewPages()
    widget.add_class("nba-again")
    return widget


def _set(widget: Any, values: Mapping[str, object]) -> None:
    with widget.hold_sync():  # one message
        for name, value in values.items():
            setattr(widget, name, value)


def _close(widget: Any) -> None:
    """Close a widget and all that belong to it: its children, and their looks, which are widgets as well."""
    for child in getattr(widget, "children", ()):
        _close(child)
    looks = (getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name))
    for one in (widget, *looks):
        with contextlib.suppress(Exception):  # the front end may be gone
            one.close()
