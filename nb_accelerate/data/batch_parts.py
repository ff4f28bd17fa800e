"""Count the rows of batches, and share them out between ranks: evenly, and in the order in which they came."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data._utils.pin_memory import pin_memory

from nb_accelerate.data.iterable import LastBatch
from nb_accelerate.data.plan import dealt, round_of_batches
from nb_accelerate.data.rows import count_rows, join_rows, slice_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Cut = Callable[[Any, slice, int], Any]
    """Called with a batch, rows of it and a rank."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counted:
    """A batch and its rows.

    Attributes:
        batch: as the user's loader makes it.
        rows: how many it has; None if that is not known.
    """

    batch: Any
    rows: int | None

    def pin_memory(self) -> Counted:
        """Return this with the batch inside in pinned memory. Called by the loader's pinning thread."""
        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


class CountingCollate:
    """A loader's ``collate_fn`` that counts the rows it is given: in what it returns they may not be found again.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Counted:
        """Return rows as a batch. Called by the loader, perhaps in a worker process."""
        # A dataset that fetches many rows at once may return something else than a list.
        count = len(rows) if isinstance(rows, (list, tuple)) else None
        batch = self.collate(rows)
        return Counted(batch, count_rows(batch) if count is None else count)


def counted(batch: Any) -> Counted:
    """Return a batch with its rows, counted if its loader did not."""
    return batch if type(batch) is Counted else Counted(batch, count_rows(batch))


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """What is known of an incomplete group.

    Attributes:
        real: rows that are no copies.
        rows: how many each rank has.
    """

    real: int
    rows: tuple[int, ...]

    def mark(self, part: Any, rank: int) -> LastBatch:
        """Return a rank's part, with what the loader has to know of the group."""
        return LastBatch(part, self.real, self.rows[rank], self.rows if len(set(self.rows)) > 1 else None)


def joined(batches: Sequence[Counted]) -> Counted:
    """Return several batches as one."""
    rows = [one.rows for one in batches]
    return Counted(join_rows([one.batch for one in batches], rows), sum(count or 0 for count in rows))


def cut(whole: Counted, bounds: Sequence[tuple[int, int]], by: Cut | None = None) -> list[Any]:
    """Return a part of a batch for each rank; None for those that get no row.

    Args:
        whole: the batch.
        bounds: where in it each part begins and ends.
        by: takes rows out of a batch; by default slices of every tensor and list.
    """

    def plain(batch: Any, wanted: slice, _rank: int) -> Any:
        return slice_rows(batch, wanted, rows=whole.rows)

    by = by or plain
    return [
        by(whole.batch, slice(first, end), rank) if first < end else None for rank, (first, end) in enumerate(bounds)
    ]


def deal_rows(
    group: list[Counted], start: list[Counted], ranks: int, *, even: bool, by: Cut | None = None
) -> tuple[list[Any], GroupEnd | None]:
    """Share out the rows of an incomplete group.

    Args:
        group: its batches, with known numbers of rows.
        start: the batches with whose rows it is filled up.
        ranks: how many there are.
        even: give all ranks equally many.
        by: as for `cut`.

    Returns:
        The parts, None for ranks that get none; and what is known of the group, None if it is as good as complete.
    """
    real = sum(one.rows or 0 for one in group)
    bounds = dealt(real, ranks, even=even)
    filled, rows = list(group), real
    copied = start if any(one.rows for one in start) else group
    while rows < bounds[-1][1]:
        filled += copied
        rows += sum(one.rows or 0 for one in copied)
    parts = cut(joined(filled), bounds, by)
    return parts, None if real % ranks == 0 else GroupEnd(real, tuple(end - first for first, end in bounds))


def deal_whole(
    group: list[Counted], start: list[Counted], ranks: int, *, even: bool
) -> tuple[list[Any], GroupEnd | None]:
    """Share out batches of an incomplete group without taking them apart. Arguments are those of `deal_rows`."""
    given = round_of_batches(group, start or group, ranks, even_batches=even)
    nothing = ranks - len(given)
    rows = [one.rows or 1 for one in given] + [0] * nothing
    end = None if len(group) == ranks else GroupEnd(sum(rows[: len(group)]), tuple(rows))
    return [one.batch for one in given] + [None] * nothing, end


def failing(error: Exception) -> Iterator[T]:
    """Return an iterator that raises an error when its first item is asked for."""
    raise error
    yield


def next_of(items: Iterator[T]) -> tuple[T | None, Exception | None]:
    """Return the next item, or None and what was raised instead; None and None at the end."""
    try:
        return next(items, None), None
    except Exception as error:
        return None, error
