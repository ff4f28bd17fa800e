"""Make parts of batches for ranks, in the order of the data: whole batches, or rows where these can be taken out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from nb_accelerate.training.data.dispatching.rows import CannotCutError, count_rows, row_taker
from nb_accelerate.training.data.plan.plan import part_bounds, round_of_batches, rows_of_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nb_accelerate.training.data.dispatching.rows import Take
    from nb_accelerate.training.data.plan.plan import GroupRows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CountedBatch:
    """A batch, as the user's loader makes it, and its rows."""

    batch: Any
    rows: int | None  # None if that is not known
    of_columns: bool = False  # whether lists in it are known to hold columns, see `row_taker`

    def pin_memory(self) -> CountedBatch:
        """Return this with the batch inside in pinned memory. Called by the loader's pinning thread."""
        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


class CountingCollate:
    """Wrap a loader's ``collate_fn`` to count rows, which may not be visible in what it returns.

    With ``ranks``, a batch is made of each rank's rows, so that no batch has to be cut.
    """

    def __init__(self, collate: Callable[[Any], Any], ranks: int | None = None) -> None:
        self.collate = collate
        self.ranks = ranks

    def __call__(self, rows: Any) -> CountedBatch | list[CountedBatch]:
        """Return rows as a batch, or as a list of batches. Called by the loader, perhaps in a worker process."""
        if not isinstance(rows, (list, tuple)):  # of a dataset that fetches many rows at once
            return count_batch(self.collate(rows))
        if self.ranks is None or not rows:
            return CountedBatch(self.collate(rows), len(rows), self.collate is default_collate)
        return [
            CountedBatch(self.collate(rows[first:end]), end - first)
            for first, end in part_bounds(len(rows), self.ranks, even=False)
            if first < end
        ]


def count_batch(batch: Any) -> CountedBatch:
    """Return a batch with its number of rows; one that `CountingCollate` made is returned as it is."""
    return batch if type(batch) is CountedBatch else CountedBatch(batch, count_rows(batch))


def pieces_of(batch: Any, ranks: int) -> list[CountedBatch]:
    """Return a batch, or the pieces that `CountingCollate` made of it, as one for each rank, or fewer."""
    if type(batch) is list and batch and type(batch[0]) is CountedBatch:
        return batch
    whole = count_batch(batch)
    if whole.rows == 0:
        return [whole] * ranks
    rows = whole.rows or 0
    take = row_taker([whole.batch], [rows], careful=False)
    return [
        CountedBatch(take(slice(first, end)), end - first)
        for first, end in part_bounds(rows, ranks, even=False)
        if first < end
    ]


def take_from(batches: Sequence[CountedBatch], *, careful: bool = True) -> Take | None:
    """Return what `row_taker` returns; None if batches cannot be cut."""
    rows = [counted.rows for counted in batches if counted.rows is not None]
    if len(rows) < len(batches):
        return None
    try:
        of_columns = all(counted.of_columns for counted in batches)
        return row_taker([counted.batch for counted in batches], rows, careful=careful, of_columns=of_columns)
    except CannotCutError:
        return None


def parts_of_last_group(
    group: list[CountedBatch], start: list[CountedBatch], ranks: int, *, even: bool, by_row: bool
) -> tuple[list[Any], list[GroupRows] | None]:
    """Give each rank a part of an incomplete last group, which is filled up with batches of the ``start`` of the epoch.

    With ``even``, all ranks get something, and equally many rows where rows can be taken out. Without ``by_row``,
    batches stay whole. Return the part of each rank, None if it gets no row; and the rows of each, or None if every
    rank gets equally many real rows, or all batches are real and whole.
    """
    if by_row:
        real = num_rows(group)
        bounds = part_bounds(real, ranks, even=even)
        filled, rows = list(group), real
        copied = start if any(counted.rows for counted in start) else group
        while rows < bounds[-1][1]:
            filled += copied
            rows += num_rows(copied)
        # The start shows how batches look also where no row of it is needed.
        take = take_from(filled if rows > real or start is group else [*group, *start])
        if take is not None:
            parts = [take(slice(first, end)) if first < end else None for first, end in bounds]
            return parts, None if real % ranks == 0 else rows_of_ranks(real, [end - first for first, end in bounds])
    given = round_of_batches(group, start, ranks, even_batches=even)
    nothing = ranks - len(given)
    counts = [1 if counted.rows is None else counted.rows for counted in given] + [0] * nothing
    end = None if len(group) == ranks else rows_of_ranks(sum(counts[: len(group)]), counts)
    return [counted.batch for counted in given] + [None] * nothing, end


def num_rows(batches: Iterable[CountedBatch]) -> int:
    """Return how many rows batches have together, as far as it is known."""
    return sum(counted.rows or 0 for counted in batches)


def grouped(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` items, and what is left in the end."""
    group: list[T] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


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
