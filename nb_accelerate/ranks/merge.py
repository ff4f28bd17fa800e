"""One sequence out of what several ranks print and show. Pure.

What ranks say is compared item for item, in the order in which each said it. An item that all ranks say is shown
once, as in an ordinary cell. Where they differ, what each of them says is shown as a block, in the order of the
ranks, up to the place where they agree again; equal blocks are one block ("ranks 0-2"). What is shown stays where
it is: an item that others have not said within a moment is shown for those who have, and what comes late follows.
"""

from __future__ import annotations

from collections import deque
from itertools import zip_longest
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

T = TypeVar("T", bound="Hashable")


class _Queue(Generic[T]):
    """What one rank has said and was not shown yet. Times are kept for lots of items, not for each."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._lots: deque[tuple[int, float]] = deque()

    @property
    def since(self) -> float:
        """When the first of them was said, as `time.monotonic`; infinity if there is none."""
        return self._lots[0][1] if self._lots else float("inf")

    def add(self, items: Sequence[T], when: float) -> None:
        if items:
            self.items.extend(items)
            self._lots.append((len(items), when))

    def take(self, number: int) -> list[T]:
        """The first `number` of them, or as many as there are."""
        taken = [self.items.popleft() for _ in range(min(number, len(self.items)))]
        left = len(taken)
        while left:
            size, when = self._lots.popleft()
            if size > left:
                self._lots.appendleft((size - left, when))
            left -= min(size, left)
        return taken


class Merge(Generic[T]):
    """Takes what ranks say, hands on what is to be shown. Items that are equal are shown as one.

    Args:
        ranks: their numbers.
        show: takes the ranks that said it, and the items, one list for each of these ranks.
        hold: seconds that an item waits for the other ranks'; infinity waits until `finish`. Ranks in step are
            milliseconds apart.
    """

    def __init__(
        self, ranks: Sequence[int], show: Callable[[tuple[int, ...], list[list[T]]], None], *, hold: float
    ) -> None:
        self._show = show
        self._hold = hold
        self._waiting: dict[int, _Queue[T]] = {rank: _Queue() for rank in sorted(ranks)}

    @property
    def due(self) -> float:
        """When `flush` has something to do, as `time.monotonic`."""
        return min(queue.since for queue in self._waiting.values()) + self._hold

    def add(self, rank: int, items: Sequence[T], now: float) -> None:
        """Take what a rank says."""
        self._waiting[rank].add(items, now)
        self._show_what_all_said()

    def flush(self, now: float) -> None:
        """Show what has waited long enough."""
        while self.due <= now:
            self._show_block()

    def finish(self) -> None:
        """Show everything."""
        while any(queue.items for queue in self._waiting.values()):
            self._show_block()

    def _show_what_all_said(self) -> None:
        agreed = 0
        for said in zip(*(queue.items for queue in self._waiting.values()), strict=False):
            if said.count(said[0]) < len(said):
                break
            agreed += 1
        if agreed:
            self._show(tuple(self._waiting), [queue.take(agreed) for queue in self._waiting.values()])

    def _show_block(self) -> None:
        """Show what comes before the next item that all say: of each rank in turn, equal ones once."""
        length = self._agree_again()
        blocks: dict[tuple[T, ...], tuple[list[int], list[list[T]]]] = {}
        for rank, queue in self._waiting.items():
            said = queue.take(length)
            if said:
                ranks, items = blocks.setdefault(tuple(said), ([], []))
                ranks.append(rank)
                items.append(said)
        for ranks, items in blocks.values():
            self._show(tuple(ranks), items)
        self._show_what_all_said()

    def _agree_again(self) -> int:
        """Count the items of each rank before one that all ranks say at the same place."""
        length = 0
        for length, column in enumerate(zip_longest(*(queue.items for queue in self._waiting.values()))):
            if length and column.count(column[0]) == len(column):
                return length
        return length + 1
