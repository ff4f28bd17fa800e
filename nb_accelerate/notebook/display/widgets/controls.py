"""The widgets below a panel in a cell: its buttons, what they open, and what draws it in a page that was reloaded.

One button ends the run, another one opens the buttons that show something or steer training, in the same row.

Each widget is a message when it is made and another when it is closed, and so is the layout and the style of each.
Therefore widgets share these, and what a button opens is made when it is pressed for the first time.

When the run is over they are closed, but for the one that has drawn the panel in a page that was reloaded. That page
keeps a view in the saved notebook, which nothing but the page could remove: the style sheet hides what is left of it.

Clicks are answered in the thread that reads the shell channel (`notebook.display.widgets.shell_channel`): what they do
must not hold it up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from html import escape
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.diagnostics.stacks import listed
from nb_accelerate.notebook.display.drawing import html
from nb_accelerate.notebook.display.panel import Action, last_lines
from nb_accelerate.notebook.display.widgets.shell_channel import answer_widgets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nb_accelerate.notebook.display.panel import PanelSource
    from nb_accelerate.notebook.display.view import View


_ACTIONS_EVERY = 2.0  # seconds between two checks which buttons are there: each reads the pages of all ranks
_ASK_EVERY = 3.0  # seconds between two questions for the stacks that are shown

_NO_WIDGETS = "(no buttons: this page shows no widgets)"

_TO_KEEP = (
    '<div class="nba"><p class="nba-dim">This page was loaded while it ran, so the saved notebook lacks this '
    "panel. To keep it: nb_accelerate.attach() in a cell, before the kernel ends.</p></div>"
)

_MORE, _LESS = "More", "Less"  # titles of the button that opens others, and of the same one while they are open

_LINES_MISSING = (
    '<div class="nba"><p class="nba-dim">This page was loaded while it ran: what ranks print is no longer in this '
    "cell, but in their logs (More, Log).</p></div>"
)


class Controls:
    """The widgets of a panel. `make` them, in any thread; the rest is for the thread that draws, but for clicks."""

    def __init__(self, kernel: Any, ranks: Sequence[int], source: PanelSource) -> None:
        self._kernel = kernel
        self._ranks = ranks
        self._source = source
        self._widgets: list[Any] = []
        self._lock = threading.Lock()  # held where widgets are made, by a click say, changed by it, or closed
        self._is_over = False
        self._aside: Any = None
        self._rank_field: Any = None
        self._more_buttons: list[tuple[Action, Any]] = []  # buttons that are opened, once they were for the first time
        self._opened: tuple[Any, ...] = ()  # shown now
        self._is_open = False
        self._check_actions_at = 0.0
        self._shown: Callable[[], str] | None = None
        self._ask_at = 0.0
        self._log_of = min(ranks)

    def make(self) -> None:
        """Make all that is there from the beginning."""
        import ipywidgets

        self._plain = ipywidgets.Layout()
        self._one_line = ipywidgets.Layout(width="auto", flex="0 0 auto")
        self._again = self._add(_html_of_new_pages(self._plain))
        self._shared: dict[str, Any] = {"layout": self._one_line}
        end, *self._steering = self._source.actions()
        self._more = self._button(Action(_MORE, "stacks, logs and what else can be done now", self._open_or_close))
        self._row = (self._button(end), self._more)
        margin = ipywidgets.Layout(margin="0 0 16px 5px", flex_flow="row wrap")
        self._controls = self._add(ipywidgets.HBox(self._row, layout=margin))
        children = (self._again, self._controls)
        self._box = self._add(ipywidgets.VBox(children, layout=self._plain, _dom_classes=("nba-asides",)))

    def bundle(self) -> dict[str, Any]:
        model = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        return {"application/vnd.jupyter.widget-view+json": model, "text/plain": _NO_WIDGETS}

    def draw(self, view: View) -> None:
        if self._is_open and time.monotonic() >= self._check_actions_at:
            self._show_row()
        if self._again.is_asked_for:
            at = time.strftime("%H:%M:%S on %d %B")
            has_log = any(self._source.log(rank) for rank in self._ranks)
            missing = _LINES_MISSING if has_log else ""
            self._again.value = html.render(view, at=at) + html.render_charts(view) + missing
        self._draw_aside()

    def close(self, view: View) -> None:
        """Close them. In a reloaded page, which knows no display to leave in their place, one stays."""
        with self._lock:
            self._is_over = True
        remaining: list[Any] = []
        if self._again.is_asked_for:
            logs = logs_as_html({rank: last_lines(self._source.log(rank)) for rank in self._ranks})
            self._again.value = html.style() + html.render(view) + html.render_charts(view) + logs + _TO_KEEP
            self._box.children = (self._again,)
            remaining = [*_with_styles(self._box), *_with_styles(self._again)]
        for widget in self._widgets:
            for part in _with_styles(widget):
                if part not in remaining:
                    with contextlib.suppress(Exception):  # the front end may be gone
                        part.close()

    def _draw_aside(self) -> None:
        shown = self._shown
        if shown is None:
            return
        if shown == self._stacks and time.monotonic() >= self._ask_at:
            self._ask()
        content = shown()
        with self._lock:
            if self._shown == shown and content != self._aside.value:
                self._aside.value = content

    def _add(self, widget: Any) -> Any:
        self._widgets.append(widget)
        answer_widgets(self._kernel, [widget])
        return widget

    def _button(self, action: Action) -> Any:
        import ipywidgets

        button = self._add(ipywidgets.Button(description=action.title, tooltip=action.hint, **self._shared))
        self._shared["style"] = button.style
        button.on_click(lambda _: action.do())
        return button

    def _open_or_close(self) -> None:
        """Show the other buttons, or no longer, nor what one of them has opened."""
        with self._lock:
            if self._is_over:
                return
            if not self._more_buttons:
                actions = (
                    Action("Stacks", "show where every rank is", lambda: self._toggle(self._stacks)),
                    Action("Log", "show what a rank printed last", lambda: self._toggle(self._log)),
                    *self._steering,
                )
                self._more_buttons = [(action, self._button(action)) for action in actions]
            self._is_open, self._opened = not self._is_open, ()
            self._more.description = _LESS if self._is_open else _MORE
            shown = self._shown
        if shown is None or self._is_open:
            self._show_row()
        else:
            self._open(None)

    def _toggle(self, aside: Callable[[], str]) -> None:
        """Show something below the panel, or no longer."""
        self._open(None if self._shown == aside else aside)

    def _open(self, aside: Callable[[], str] | None) -> None:
        with self._lock:
            if self._is_over:
                return
            if self._aside is None:
                import ipywidgets

                self._aside = self._add(ipywidgets.HTML("", layout=self._plain, style=self._again.style))
                self._box.children = (self._again, self._controls, self._aside)
            self._shown = aside
            if aside is None:
                self._aside.value = ""
        self._show_row()
        if aside == self._stacks:
            self._ask()

    def _show_row(self) -> None:
        """Show the buttons that can work now and, beside a log of several ranks, which one it is of."""
        with self._lock:
            if self._is_over:
                return
            self._check_actions_at = time.monotonic() + _ACTIONS_EVERY
            possible = [button for action, button in self._more_buttons if self._is_open and action.can()]
            # New ones come last: a front end would rebuild the buttons behind, which would lose the keyboard's focus.
            remaining = [button for button in self._opened if button in possible]
            self._opened = (*remaining, *(button for button in possible if button not in remaining))
            children = [*self._row, *self._opened]
            if self._shown == self._log and len(self._ranks) > 1:
                log = next(button for action, button in self._more_buttons if action.title == "Log")
                children.insert(children.index(log) + 1, self._field_of_rank())
            if self._controls.children != tuple(children):
                self._controls.children = children

    def _field_of_rank(self) -> Any:
        """Return a field that chooses the rank whose log is shown."""
        # No list to choose from: in a cell's output JupyterLab takes the arrow keys, and all letters, for itself, but
        # where one can write.
        if self._rank_field is None:
            import ipywidgets

            self._rank_field = ipywidgets.BoundedIntText(
                value=self._log_of,
                min=min(self._ranks),
                max=max(self._ranks),
                description="of rank",
                style={"description_width": "initial"},
                layout={"width": "92px"},
            )
            self._rank_field.observe(self._show_log, "value")
            self._add(self._rank_field)
        return self._rank_field

    def _show_log(self, change: Any) -> None:
        self._log_of = change["new"]
        self._open(self._log)

    def _ask(self) -> None:
        self._ask_at = time.monotonic() + _ASK_EVERY
        self._source.ask()

    def _stacks(self) -> str:
        return stacks_as_html({rank: listed(dump) for rank, dump in self._source.stacks().items() if dump})

    def _log(self) -> str:
        if self._log_of not in self._ranks:
            return log_as_html(f"rank {self._log_of} does not run this", self._log_of)
        return log_as_html(self._source.log(self._log_of), self._log_of)


def _html_of_new_pages(layout: Any) -> Any:
    """Return an HTML widget with an attribute ``is_asked_for``: a page has asked for its state since it was made."""
    import ipywidgets

    class HTMLOfNewPages(ipywidgets.HTML):  # type: ignore[misc]
        is_asked_for = False

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
            # All of its state is sent when it is made, and when a page asks for all widgets.
            self.is_asked_for |= key is None and self.comm is not None
            return super().get_state(key, drop_defaults)

    return HTMLOfNewPages(layout=layout, _dom_classes=("nba-again",))


def _with_styles(widget: Any) -> list[Any]:
    """Return a widget with its layout and its style, which are widgets as well."""
    return [widget, *(getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name))]


_LAST_LINES = 40  # lines of a log that are shown


def stacks_as_html(frames: Mapping[int, tuple[list[str], list[str]]]) -> str:
    """Return where ranks are: users' frames a line each, then those of libraries, which unfold."""
    markup = "".join(_stack(rank, users, others) for rank, (users, others) in sorted(frames.items()))
    return _pre(markup or "no answer yet", "where ranks are")


def _stack(rank: int, users: list[str], of_libraries: list[str]) -> str:
    lines = "".join(f"<div>  {escape(frame)}</div>" for frame in users)
    if of_libraries:
        each = "".join(f"<div>    {escape(frame)}</div>" for frame in of_libraries)
        folded = escape(" ← ".join(of_libraries))
        lines += f'<details class="nba-dim"><summary class="nba-frames">  in {folded}</summary>{each}</details>'
    return f"<div><b>{named([rank])}</b></div>{lines}"


def log_as_html(text: str, rank: int) -> str:
    """Return the last lines that a rank has printed."""
    lines = "".join(text.splitlines(keepends=True)[-_LAST_LINES:])
    return _pre(escape(lines or "nothing yet"), f"log of rank {rank}", "nba-newest-last")


def logs_as_html(texts: Mapping[int, str]) -> str:
    """Return what ranks have printed, folded, for a panel that stays; nothing of ranks that printed nothing."""
    return "".join(
        f'<div class="nba"><details><summary>log of rank {rank}</summary>'
        f'<pre class="nba-aside">{escape(text)}</pre></details></div>'
        for rank, text in texts.items()
        if text
    )


def _pre(markup: str, label: str, kind: str = "") -> str:
    """Return text in which one can scroll, also by the keyboard."""
    names = f"nba-aside {kind}".strip()
    return f'<div class="nba"><pre class="{names}" tabindex="0" aria-label="{label}">{markup}</pre></div>'
