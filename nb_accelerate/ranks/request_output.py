"""What ranks say in one request, on its way to the cell.

::

    rank 0 --lines, displays--+
    rank 1 --lines, displays--+--> Merge --> equal once, different by rank --> sink
                              |
                              +--> lines that redraw themselves (tqdm) --> one display, a row for each rank
"""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from nb_accelerate.display.words import label
from nb_accelerate.ranks.display_ids import DisplayIds
from nb_accelerate.ranks.merge import Merge
from nb_accelerate.ranks.output import prefixed
from nb_accelerate.ranks.timeouts import NEVER, Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.protocol.messages import Display
    from nb_accelerate.protocol.output import StreamName
    from nb_accelerate.ranks.sinks import Sink

_REDRAW_AFTER = 0.2
"""Seconds between two drawings of progress bars."""

_MOST_BARS = 50
"""Finished bars that are still drawn: each drawing sends all of them again."""

_BAR_WIDTH = 500
"""Characters of a bar."""

_LINES_AT_ONCE = 200
"""Lines that go to the sink together: it looks at its limits in between."""

_Line: TypeAlias = "tuple[StreamName, str]"
"""A stream and a line with its newline. A tuple, since there may be very many."""


@dataclass(frozen=True)
class _Shown:
    """Something rich.

    Attributes:
        kind: as in a Jupyter message.
        looks: equal for what looks the same.
        content: as in a Jupyter message.
    """

    kind: str
    looks: str
    content: dict[str, Any] = field(compare=False)


_Item: TypeAlias = "_Line | _Shown"


class RequestOutput:
    """The output of one request.

    Args:
        ranks: whose.
        sink: the cell.
        ids: of displays, for as long as the ranks live.
        style: ``fold`` shows equal output once, as it comes; ``group`` waits for the end, so that what a rank says
            is in one place; ``raw`` passes every line on as it comes.
        quiet: show nothing.
        prefix: gives what to put in front of lines of some ranks; by default their numbers, if they are not all.
        has_bars: draw lines that redraw themselves in a display of their own, not as lines.
        hold: seconds that an item of output waits for the same of the other ranks.

    Attributes:
        alone: there is just one rank, and nothing to put in front of its lines: they need not be whole.
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
        self._ranks = tuple(sorted(ranks))
        self._sink = sink
        self._ids = ids or DisplayIds()
        self._raw = style == "raw"
        self._quiet = quiet
        self._has_bars = has_bars
        self._prefix = prefix or self._unless_all
        self.alone = len(self._ranks) == 1 and prefix is None
        self._is_in_line = False
        self._merge: Merge[_Item] = Merge(self._ranks, self._show, hold=NEVER if style == "group" else hold)
        self._bars: _Bars | None = None

    @property
    def due(self) -> float:
        """When `flush` has something to do, as `time.monotonic`."""
        return min(self._sink.due, self._merge.due, self._bars.due if self._bars else NEVER)

    def text(self, rank: int, stream: StreamName, text: str) -> None:
        """Take text of a rank: whole lines, or anything at all if it is `alone`."""
        if self._quiet:
            return
        if self.alone and rank in self._ranks:
            self._sink.write(stream, text)
            self._is_in_line = not text.endswith("\n")
            return
        if self._raw and not self._has_bars:
            self._sink.write(stream, prefixed(text, self._prefix((rank,))))
            return
        lines = _lines(text)
        if self._has_bars and "\r" in text:
            lines = [line for line in lines if not self._finishes_bar(rank, line)]
        self._add(rank, list(zip(repeat(stream), lines, strict=False)))

    def redrawing(self, rank: int, line: str) -> None:
        """Take a line that is not finished, as it is now."""
        if self._has_bars and not self._quiet and "\r" in line:
            self._the_bars().draw(rank, _last_drawing(line))

    def display(self, rank: int, display: Display) -> None:
        """Take something rich."""
        if self._quiet:
            return
        content = _as_message(display)
        if self.alone and rank in self._ranks:
            self._publish((rank,), [_Shown(display.kind, "", content)])
            return
        own = content["transient"].get("display_id")
        place = "" if own is None else self._ids.order(rank, own)
        looks = json.dumps([place, content["data"], content["metadata"]], sort_keys=True)
        self._add(rank, [_Shown(display.kind, looks, content)])

    def say(self, line: str) -> None:
        """Show a line of our own about trouble."""
        self._merge.flush(time.monotonic())
        self._sink.write("stderr", line + "\n")

    def note(self, line: str) -> None:
        """Show a line of our own about what went well: apart from what the ranks print, and not red."""
        self._merge.flush(time.monotonic())
        self._sink.display("display_data", {"data": {"text/plain": line}, "metadata": {}, "transient": {}})

    def flush(self) -> None:
        """Pass on what has waited long enough."""
        now = time.monotonic()
        self._merge.flush(now)
        if self._bars is not None and self._bars.due <= now:
            self._bars.redraw()
        if self._sink.due <= now:
            self._sink.flush()

    def finish(self) -> None:
        """Show everything: the request is done. Something may still follow, since threads go on."""
        self._merge.finish()
        if self._bars is not None:
            self._bars.redraw()
            self._bars = None
        self._sink.flush()

    def close(self) -> None:
        """Show everything and close the sink: nothing follows."""
        self.finish()
        self._sink.close()

    def _add(self, rank: int, items: list[_Item]) -> None:
        if rank not in self._ranks:
            # Another one, in which a thread goes on, say: there is nothing to compare it with.
            if self._is_in_line:
                self._sink.write("stdout", "\n")
                self._is_in_line = False
            self._show((rank,), [[_whole(item) if isinstance(item, tuple) else item for item in items]])
        elif self._raw:
            self._show((rank,), [items])
        else:
            self._merge.add(rank, items, time.monotonic())

    def _finishes_bar(self, rank: int, line: str) -> bool:
        """Whether a line has redrawn itself; then it goes to the progress bars, and nowhere else."""
        redrawn = "\r" in line.rstrip("\r\n")
        if redrawn:
            self._the_bars().finish(rank, _last_drawing(line))
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
            is_line = isinstance(first, tuple)
            if lines and (len(lines) == _LINES_AT_ONCE or not is_line or first[0] != stream):
                self._sink.write(stream, "".join(lines))
                lines.clear()
            if is_line:
                stream, text = first
                lines.append(whose + text)
            else:
                self._publish(ranks, [one for one in same if isinstance(one, _Shown)], whose)
        if lines:
            self._sink.write(stream, "".join(lines))

    def _unless_all(self, ranks: Sequence[int]) -> str:
        return "" if tuple(ranks) == self._ranks else f"[{label(ranks)}] "

    def _publish(self, ranks: tuple[int, ...], shown: list[_Shown], whose: str = "") -> None:
        """Show once what several ranks show."""
        kind, content = shown[0].kind, dict(shown[0].content)
        if kind == "clear_output":
            if self._ranks[0] in ranks:
                self._sink.display(kind, {"wait": content["wait"]})
            return
        text = content["data"].get("text/plain")
        if whose and kind == "result" and list(content["data"]) == ["text/plain"]:
            self._sink.write("stdout", "".join(f"{whose}{line}\n" for line in str(text).split("\n")))
            return
        own = {rank: one.content["transient"].get("display_id") for rank, one in zip(ranks, shown, strict=True)}
        kind = "display_data" if kind == "result" else kind
        if None not in own.values():
            if kind == "display_data":
                content["transient"] = {"display_id": self._ids.shown(own)}
            else:
                place = self._ids.update(own)
                content["transient"] = {"display_id": place.id}
                kind = "display_data" if place.is_new else kind
        if whose and kind == "display_data":
            self._sink.write("stdout", whose + "\n")
        del content["wait"]
        self._sink.display(kind, content)


class _Bars:
    """Progress bars of several ranks, each in its own row of one display."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._id = uuid.uuid4().hex
        self._finished: deque[str] = deque(maxlen=_MOST_BARS)
        self._count = 0
        self._current: dict[int, str] = {}
        self._is_drawn = False
        self.due = time.monotonic()

    def draw(self, rank: int, line: str) -> None:
        if self._current.get(rank) != line[-_BAR_WIDTH:]:
            self._current[rank] = line[-_BAR_WIDTH:]
            self.due = min(self.due, time.monotonic() + _REDRAW_AFTER)

    def finish(self, rank: int, line: str) -> None:
        self._current.pop(rank, None)
        self._finished.append(f"[rank {rank}] {line[-_BAR_WIDTH:]}")
        self._count += 1
        self.due = min(self.due, time.monotonic() + _REDRAW_AFTER)

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
    """The content, with all that a Jupyter message has, whatever the rank was asked to show."""
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


def _whole(line: _Line) -> _Line:
    stream, text = line
    return stream, text if text.endswith("\n") else text + "\n"


def _lines(text: str) -> list[str]:
    """Lines with their newlines. Not `str.splitlines`, which also ends a line at a carriage return."""
    *whole, rest = text.split("\n")
    return [line + "\n" for line in whole] + ([rest] if rest else [])


def _last_drawing(line: str) -> str:
    """What is left to see of a line that redraws itself."""
    drawings = [part for part in line.rstrip("\n").split("\r") if part.strip()]
    return drawings[-1] if drawings else ""
