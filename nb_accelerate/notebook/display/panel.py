"""The panel of one run: samples the ranks now and then, and has what it saw drawn.

It has no thread. The thread that waits for the ranks calls `refresh` when it is `due`::

    source.statuses --> PanelState --> View --> a Drawing: notebook_panel.py, lines.py

Another cell may draw it too, see `Panel.attach`; what that needs of a run that is over is kept.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import psutil

from nb_accelerate.notebook.display.logged_values import charts_of, config_of, earlier_runs, remember
from nb_accelerate.notebook.display.state import PanelState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nb_accelerate.notebook.display.rank_history import RankObservation
    from nb_accelerate.notebook.display.view import Facts, FailureSummary, PanelStatus, View

logger = logging.getLogger(__name__)

_SAMPLE_EVERY = 0.1
# Samples of ranks that are taken in a second, at most: of many ranks, each is sampled less often.
_SAMPLES_PER_SECOND = 160

# Ranks from which on processes are inspected and the panel is drawn less often: nobody watches so many one by one.
_MANY = 16

_DRAW_MANY_EVERY = 0.8

_INSPECT_EVERY = 1.0

_LINES_EVERY = 0.4  # seconds between two requests for the lines that ranks are at; one takes them some 10 µs

_KEPT_LINES = 200  # last lines of each rank that are kept of a run that is over

DELAY = 1.0  # seconds before a panel appears: what is over by then needs none


def last_lines(text: str) -> str:
    """Return as much of a log as is kept of a run that is over."""
    return "".join(text.splitlines(keepends=True)[-_KEPT_LINES:])


@dataclass(frozen=True)
class Action:
    """A button that the source of a panel gives it; `Controls` adds buttons that only show something."""

    title: str
    hint: str  # what it does
    do: Callable[[], object]  # called in any thread
    can: Callable[[], bool] = lambda: True  # whether it can be done now; if not, the button is not there


class PanelSource(Protocol):
    """The ranks of one run, for a panel. All but `statuses` and `stacks` are called from any thread."""

    def statuses(self) -> Sequence[RankObservation]:
        """Return a sample of each rank, without the memory of its process."""

    def ask(self) -> None:
        """Ask ranks for their stacks; `stacks` has the answers later."""

    def note_lines(self) -> None:
        """Have ranks note the line of the user's code that they are at: later samples have it."""

    def stacks(self) -> Mapping[int, str]:
        """Return the stacks that have arrived, by rank."""

    def runs(self) -> Sequence[str]:
        """Return the ids of runs that ranks log with the notebook's tracker, see `notebook.display.logged_values`."""

    def log(self, rank: int) -> str:
        """Return the last lines that a rank has printed."""

    def actions(self) -> Sequence[Action]:
        """Return the buttons that end or steer the run."""


class Drawing(Protocol):
    """Where a panel is drawn."""

    every: float  # seconds between two drawings, at least
    shows_rows: bool = True  # it shows what each rank does, while the run is on
    is_announced: bool = False  # something stands there already, which says that the run starts
    shows_notes: bool = False  # it shows lines of information; if not, they are printed

    def draw(self, view: View) -> None:
        """Draw a view of the run while it is on."""

    def finish(self, view: View, *, was_drawn: bool) -> None:
        """Draw the last view, which stays."""


class Panel:
    """The panel of one run."""

    def __init__(self, facts: Facts, ranks: Sequence[int], drawing: Drawing, source: PanelSource) -> None:
        now = time.monotonic()
        self.name = facts.name
        self.ranks = tuple(ranks)
        self.logs: Mapping[int, str] = {}
        self._lock = threading.Lock()
        self._key = uuid.uuid4().hex[:12]
        self._facts, self._began = facts, now
        self._last_view: View | None = None
        self._runs: Sequence[str] = ()
        self._notes: list[str] = []
        self._drawings = [drawing]  # the first is in the cell that runs it
        self._source: PanelSource | None = source
        many = len(ranks) > _MANY
        self._sample_every = min(max(_SAMPLE_EVERY, len(ranks) / _SAMPLES_PER_SECOND), _DRAW_MANY_EVERY)
        self._inspect_every = _INSPECT_EVERY * (2 if many else 1)
        self._draw_every = max(drawing.every, _DRAW_MANY_EVERY if many else 0.0)
        self._draw_at = now + DELAY
        self._inspect_at = 0.0
        self._lines_at = 0.0
        self._memory: dict[int, int] = {}
        self._was_drawn = False
        self._is_disabled = False  # since it could not be drawn
        self.due = now + self._sample_every  # `time.monotonic` at which `refresh` wants to be called

    @functools.cached_property
    def _state(self) -> PanelState:
        """Make it for the first sample: most cells end before."""
        return PanelState(self._facts, self.ranks, self._began)

    @property
    def final_view(self) -> View | None:
        """Return how the run looked at its end; None while it is on, or if that cannot be drawn."""
        with self._lock:
            if self._source is None and self._last_view is None and not self._is_disabled:
                self._last_view = self._view(self._runs, time.monotonic())
            return self._last_view

    def attach(self, make: Callable[[PanelSource], Drawing]) -> bool:
        """Draw the panel in one more place from now on. Any thread.

        Returns:
            False if the run is over, so that nothing will be drawn; `final_view` and `logs` have the rest.
        """
        with self._lock:
            if self._source is not None:
                self._drawings.append(make(self._source))
                self._draw_at = 0.0
            return self._source is not None

    def tell_hang(self, text: str, outcome: str = "") -> bool:
        """Show a sentence about ranks that wait for others, until one moves or the panel can say it by itself.

        Args:
            outcome: another one about how it will end; may be empty. It is shown with what the panel says by itself.
        """
        with self._lock:
            if not self._drawings or self._is_disabled:
                return False
            self._state.stuck.tell(text, outcome)
            return True

    def note(self, line: str) -> bool:
        """Show a line of information from now on, once. Returns False if this panel shows none, or has ended."""
        with self._lock:
            if self._source is None or self._is_disabled or not self._drawings[0].shows_notes:
                return False
            if line not in self._notes:
                self._notes.append(line)
            return True

    def refresh(self) -> None:
        """Take a sample of the ranks, and draw the panel if it is due."""
        with self._lock, self._disable_on_error():
            if self._source is not None:
                self._refresh(self._source, time.monotonic())

    def finish(self, status: PanelStatus, failure: FailureSummary | None = None) -> None:
        """Draw the end of the run, and stop watching it."""
        self.due = float("inf")
        with self._lock:
            source, self._source = self._source, None
            if source is not None and not self._is_disabled:
                with self._disable_on_error():
                    self._finish(source, time.monotonic(), status, failure)

    @contextlib.contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        """Disable the panel if what is inside fails: the run goes on."""
        try:
            yield
        except Exception as error:
            self._is_disabled = True
            self.due = float("inf")
            logger.warning("The panel cannot be drawn any more (%s: %s); the run goes on.", type(error).__name__, error)
            logger.info("Where it failed:", exc_info=True)

    def _refresh(self, source: PanelSource, now: float) -> None:
        self.due = now + self._sample_every
        self._observe(source, now)
        if now >= self._lines_at and (any(draws.shows_rows for draws in self._drawings) or self._state.stalled(now)):
            self._lines_at = now + _LINES_EVERY
            source.note_lines()
        if now >= self._draw_at:
            self._draw_at = now + self._draw_every
            view = self._view(source.runs(), now)
            for drawing in self._drawings:
                drawing.draw(view)
            self._was_drawn = True

    def _finish(self, source: PanelSource, now: float, status: PanelStatus, failure: FailureSummary | None) -> None:
        self._observe(source, now, inspects=self._was_drawn)
        self._state.end(now, status, failure)
        self._runs = source.runs()
        self.logs = {rank: last_lines(source.log(rank)) for rank in self.ranks}
        own, *others = self._drawings
        self._drawings = []  # drawings keep alive what the ranks have returned
        if not (self._was_drawn or others or own.is_announced or self._runs or self._notes or self._state.has_content):
            return  # nobody sees the last view, which takes a while to make; `final_view` makes it when asked
        self._last_view = view = self._view(self._runs, now)
        remember(view, config_of(view, self._runs), now - self._began, self._runs)
        # What was over before a panel appeared has none, but for what was not printed, and warnings.
        if self._was_drawn or view.bars or view.charts or view.warnings or view.notes or own.is_announced:
            own.finish(view, was_drawn=self._was_drawn)
        for drawing in others:
            drawing.finish(view, was_drawn=True)

    def _view(self, runs: Sequence[str], now: float) -> View:
        view = self._state.view(now)
        config = config_of(view, runs)
        run_label, before = earlier_runs(view.facts.name, config)
        return replace(
            view,
            charts=charts_of(runs, config),
            before=before,
            run_label=run_label,
            key=self._key,
            notes=tuple(self._notes),
        )

    def _observe(self, source: PanelSource, now: float, *, inspects: bool = True) -> None:
        seen = source.statuses()
        if inspects and now >= self._inspect_at:
            self._inspect_at = now + self._inspect_every
            for status in seen:
                if status.pid is not None and not status.machine:
                    # From outside, so that a rank that hangs or has no `Accelerator` is seen as well.
                    with contextlib.suppress(psutil.Error):  # it has just ended
                        rss = int(psutil.Process(status.pid).memory_info().rss)
                        # 0 is said of a process that has just ended, until its exit code is read.
                        self._memory[status.rank] = rss or self._memory.get(status.rank, 0)
        seen = [replace(status, memory=self._memory.get(status.rank, status.memory)) for status in seen]
        self._state.observe(now, seen)
