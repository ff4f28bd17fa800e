"""Make parts of batches for ranks, in the order of the data: whole batches, or rows where these can be taken out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from nb_accelerate.training.data.iterable import LastBatch
from nb_accelerate.training.data.plan import GroupRows, part_bounds, round_of_batches
from nb_accelerate.training.data.rows import CannotCutError, count_rows, row_taker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nb_accelerate.training.data.rows import Take

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CountedBatch:
    """A batch and its rows.

    Attributes:
        batch: as the user's loader makes it.
        rows: how many it has; None if that is not known.
        of_columns: whether lists in it are known to hold columns, see `row_taker`.
    """

    batch: Any
    rows: int | None
    of_columns: bool = False

    def pin_memory(self) -> CountedBatch:
        """Return this with the batch inside in pinned memory. Called by the loader's pinning thread."""
        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


class CountingCollate:
    """Wrap a loader's ``collate_fn`` to count rows, which may not be visible in what it returns.

    Args:
        collate: the loader's own.
        ranks: make a batch of each rank's rows, so that no batch has to be cut. None: one batch of all.
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
    """Return a batch as one piece for each rank, or fewer if it has few rows.

    Args:
        batch: the pieces that `CountingCollate` made, or a batch.

    Raises:
        CannotCutError: it is a batch that cannot be cut.
    """
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


def take_from(batches: Sequence[CountedBatch], *, careful: bool = True) -> Take | None:
    """Return what `row_taker` returns; None if batches cannot be cut."""
    rows = [one.rows for one in batches if one.rows is not None]
    if len(rows) < len(batches):
        return None
    try:
        of_columns = all(one.of_columns for one in batches)
        return row_taker([one.batch for one in batches], rows, careful=careful, of_columns=of_columns)
    except CannotCutError:
        return None


def parts_of_last_group(
    group: list[CountedBatch], start: list[CountedBatch], ranks: int, *, even: bool, by_row: bool
) -> tuple[list[Any], LastGroup | None]:
    """Give each rank a part of an incomplete last group.

    Args:
        start: the first batches of the epoch, with which it is filled up.
        even: give all ranks something, and equally many rows if rows can be taken out.
        by_row: take out rows, where that is possible; otherwise batches stay whole.

    Returns:
        For each rank its part, or None if it gets no row; and the `LastGroup`, or None if every rank gets equally many
        real rows, or all batches are real and whole.
    """
    if by_row:
        real = sum(one.rows or 0 for one in group)
        bounds = part_bounds(real, ranks, even=even)
        filled, rows = list(group), real
        copied = start if any(one.rows for one in start) else group
        while rows < bounds[-1][1]:
            filled += copied
            rows += sum(one.rows or 0 for one in copied)
        # The start shows how batches look also where no row of it is needed.
        take = take_from(filled if rows > real or start is group else [*group, *start])
        if take is not None:
            parts = [take(slice(first, end)) if first < end else None for first, end in bounds]
            return parts, None if real % ranks == 0 else LastGroup(real, tuple(end - first for first, end in bounds))
    given = round_of_batches(group, start, ranks, even_batches=even)
    nothing = ranks - len(given)
    counts = [1 if one.rows is None else one.rows for one in given] + [0] * nothing
    end = None if len(group) == ranks else LastGroup(sum(counts[: len(group)]), tuple(counts))
    return [one.batch for one in given] + [None] * nothing, end


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
