"""Make the panel of a request: connect it with the ranks, and choose where it is drawn."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.base.progress_page import Sample
from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.display.drawing.block import Block, can_redraw
from nb_accelerate.notebook.display.drawing.lines import Lines, Relay, bundle
from nb_accelerate.notebook.display.drawing.notebook_panel import NotebookPanel
from nb_accelerate.notebook.display.frontend import choose_front_end
from nb_accelerate.notebook.display.panel import Panel
from nb_accelerate.notebook.display.rank_history import RankObservation
from nb_accelerate.notebook.display.widgets.controls import logs_as_html
from nb_accelerate.notebook.ranks.output.sinks import CellSink, StreamSink, sink_here
from nb_accelerate.notebook.ranks.status import state_of
from nb_accelerate.notebook.ranks.steps import ask_for_stacks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.frontend import FrontEnd
    from nb_accelerate.notebook.display.panel import Action, Drawing, PanelSource
    from nb_accelerate.notebook.display.view import Facts
    from nb_accelerate.notebook.ranks.output.sinks import Sink
    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.request import Request


_MOST_RECENT = 8  # panels that are kept, with what is left of their runs

# The last panels, in the order in which their runs began; see `attach`.
recent: deque[Panel] = deque(maxlen=_MOST_RECENT)


class RequestView:
    """The `PanelSource` of one request, which has not begun."""

    def __init__(self, request: Request, actions: Sequence[Action]) -> None:
        self._request = request
        self._actions = actions
        for rank in request.ranks:
            rank.output.logged.clear()
        self._unasked: set[int] = set()
        self._requests_before = {rank.rank: rank.handle.page.request for rank in request.ranks if rank.is_ready}

    def statuses(self) -> list[RankObservation]:
        return [
            RankObservation(
                rank=rank.rank,
                sample=self._sample(rank),
                state=state_of(rank, self._request),
                pid=rank.handle.pid,
                machine=rank.handle.machine,
                sending=rank.handle.unsent(),
            )
            for rank in self._request.ranks
        ]

    def ask(self) -> None:
        """Ask the busy ranks for their stacks, and the others as soon as they are ready."""
        self._unasked = {rank.rank for rank in self._request.waiting}
        self._ask_ready()

    def note_lines(self) -> None:
        """Have the ranks that are busy note the line of the user's code that they are at."""
        for rank in self._request.waiting:
            if rank.is_ready:
                rank.handle.note_line()

    def stacks(self) -> dict[int, str]:
        """Return the stacks that have come, by rank."""
        self._ask_ready()
        return self._request.stacks

    def log(self, rank: int) -> str:
        """Return the last lines that a rank has printed."""
        return next(proxy.output.text for proxy in self._request.ranks if proxy.rank == rank)

    def runs(self) -> list[str]:
        """Return the ids of the runs that ranks have logged values of in this request."""
        return [run for rank in self._request.ranks for run in rank.output.logged]

    def actions(self) -> Sequence[Action]:
        return self._actions

    def _ask_ready(self) -> None:
        if self._request.step is None:
            for rank in self._request.waiting:
                if rank.is_ready and rank.rank in self._unasked:
                    self._unasked.discard(rank.rank)
                    ask_for_stacks(rank)

    def _sample(self, rank: RankProxy) -> Sample:
        sample = rank.handle.page.read()
        return sample if sample.request > self._requests_before.get(rank.rank, -1) else Sample()


def make_panel(
    facts: Facts, ranks: Sequence[int], sink: Sink, source: PanelSource, front_end: FrontEnd, display_id: str = ""
) -> Panel | None:
    """Return a panel, or None if the front end is ``"off"``."""
    if front_end == "off":
        return None
    panel = Panel(facts, ranks, make_drawing(ranks, sink, source, front_end, display_id), source)
    recent.append(panel)
    return panel


def make_drawing(
    ranks: Sequence[int], sink: Sink, source: PanelSource, front_end: FrontEnd, display_id: str = ""
) -> Drawing:
    """Return what draws a panel, unless the front end is ``"off"``. The arguments are those of `make_panel`."""
    if front_end == "widget" and isinstance(sink, CellSink) and not sink.is_captured:
        return NotebookPanel(sink, sink.kernel, ranks, source, display_id=display_id)
    if front_end == "terminal" and isinstance(sink, CellSink):
        return Relay(sink)
    if isinstance(sink, StreamSink) and can_redraw(sys.stdout):
        sink.block = Block(sys.stdout)
        return sink.block
    return Lines(sink, is_notebook=isinstance(sink, CellSink))


def attach(name: str | None = None) -> None:
    """Show the panel of a run here too: one that is on moves, one that is over shows its end and its log.

    For a page that was reloaded, say, or far below the cell that has started it. It runs once the kernel is free: at
    once if the run was launched with ``block=False``. The last eight runs of this notebook are known.

    Args:
        name: of the run: the function of a launch, or a cell as in ``"cell 7"``. None is the newest run that is on, or
            the last one if none is.

    Raises:
        ConfigError: there is no such run.

    Examples:
        >>> launch = notebook_launcher(train, num_processes=2, block=False)
        >>> attach("train")
    """
    panel = _find(name)
    sink = sink_here()
    front_end = choose_front_end("auto")

    def draw(source: PanelSource) -> Drawing:
        drawing = make_drawing(panel.ranks, sink, source, front_end)
        if isinstance(drawing, Lines):  # its first line may come late
            sink.write(sink.own_stream, f"attached to {panel.name}, which runs on {label(panel.ranks)}\n")
        return drawing

    if panel.attach(draw):
        return
    if panel.final_view is not None:
        content = bundle(panel.final_view)
        printed = {rank: text for rank, text in panel.logs.items() if text}
        content["data"]["text/html"] += logs_as_html(printed)
        content["data"]["text/plain"] += "".join(f"\nlog of rank {rank}:\n{text}" for rank, text in printed.items())
        sink.display("display_data", content)
    sink.close()


def _find(name: str | None) -> Panel:
    found = [panel for panel in recent if name in (None, panel.name)]
    if not found:
        names = list(dict.fromkeys(panel.name for panel in recent))
        known = f"{suggest(name or '', names)} There are: {', '.join(names)}" if names else " There was none yet"
        raise ConfigError(
            f"attach({'' if name is None else repr(name)}): there is no such run in this notebook.{known}"
        )
    return next((panel for panel in reversed(found) if panel.final_view is None), found[-1])
