"""Count the rows of batches, and split them into one part for each rank, in the order of the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data._utils.pin_memory import pin_memory

from nb_accelerate.data.iterable import LastBatch
from nb_accelerate.data.plan import GroupRows, part_bounds, round_of_batches
from nb_accelerate.data.rows import count_rows, join_rows, slice_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Cut = Callable[[Any, slice, int], Any]
    """Called with a batch, rows of it and a rank."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CountedBatch:
    """A batch and its rows.

    Attributes:
        batch: as the user's loader makes it.
        rows: how many it has; None if that is not known.
    """

    batch: Any
    rows: int | None

    def pin_memory(self) -> CountedBatch:
        """Return this with the batch inside in pinned memory. Called by the loader's pinning thread."""
        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


class CountingCollate:
    """Wrap a loader's ``collate_fn`` to count rows, which may not be visible in what it returns.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> CountedBatch:
        """Return rows as a batch. Called by the loader, perhaps in a worker process."""
        # A dataset that fetches many rows at once may return something else than a list.
        count = len(rows) if isinstance(rows, (list, tuple)) else None
        batch = self.collate(rows)
        return CountedBatch(batch, count_rows(batch) if count is None else count)


def count_batch(batch: Any) -> CountedBatch:
    """Return a batch with its number of rows; one that `CountingCollate` made is returned as it is."""
    return batch if type(batch) is CountedBatch else CountedBatch(batch, count_rows(batch))


@dataclass(frozen=True, slots=True)
class LastGroup:
    """The numbers of rows of an incomplete last group.

    Attributes:
        real: rows of all ranks that are not copies.
        rows: rows of each rank, copies included.
    """

    real: int
    rows: tuple[int, ...]

    def mark(self, part: Any, rank: int) -> LastBatch:
        """Return a rank's part together with these numbers."""
        differ = len(set(self.rows)) > 1
        return LastBatch(part, GroupRows(self.real, self.rows[rank], self.rows if differ else None))


def join_batches(batches: Sequence[CountedBatch]) -> CountedBatch:
    """Return several batches as one."""
    rows = [one.rows for one in batches]
    return CountedBatch(join_rows([one.batch for one in batches], rows), sum(count or 0 for count in rows))


def split_batch(whole: CountedBatch, bounds: Sequence[tuple[int, int]], by: Cut | None = None) -> list[Any]:
    """Split a batch into one part for each rank; None for ranks that get no row.

    Args:
        whole: the batch.
        bounds: where in it each part begins and ends.
        by: returns a slice of a batch for a rank; by default a slice of every tensor and list.
    """

    def plain(batch: Any, wanted: slice, _rank: int) -> Any:
        return slice_rows(batch, wanted, rows=whole.rows)

    by = by or plain
    return [
        by(whole.batch, slice(first, end), rank) if first < end else None for rank, (first, end) in enumerate(bounds)
    ]


def split_last_group(
    group: list[CountedBatch], start: list[CountedBatch], ranks: int, *, even: bool, by: Cut | None = None
) -> tuple[list[Any], LastGroup | None]:
    """Split the rows of an incomplete last group.

    Args:
        group: its batches, with known numbers of rows.
        start: the batches with whose rows it is filled up.
        ranks: number of ranks.
        even: give all ranks equally many rows.
        by: as for `split_batch`.

    Returns:
        For each rank its part, or None if it gets no row; and the `LastGroup`, or None if every rank gets equally many
        real rows.
    """
    real = sum(one.rows or 0 for one in group)
    bounds = part_bounds(real, ranks, even=even)
    filled, rows = list(group), real
    copied = start if any(one.rows for one in start) else group
    while rows < bounds[-1][1]:
        filled += copied
        rows += sum(one.rows or 0 for one in copied)
    parts = split_batch(join_batches(filled), bounds, by)
    return parts, None if real % ranks == 0 else LastGroup(real, tuple(end - first for first, end in bounds))


def assign_batches(
    group: list[CountedBatch], start: list[CountedBatch], ranks: int, *, even: bool
) -> tuple[list[Any], LastGroup | None]:
    """Give each rank a whole batch of an incomplete last group. See `split_last_group`."""
    given = round_of_batches(group, start or group, ranks, even_batches=even)
    nothing = ranks - len(given)
    rows = [one.rows or 1 for one in given] + [0] * nothing
    end = None if len(group) == ranks else LastGroup(sum(rows[: len(group)]), tuple(rows))
    return [one.batch for one in given] + [None] * nothing, end


def raise_on_next(error: Exception) -> Iterator[T]:
    """Return an iterator that raises an error when its first item is asked for."""
    raise error
    yield


def next_or_error(items: Iterator[T]) -> tuple[T | None, Exception | None]:
    """Return the next item and None, or None and the error that was raised; None and None at the end."""
    try:
        return next(items, None), None
    except Exception as error:
        return None, error
