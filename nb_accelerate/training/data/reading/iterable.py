"""Read a whole iterable dataset on every rank, and keep the rows of this one (``dispatch_batches=False``).

The dataset may be read in a worker process of the loader, which cannot report at the end how many rows of the last
group are real (not copies). So the rows of that group carry the number: `MarkingShard` wraps each in `LastRow`,
`MarkingCollate` makes a `LastBatch` of them, and the prepared loader unwraps it. `IterableDatasetShard`, for users,
yields rows as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory
from typing_extensions import override

from nb_accelerate.training.data.plan.plan import GroupRows, ShardPlan, piece_of_last_group, rows_per_rank
from nb_accelerate.training.data.plan.samplers import IterationEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Self


_MISSING = object()  # fills an incomplete last group up to its size


@dataclass(frozen=True, slots=True)
class LastRow:
    """A row of an incomplete last group, with the number of real rows of that group."""

    row: Any
    real: int


@dataclass(frozen=True, slots=True)
class WrappedBatch:
    """A batch, and in subclasses what is known about it."""

    batch: Any

    def pin_memory(self) -> Self:
        """Return this with the batch inside in pinned memory. Called by the loader's pinning thread."""
        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class LastBatch(WrappedBatch):
    """A rank's part of the last group of an epoch, with the numbers of rows of that group."""

    rows: GroupRows


class MarkingCollate:
    """Wrap a loader's ``collate_fn`` to make a `LastBatch` of rows that are `LastRow`."""

    def __init__(self, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self.collate = collate
        self.batched = batched  # whether it is called with a list of rows; otherwise with one item

    def __call__(self, rows: Any) -> Any:
        """Return rows as a batch. Called by the loader, perhaps in a worker process."""
        first = rows[0] if self.batched and rows else rows
        if type(first) is not LastRow:
            return self.collate(rows)
        if not self.batched:
            return LastBatch(self.collate(first.row), GroupRows(first.real, 1))
        return LastBatch(self.collate([marked.row for marked in rows]), GroupRows(first.real, len(rows)))


class IterableDatasetShard(IterableDataset[Any]):
    """Yield one rank's part of an iterable dataset that yields the same rows, in the same order, on all ranks.

    Args:
        dataset: the user's.
        batch_size: of the user's loader; 1 if its items are batches by themselves.
        drop_last: leave out an incomplete last group.
        num_processes: how many ranks there are.
        process_index: the number of this one.
        split_batches: cut each batch into pieces instead of handing out whole batches.
        even_batches: fill up the last group with rows from the start.

    Attributes:
        rows_per_batch: rows of a batch of one rank.

    Raises:
        ConfigError: ``batch_size`` cannot be split.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.rows_per_batch = rows_per_rank(batch_size, num_processes, split_batches=split_batches)

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the dataset, if it has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        plan = ShardPlan(
            # raises TypeError, as the dataset itself would
            rows=len(self.dataset),  # type: ignore[arg-type]
            batch_size=self.batch_size,
            world_size=self.num_processes,
            split_batches=self.split_batches,
            even_batches=self.even_batches,
            drop_last=self.drop_last,
        )
        rest, size = 0, self.rows_per_batch
        if plan.remainder:
            rest = size if self.even_batches else plan.remainder - self.process_index * size
        return plan.full_groups * size + min(max(rest, 0), size)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._pieces())  # faster than a generator that yields each row

    def _pieces(self) -> Iterator[Sequence[Any]]:
        """Yield the rows of this rank, group by group: `rows_per_batch` of each but the last."""
        size = self.rows_per_batch * self.num_processes
        first = self.process_index * self.rows_per_batch
        end = first + self.rows_per_batch
        rows = iter(self.dataset)
        start: Sequence[Any] = ()
        group: list[Any] = []
        for full in zip_longest(*[rows] * size, fillvalue=_MISSING):  # faster than a list of each group
            if full[-1] is _MISSING:
                group = [row for row in full if row is not _MISSING]
                break
            yield full[first:end]
            start = start or full
        if not group or self.drop_last:
            return
        sizes = {"local_size": self.rows_per_batch, "group_size": size}
        for piece in piece_of_last_group(
            group, start or group, self.process_index, even_batches=self.even_batches, **sizes
        ):
            yield self._last_rows(piece, len(group))

    def _last_rows(self, rows: list[Any], real: int) -> list[Any]:  # noqa: ARG002 - for the subclass
        """Return the rows of an incomplete last group as they are to be yielded. Overridden to mark them."""
        return rows


class MarkingShard(IterableDatasetShard):
    """Like `IterableDatasetShard`, but rows of an incomplete last group are yielded as `LastRow`."""

    end = IterationEnd()  # nothing is known of it here: the `LastRow` objects carry the numbers

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may have different numbers of rows of the last group, as far as can be told."""
        if self.even_batches or self.drop_last:
            return False
        try:
            return len(self.dataset) % (self.rows_per_batch * self.num_processes) > 0  # type: ignore[arg-type]
        except TypeError:
            return True

    @override
    def _last_rows(self, rows: list[Any], real: int) -> list[Any]:
        return [LastRow(row, real) for row in rows]
