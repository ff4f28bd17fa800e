"""Show the output of the ranks of one request in its cell.

::

    rank 0 --lines, displays--+
    rank 1 --lines, displays--+--> Merge --> equal once, different by rank --> sink
                              |
                              +--> lines that redraw themselves (tqdm) --> one display, a row for each rank
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.notebook.ranks.output.display_ids import DisplayIds
from nb_accelerate.notebook.ranks.output.guard import OutputGuard, guarded
from nb_accelerate.notebook.ranks.output.merge import Merge
from nb_accelerate.notebook.ranks.output.rank_output import last_drawing, prefixed
from nb_accelerate.notebook.ranks.timeouts import NEVER, Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.protocol.messages import Display
    from nb_accelerate.notebook.protocol.output import StreamName
    from nb_accelerate.notebook.ranks.output.sinks import Sink

_REDRAW_INTERVAL = 0.2
"""Seconds between two drawings of progress bars."""

_MAX_FINISHED_BARS = 50
"""Finished bars that are still drawn: each drawing sends all of them again."""

_BAR_WIDTH = 500
"""Characters of a bar that are drawn, from its end."""

_LINES_AT_ONCE = 200
"""Lines that are given to the sink together. It looks at its limits in between."""

_NUMBER = re.compile(r"\d[\d.]*(?:e[-+]?\d+)?")

_Line: TypeAlias = "tuple[StreamName, str]"
"""The name of a stream, and a line with its newline. A tuple, because there may be very many."""


@dataclass(frozen=True)
class _Shown:
    """A display of a rank: ``result`` or the type of a Jupyter message, text that is equal for equal ones, content."""

    kind: str
    appearance: str
    content: dict[str, Any] = field(compare=False)


_Item: TypeAlias = "_Line | _Shown"


class RequestOutput:
    """Takes lines and displays of ranks, and shows them in a cell. No method raises: an error costs output only.

    Args:
        ids: display ids of the ranks, if they live longer than the request.
        style: ``fold`` shows equal output once, as it comes. ``group`` waits for the end, so that the output of each
            rank is in one place. ``raw`` passes every line on as it comes.
        prefix: returns the text in front of lines that some ranks have in common; by default it names the ranks,
            unless these are all, or the first of them has printed the line for all.
        has_bars: draw lines that redraw themselves (progress bars) in a display of their own.
        hold: seconds that a line waits for the same line of the other ranks.

    Attributes:
        guard: for whatever else shows output of the request.
        alone: whether there is one rank only and its lines have no prefix, so that they need not be whole.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        sink: Sink,
        ids: DisplayIds | None = None,
        *,
        style: str = "fold",
        quiet: bool = False,
        prefix: Callable[[Sequence[int]], str] | None = None,
        has_bars: bool = True,
        hold: float = Timeouts.fold,
    ) -> None:
        self.guard = OutputGuard(sink)
        self._ranks = tuple(sorted(ranks))
        self._sink = sink
        self._ids = ids or DisplayIds()
        self._raw = style == "raw"
        self._quiet = quiet
        self._has_bars = has_bars
        self._prefix = prefix or self._unless_all
        self.alone = len(self._ranks) == 1 and prefix is None
        self._is_in_line = False
        hold = NEVER if style == "group" else hold
        apart = _never if style == "group" or prefix is not None else _is_for_all
        self._merge: Merge[_Item] = Merge(self._ranks, self._show, hold=hold, apart=apart, kind=_without_figures)
        self._bars: _Bars | None = None

    @property
    def due(self) -> float:
        """`time.monotonic` at which `flush` has something to do."""
        due = NEVER
        with self.guard:
            due = min(self._sink.due, self._merge.due, self._bars.due if self._bars else NEVER)
        return max(due, self.guard.retry_at)

    @guarded
    def text(self, rank: int, stream: StreamName, text: str) -> None:
        """Show text of a rank: whole lines, or anything at all if it is `alone`."""
        if self._quiet:
            return
        if self.alone and rank in self._ranks:
            self._sink.write("stdout" if stream == "for_all" else stream, text)
            self._is_in_line = not text.endswith("\n")
            return
        if self._raw and not self._has_bars:
            self._sink.write("stdout" if stream == "for_all" else stream, prefixed(text, self._prefix((rank,))))
            return
        lines = _lines(text)
        if self._has_bars and "\r" in text:
            lines = [line for line in lines if not self._finishes_bar(rank, line)]
        self._add(rank, list(zip(repeat(stream), lines, strict=False)))

    @guarded
    def redrawing(self, rank: int, line: str) -> None:
        """Redraw the progress bar of a rank from a line that has no newline yet."""
        if self._has_bars and not self._quiet and "\r" in line:
            self._the_bars().draw(rank, last_drawing(line.rstrip()).lstrip("\r"))

    @guarded
    def display(self, rank: int, display: Display) -> None:
        """Show a display of a rank."""
        if self._quiet:
            return
        content = _as_message(display)
        if self.alone and rank in self._ranks:
            self._publish((rank,), [_Shown(display.kind, "", content)])
            return
        own = content["transient"].get("display_id")
        order = "" if own is None else self._ids.order(rank, own)
        appearance = json.dumps([order, content["data"], content["metadata"]], sort_keys=True)
        self._add(rank, [_Shown(display.kind, appearance, content)])

    @guarded
    def say(self, line: str) -> None:
        """Show a line of this package's own on stderr."""
        self._merge.flush(time.monotonic())
        self._sink.write("stderr", line + "\n")

    @guarded
    def note(self, line: str) -> None:
        """Show a line of this package's own as a display, which front ends do not draw in red."""
        self._merge.flush(time.monotonic())
        if self._sink.own_stream == "stderr":
            self._sink.write("stderr", line + "\n")
        else:
            self._sink.display("display_data", {"data": {"text/plain": line}, "metadata": {}, "transient": {}})

    @guarded
    def flush(self) -> None:
        """Show what has waited long enough."""
        now = time.monotonic()
        self._merge.flush(now)
        if self._bars is not None and self._bars.due <= now:
            self._bars.redraw()
        if self._sink.due <= now:
            self._sink.flush()

    @guarded
    def finish(self) -> None:
        """Show everything: the request is done. Threads of the ranks may still print afterwards."""
        self._merge.finish()
        if self._bars is not None:
            self._bars.redraw()
            self._bars = None
        self._sink.flush()

    @guarded
    def close(self) -> None:
        """Show everything, and close the sink. Nothing follows."""
        self.finish()
        self._sink.close()

    def _add(self, rank: int, items: list[_Item]) -> None:
        if rank not in self._ranks:
            # A rank of another request, which a thread of its own still prints on. Nothing is compared with it.
            if self._is_in_line:
                self._sink.write("stdout", "\n")
                self._is_in_line = False
            self._show((rank,), [[_whole(item) if isinstance(item, tuple) else item for item in items]])
        elif self._raw:
            self._show((rank,), [items])
        else:
            self._merge.add(rank, items, time.monotonic())

    def _finishes_bar(self, rank: int, line: str) -> bool:
        """Return whether a line has redrawn itself. If so, show it as a finished progress bar."""
        redrawn = "\r" in line.rstrip("\r\n")
        if redrawn:
            self._the_bars().finish(rank, last_drawing(line.rstrip()).lstrip("\r"))
        return redrawn

    def _the_bars(self) -> _Bars:
        if self._bars is None:
            self._bars = _Bars(self._sink)
        return self._bars

    def _show(self, ranks: tuple[int, ...], said: list[list[_Item]]) -> None:
        whose = self._prefix(ranks)
        stream: StreamName = "stdout"
        lines: list[str] = []
        for same in zip(*said, strict=True):
            first = same[0]
            goes_to = None if isinstance(first, _Shown) else "stderr" if first[0] == "stderr" else "stdout"
            if lines and (len(lines) == _LINES_AT_ONCE or goes_to != stream):
                self._sink.write(stream, "".join(lines))
                lines.clear()
            if isinstance(first, tuple):
                stream = "stderr" if first[0] == "stderr" else "stdout"
                lines.append(self._without_ranks(first[0], ranks, whose) + first[1])
            else:
                self._publish(ranks, [item for item in same if isinstance(item, _Shown)], whose)
        if lines:
            self._sink.write(stream, "".join(lines))

    def _unless_all(self, ranks: Sequence[int]) -> str:
        return "" if tuple(ranks) == self._ranks else f"[{label(ranks)}] "

    def _without_ranks(self, stream: StreamName, ranks: Sequence[int], whose: str) -> str:
        """Return the prefix of a line: none of our own, if the first rank has printed it for all."""
        is_for_all = stream == "for_all" and self._prefix == self._unless_all and self._ranks[0] in ranks
        return "" if is_for_all else whose

    def _publish(self, ranks: tuple[int, ...], shown: list[_Shown], whose: str = "") -> None:
        """Show a display of several ranks once."""
        kind, content = shown[0].kind, dict(shown[0].content)
        if kind == "clear_output":
            if self._ranks[0] in ranks:
                self._sink.display(kind, {"wait": content["wait"]})
            return
        text = content["data"].get("text/plain")
        if whose and kind == "result" and list(content["data"]) == ["text/plain"]:
            self._sink.write("stdout", "".join(f"{whose}{line}\n" for line in str(text).split("\n")))
            return
        own = {rank: display.content["transient"].get("display_id") for rank, display in zip(ranks, shown, strict=True)}
        kind = "display_data" if kind == "result" else kind
        if None not in own.values():
            if kind == "display_data":
                content["transient"] = {"display_id": self._ids.shown(own)}
            else:
                display_id, is_new = self._ids.update(own)
                content["transient"] = {"display_id": display_id}
                kind = "display_data" if is_new else kind
        if whose and kind == "display_data":
            self._sink.write("stdout", whose + "\n")
        del content["wait"]
        self._sink.display(kind, content)


class _Bars:
    """Draws the progress bars of several ranks in one display, a row for each."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._id = uuid.uuid4().hex
        self._finished: deque[str] = deque(maxlen=_MAX_FINISHED_BARS)
        self._count = 0
        self._current: dict[int, str] = {}
        self._is_drawn = False
        self.due = time.monotonic()

    def draw(self, rank: int, line: str) -> None:
        if self._current.get(rank) != line[-_BAR_WIDTH:]:
            self._current[rank] = line[-_BAR_WIDTH:]
            self.due = min(self.due, time.monotonic() + _REDRAW_INTERVAL)

    def finish(self, rank: int, line: str) -> None:
        self._current.pop(rank, None)
        self._finished.append(f"[rank {rank}] {line[-_BAR_WIDTH:]}")
        self._count += 1
        self.due = min(self.due, time.monotonic() + _REDRAW_INTERVAL)

    def redraw(self) -> None:
        rows = [*self._finished, *(f"[rank {rank}] {line}" for rank, line in sorted(self._current.items()))]
        if self._count > len(self._finished):
            rows.insert(0, f"... {self._count - len(self._finished):,} bars before these have finished")
        kind = "update_display_data" if self._is_drawn else "display_data"
        content = {
            "data": {"text/plain": "\n".join(rows)},
            "metadata": {},
            "transient": {"display_id": self._id},
        }
        self._sink.display(kind, content)
        self._is_drawn = True
        self.due = NEVER


def _as_message(display: Display) -> dict[str, Any]:
    """Return the content of a Jupyter message, with all its parts, whatever users' code on the rank has left out."""
    try:
        content = json.loads(display.content)
    except RecursionError:
        content = {"data": {"text/plain": "<what a rank shows is nested too deeply>"}}
    content = content if isinstance(content, dict) else {}
    parts = {name: content.get(name) for name in ("data", "metadata", "transient")}
    found: dict[str, Any] = {name: part if isinstance(part, dict) else {} for name, part in parts.items()}
    own = found["transient"].get("display_id")
    if own is not None:
        found["transient"]["display_id"] = str(own)
    return {**found, "wait": bool(content.get("wait"))}


def _is_for_all(item: _Item) -> bool:
    return isinstance(item, tuple) and item[0] == "for_all"


def _without_figures(item: _Item) -> str | None:
    """Return a line without its numbers; None for one that has no number, and for a display."""
    if isinstance(item, _Shown):
        return None
    text, numbers = _NUMBER.subn("0", item[1])
    return text if numbers else None


def _never(_: _Item) -> bool:
    return False


def _whole(line: _Line) -> _Line:
    stream, text = line
    return stream, text if text.endswith("\n") else text + "\n"


def _lines(text: str) -> list[str]:
    """Split text into lines with their newlines. `str.splitlines` would also split at a carriage return."""
    *whole, rest = text.split("\n")
    return [line + "\n" for line in whole] + ([rest] if rest else [])
