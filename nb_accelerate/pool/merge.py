"""One story out of what several ranks print and show. Pure.

What ranks say is compared item for item, in the order in which each said it. An item that all ranks say is shown
once, as in an ordinary cell. Where they differ, what each of them says is shown as a block, in the order of the
ranks, up to the place where they agree again; equal blocks are one block ("ranks 0-2"). What is shown stays where
it is: an item that others have not said within a moment is shown for those who have, and what comes late follows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

HOLD = 0.3
"""Seconds an item waits for the other ranks'. Ranks in step are milliseconds apart."""

T = TypeVar("T")


@dataclass(slots=True)
class Said(Generic[T]):
    """One thing a rank said.

    Attributes:
        key: equal for things that are equal.
        item: the thing.
        when: on the clock of whoever feeds this.
    """

    key: Hashable
    item: T
    when: float


class Merge(Generic[T]):
    """Takes what ranks say, hands on what is to be shown.

    Args:
        ranks: their numbers.
        show: takes the ranks that said it, and the items, one list for each of these ranks.
        hold: seconds; infinity waits until `finish`.
    """

    def __init__(
        self, ranks: Sequence[int], show: Callable[[tuple[int, ...], list[list[T]]], None], *, hold: float = HOLD
    ) -> None:
        self._show = show
        self._hold = hold
        self._waiting: dict[int, deque[Said[T]]] = {rank: deque() for rank in sorted(ranks)}

    @property
    def due(self) -> float:
        """When `flush` has something to do."""
        return min((queue[0].when for queue in self._waiting.values() if queue), default=float("inf")) + self._hold

    def add(self, rank: int, said: Iterable[tuple[Hashable, T]], now: float) -> None:
        """A rank said these things, each with what it is compared by."""
        self._waiting[rank].extend([Said(key, item, now) for key, item in said])
        self._show_what_all_said()

    def flush(self, now: float) -> None:
        """Show what has waited long enough."""
        while self.due <= now:
            self._show_block()

    def finish(self) -> None:
        """Nothing will follow: show everything."""
        while any(self._waiting.values()):
            self._show_block()

    def _show_what_all_said(self) -> None:
        first, *others = self._waiting.values()
        agreed = 0
        for said in zip(first, *others, strict=False):
            key = said[0].key
            if any(one.key != key for one in said[1:]):
                break
            agreed += 1
        if agreed:
            queues = (first, *others)
            self._show(tuple(self._waiting), [[queue.popleft().item for _ in range(agreed)] for queue in queues])

    def _show_block(self) -> None:
        """What comes before the next thing that all say: of each rank in turn, equal ones once."""
        length = self._agree_again()
        blocks: dict[tuple[Hashable, ...], tuple[list[int], list[list[T]]]] = {}
        for rank, queue in self._waiting.items():
            said = [queue.popleft() for _ in range(min(length, len(queue)))]
            if said:
                ranks, items = blocks.setdefault(tuple(one.key for one in said), ([], []))
                ranks.append(rank)
                items.append([one.item for one in said])
        for ranks, items in blocks.values():
            self._show(tuple(ranks), items)
        self._show_what_all_said()

    def _agree_again(self) -> int:
        """How many items of each rank come before one that all ranks say at the same place."""
        nothing = object()
        columns = zip_longest(*((one.key for one in queue) for queue in self._waiting.values()), fillvalue=nothing)
        length = 0
        for length, column in enumerate(columns):
            if length and nothing not in column and len(set(column)) == 1:
                return length
        return length + 1


def label(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2``, ``ranks 0, 2-3``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
