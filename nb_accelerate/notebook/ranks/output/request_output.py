"""Show the output of the ranks of one request in its cell.

::

    rank 0 --lines, displays--+
    rank 1 --lines, displays--+--> Merge --> equal once, different by rank --> sink
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.notebook.ranks.output.guard import OutputGuard
from nb_accelerate.notebook.ranks.output.merge import Merge
from nb_accelerate.notebook.ranks.timeouts import NEVER, Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.display.panel import Panel
    from nb_accelerate.notebook.protocol.messages import Display
    from nb_accelerate.notebook.protocol.output import StreamName
    from nb_accelerate.notebook.ranks.output.sinks import Sink


class DisplayIds:
    """Map the ``display_id`` that a rank uses to the id of the display in the notebook, for as long as ranks live.

    Every rank makes ids of its own. A display that is shown once for several ranks has one id in the notebook, and its
    updates arrive under the id of each rank.
    """

    def __init__(self) -> None:
        self._orders: dict[int, dict[str, int]] = {}
        self._notebook_ids: dict[tuple[int, str], str] = {}

    def order(self, rank: int, display_id: str) -> int:
        """Return how many ids the rank has made before this one: the same number on ranks that do the same."""
        orders = self._orders.setdefault(rank, {})
        return orders.setdefault(display_id, len(orders))

    def shown(self, rank_ids: dict[int, str]) -> str:
        """Remember a new display, and return its id in the notebook. `rank_ids` has the ranks' ids of it, by rank."""
        notebook_id = rank_ids[min(rank_ids)]
        for rank, rank_id in rank_ids.items():
            self._notebook_ids[rank, rank_id] = notebook_id
        return notebook_id

    def update(self, rank_ids: dict[int, str]) -> tuple[str, bool]:
        """Return the id in the notebook of the display that some ranks want to update, by the ranks' ids of it.

        And whether it has to be shown first: the display that there is belongs to other ranks too, and is not updated.
        """
        first = rank_ids[min(rank_ids)]
        shared = self._notebook_ids.get((min(rank_ids), first))
        if shared is None:
            return first, False
        sharing_ranks = {rank for (rank, _), shown in self._notebook_ids.items() if shown == shared}
        if sharing_ranks == rank_ids.keys():
            return shared, False
        # Other ranks share that display and do not update it in the same way, so these get one of their own.
        new_id = f"{shared}-{'-'.join(map(str, sorted(rank_ids)))}"
        for rank, rank_id in rank_ids.items():
            self._notebook_ids[rank, rank_id] = new_id
        return new_id, True


_LINES_AT_ONCE = 200  # Lines that are given to the sink together. It looks at its limits in between.

_NUMBER = re.compile(r"\d[\d.]*(?:e[-+]?\d+)?")

# The name of a stream, and a line with its newline. A tuple, because there may be very many.
_Line: TypeAlias = "tuple[StreamName, str]"


@dataclass(frozen=True)
class _RankDisplay:
    """A display of a rank: ``result`` or the type of a Jupyter message, text that is equal for equal ones, content."""

    kind: str
    appearance: str
    content: dict[str, Any] = field(compare=False)


_Item: TypeAlias = "_Line | _RankDisplay"


class RequestOutput:
    """Takes lines and displays of ranks, and shows them in a cell. No method raises: an error costs output only.

    Args:
        style: ``fold`` shows equal output once, as it comes. ``group`` waits for the end, so that the output of each
            rank is in one place. ``raw`` passes every line on as it comes.
        prefix: returns the text in front of lines that some ranks have in common; by default it names the ranks,
            unless these are all, or the first of them has printed the line for all.

    Attributes:
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
        hold: float = Timeouts.fold,
    ) -> None:
        self.guard = OutputGuard(sink)  # for other code that shows output of the request
        self.panel: Panel | None = None  # what shows lines of information, if there is a panel that does
        self._ranks = tuple(sorted(ranks))
        self._sink = sink
        self._ids = ids or DisplayIds()
        self._is_raw = style == "raw"
        self._is_quiet = quiet
        self._prefix = prefix or self._unless_all
        self.alone = len(self._ranks) == 1 and prefix is None
        self._is_in_line = False
        hold = NEVER if style == "group" else hold
        has_apart = style != "group" and prefix is None
        self._merge: Merge[_Item] = Merge(
            self._ranks,
            self._show,
            hold=hold,
            apart=lambda item: has_apart and isinstance(item, tuple) and item[0] == "for_all",
            # The value of a cell's last line: the answers of all ranks are waited for anyway.
            last=lambda item: isinstance(item, _RankDisplay) and item.kind == "result",
            kind=_without_figures,
        )

    @property
    def due(self) -> float:
        """`time.monotonic` at which `flush` has something to do."""
        due = NEVER
        with self.guard:
            due = min(self._sink.due, self._merge.due)
        return max(due, self.guard.retry_at)

    def text(self, rank: int, stream: StreamName, text: str) -> None:
        """Show text of a rank: whole lines, or anything at all if it is `alone`."""
        with self.guard:
            if self._is_quiet:
                return
            if stream == "note":
                for line in text.splitlines():
                    self.note(line)
                return
            if self.alone and rank in self._ranks:
                self._sink.write("stdout" if stream == "for_all" else stream, text)
                self._is_in_line = not text.endswith("\n")
                return
            self._add(rank, list(zip(repeat(stream), _lines(text), strict=False)))

    def display(self, rank: int, display: Display) -> None:
        with self.guard:
            if self._is_quiet:
                return
            content = _as_message(display)
            if self.alone and rank in self._ranks:
                self._publish((rank,), [_RankDisplay(display.kind, "", content)])
                return
            display_id = content["transient"].get("display_id")
            order = "" if display_id is None else self._ids.order(rank, display_id)
            appearance = json.dumps([order, content["data"], content["metadata"]], sort_keys=True)
            self._add(rank, [_RankDisplay(display.kind, appearance, content)])

    def say(self, line: str) -> None:
        """Show a line of this package's own on stderr."""
        with self.guard:
            self._merge.flush(time.monotonic())
            self._sink.write("stderr", line + "\n")

    def note(self, line: str) -> None:
        """Show a line of this package's own that is information: in the panel, else as text that is not red."""
        with self.guard:
            if self.panel is not None and self.panel.note(line):
                return
            self._merge.flush(time.monotonic())
            if self._sink.own_stream == "stderr":
                self._sink.write("stderr", line + "\n")
            else:
                self._sink.display("display_data", {"data": {"text/plain": line}, "metadata": {}, "transient": {}})

    def flush(self) -> None:
        """Show what has waited long enough."""
        with self.guard:
            now = time.monotonic()
            self._merge.flush(now)
            if self._sink.due <= now:
                self._sink.flush()

    def finish(self) -> None:
        """Show everything: the request is done. Threads of the ranks may still print afterwards."""
        with self.guard:
            self._merge.finish()
            self._sink.flush()

    def close(self) -> None:
        """Show everything, and close the sink. Nothing follows."""
        with self.guard:
            self.finish()
            self._sink.close()

    def _add(self, rank: int, items: list[_Item]) -> None:
        if rank not in self._ranks:
            # A rank of another request, which a thread of its own still prints on. Nothing is compared with it.
            if self._is_in_line:
                self._sink.write("stdout", "\n")
                self._is_in_line = False
            self._show((rank,), [[_whole(item) if isinstance(item, tuple) else item for item in items]])
        elif self._is_raw:
            self._show((rank,), [items])
        else:
            self._merge.add(rank, items, time.monotonic())

    def _show(self, ranks: tuple[int, ...], items: list[list[_Item]]) -> None:
        whose = self._prefix(ranks)
        has_for_all = self._prefix == self._unless_all and self._ranks[0] in ranks  # lines that rank prints for all
        stream: StreamName = "stdout"
        lines: list[str] = []
        for equal_items in zip(*items, strict=True):
            first = equal_items[0]
            goes_to = None if isinstance(first, _RankDisplay) else "stderr" if first[0] == "stderr" else "stdout"
            if lines and (len(lines) == _LINES_AT_ONCE or goes_to != stream):
                self._sink.write(stream, "".join(lines))
                lines.clear()
            if isinstance(first, tuple):
                stream = "stderr" if first[0] == "stderr" else "stdout"
                lines.append(("" if has_for_all and first[0] == "for_all" else whose) + first[1])
            else:
                self._publish(ranks, [item for item in equal_items if isinstance(item, _RankDisplay)], whose)
        if lines:
            self._sink.write(stream, "".join(lines))

    def _unless_all(self, ranks: Sequence[int]) -> str:
        return "" if tuple(ranks) == self._ranks else f"[{label(ranks)}] "

    def _publish(self, ranks: tuple[int, ...], displays: list[_RankDisplay], whose: str = "") -> None:
        """Show a display of several ranks once."""
        kind, content = displays[0].kind, dict(displays[0].content)
        if kind == "clear_output":
            if self._ranks[0] in ranks:
                self._sink.display(kind, {"wait": content["wait"]})
            return
        text = content["data"].get("text/plain")
        if whose and kind == "result" and list(content["data"]) == ["text/plain"]:
            self._sink.write("stdout", "".join(f"{whose}{line}\n" for line in str(text).split("\n")))
            return
        display_ids = [display.content["transient"].get("display_id") for display in displays]
        rank_ids = dict(zip(ranks, display_ids, strict=True))
        kind = "display_data" if kind == "result" else kind
        if None not in rank_ids.values():
            if kind == "display_data":
                content["transient"] = {"display_id": self._ids.shown(rank_ids)}
            else:
                display_id, is_new = self._ids.update(rank_ids)
                content["transient"] = {"display_id": display_id}
                kind = "display_data" if is_new else kind
        if whose and kind == "display_data":
            self._sink.write("stdout", whose + "\n")
        del content["wait"]
        self._sink.display(kind, content)


def _as_message(display: Display) -> dict[str, Any]:
    """Return the content of a Jupyter message, with the parts that users' code on the rank has left out."""
    content = json.loads(display.content)
    parts = {name: content.get(name) for name in ("data", "metadata", "transient")}
    message: dict[str, Any] = {name: part if isinstance(part, dict) else {} for name, part in parts.items()}
    display_id = message["transient"].get("display_id")
    if display_id is not None:
        message["transient"]["display_id"] = str(display_id)
    return {**message, "wait": bool(content.get("wait"))}


def _without_figures(item: _Item) -> str | None:
    """Return a line without its numbers; None for one that has no number, and for a display."""
    if isinstance(item, _RankDisplay):
        return None
    text, num_figures = _NUMBER.subn("0", item[1])
    return text if num_figures else None


def _whole(line: _Line) -> _Line:
    stream, text = line
    return stream, text if text.endswith("\n") else text + "\n"


def _lines(text: str) -> list[str]:
    """Split text into lines with their newlines. `str.splitlines` would also split at a carriage return."""
    *finished, unfinished = text.split("\n")
    return [line + "\n" for line in finished] + ([unfinished] if unfinished else [])
