"""Merge the output of several ranks into one sequence. Pure.

Output is a sequence of items (lines, displays) of each rank. An item that all ranks have at the same place is shown
once, as in an ordinary cell. Where they differ, each rank's items are shown as a block, in the order of the ranks, up
to the next item that all ranks have; blocks of different ranks may differ in length. Equal blocks are shown once, for
all their ranks. What was shown is not moved: an item that other ranks have not printed in time is shown for the ranks
that have, and theirs follows when it comes.

A line like ``loss 0.5`` comes in every epoch, with other figures, and two ranks may have the same figures in different
epochs. So lines that differ in their figures only are counted: the first of one rank is compared with the first of the
others, the second with the second, from the last item on that all ranks had.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

T = TypeVar("T", bound="Hashable")

_MAX_UNCOUNTED = 1 << 15  # items of a rank that are kept in memory after they were shown


class _Queue(Generic[T]):
    """Items of one rank that were not shown yet. Times are kept for batches of items, not for each."""

    def __init__(self, kind: Callable[[T], Hashable | None]) -> None:
        self.items: deque[T] = deque()
        self._kind = kind
        self._counted: Counter[Hashable] = Counter()
        self._uncounted: list[T] = []
        self._batches: deque[tuple[int, float]] = deque()

    @property
    def since(self) -> float:
        """`time.monotonic` at which the first of them came; infinity if there is none."""
        return self._batches[0][1] if self._batches else float("inf")

    @property
    def shown(self) -> Counter[Hashable]:
        """How many of each kind were shown since the last item that all ranks had."""
        self._counted.update(kind for kind in map(self._kind, self._uncounted) if kind is not None)
        self._uncounted.clear()
        return self._counted

    def add(self, items: Sequence[T], when: float) -> None:
        if items:
            self.items.extend(items)
            self._batches.append((len(items), when))

    def numbered(self) -> Iterator[tuple[T, int]]:
        """Yield each item, and how many of its kind came before it since the last item that all ranks had."""
        counts = self.shown.copy()
        for item in self.items:
            kind = self._kind(item)
            yield item, counts[kind]
            if kind is not None:
                counts[kind] += 1

    def show(self, number: int) -> list[T]:
        """Remove, count and return the first `number` of them."""
        taken = self.take(number)
        self._uncounted += taken  # it takes longer than all else, and is of use only where ranks have an item in common
        if len(self._uncounted) > _MAX_UNCOUNTED:
            _ = self.shown
        return taken

    def take(self, number: int) -> list[T]:
        """Remove and return the first `number` of them, or as many as there are."""
        taken = [self.items.popleft() for _ in range(min(number, len(self.items)))]
        left = len(taken)
        while left:
            size, when = self._batches.popleft()
            if size > left:
                self._batches.appendleft((size - left, when))
            left -= min(size, left)
        return taken


class Merge(Generic[T]):
    """Takes items of ranks, and passes them on in the order in which they are to be shown.

    Args:
        show: called with ranks that have the same items, and with these items, one list for each of these ranks.
        hold: seconds that an item waits for an equal one of the other ranks; infinity waits until `finish`. Ranks
            that do the same are milliseconds apart.
        apart: whether an item of the first rank waits for no other one and is compared with none.
        last: whether an item is the last of its rank. It waits for all ranks until `finish`, however long they take.
        kind: returns what items that are counted together have in common; None for an item that is not counted.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        show: Callable[[tuple[int, ...], list[list[T]]], None],
        *,
        hold: float,
        apart: Callable[[T], bool] = lambda _: False,
        last: Callable[[T], bool] = lambda _: False,
        kind: Callable[[T], Hashable | None] = lambda _: None,
    ) -> None:
        self._show = show
        self._hold = hold
        self._apart = apart
        self._last = last
        self._waiting: dict[int, _Queue[T]] = {rank: _Queue(kind) for rank in sorted(ranks)}

    @property
    def due(self) -> float:
        """`time.monotonic` at which `flush` has something to do."""
        queues = self._waiting.values()
        waiting = (queue.since for queue in queues if not (queue.items and self._last(queue.items[0])))
        return min(waiting, default=float("inf")) + self._hold

    def add(self, rank: int, items: Sequence[T], now: float) -> None:
        self._waiting[rank].add(items, now)
        self._show_common()

    def flush(self, now: float) -> None:
        """Show items that have waited for `hold` seconds."""
        while self.due <= now:
            self._show_block(
                lambda queue: next((at for at, item in enumerate(queue.items) if self._last(item)), len(queue.items))
            )

    def finish(self) -> None:
        while any(queue.items for queue in self._waiting.values()):
            self._show_block()

    def _show_common(self) -> None:
        self._show_agreed()
        while self._show_apart():
            self._show_agreed()

    def _show_apart(self) -> bool:
        """Show items that wait for no other ones; returns whether there were any."""
        rank = next(iter(self._waiting))
        queue = self._waiting[rank]
        number = sum(1 for _ in takewhile(self._apart, queue.items))
        if number:
            self._show((rank,), [queue.take(number)])
        return number > 0

    def _show_agreed(self) -> None:
        queues = self._waiting.values()
        agreed = 0
        for said in zip(*(queue.items for queue in queues), strict=False):
            if said.count(said[0]) < len(said):
                break
            agreed += 1
        if not agreed:
            return
        if any(queue.shown for queue in queues):
            (_, first), *others = (next(queue.numbered()) for queue in queues)
            if any(number != first for _, number in others):
                return
            for queue in queues:
                queue.shown.clear()
        self._show(tuple(self._waiting), [queue.take(agreed) for queue in queues])

    def _show_block(self, at_most: Callable[[_Queue[T]], int] = lambda queue: len(queue.items)) -> None:
        """Show what comes before the next item that all ranks have: of each rank in turn, equal blocks once."""
        blocks: dict[tuple[T, ...], tuple[list[int], list[list[T]]]] = {}
        for (rank, queue), length in zip(self._waiting.items(), self._lengths_until_equal(), strict=True):
            said = queue.show(min(length, at_most(queue)))
            if said:
                ranks, items = blocks.setdefault(tuple(said), ([], []))
                ranks.append(rank)
                items.append(said)
        for ranks, items in blocks.values():
            self._show(tuple(ranks), items)
        self._show_common()

    def _lengths_until_equal(self) -> list[int]:
        """Return how many items of each rank, in the order of the ranks, come before the next one that all have."""
        # The same place on all ranks is preferred. Otherwise it is the item that the last of them reaches first.
        queues = list(self._waiting.values())
        if not set(queues[0].items).intersection(*(queue.items for queue in queues[1:])):
            return [len(queue.items) for queue in queues]
        first_positions: dict[tuple[T, int], dict[int, int]] = {}
        for position, column in enumerate(zip_longest(*(queue.numbered() for queue in queues))):
            if column.count(column[0]) == len(column):
                return [position] * len(queues)
            for number, item in enumerate(column):
                if item is None:  # this rank has no more
                    continue
                positions = first_positions.setdefault(item, {})
                positions.setdefault(number, position)
                if len(positions) == len(queues):
                    return [positions[number] for number in range(len(queues))]
        return [len(queue.items) for queue in queues]
