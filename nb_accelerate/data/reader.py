"""Readers: which batches of what a loader reads are this rank's, and how to begin in the middle of an epoch.

A prepared loader owns a `Reader`, and a reader owns a `TorchSource`::

    DataLoaderShard       position, rng in step, device, end of the data      what the loop sees
      Reader              this rank's batches: `Reader`, `DispatchingReader`, `StreamReader`
        TorchSource       a loader of torch: `TorchSource`, or of torchdata: `StatefulSource`

`Reader.read` begins an epoch; `Reader.starting_at` returns a reader that begins later; `Reader.reached` and
`Reader.restore` save and restore where reading is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from nb_accelerate.comm import SingleCollectives
from nb_accelerate.data import positions
from nb_accelerate.data.iterable import LastBatch
from nb_accelerate.data.positions import SavedPosition
from nb_accelerate.data.rows import count_rows
from nb_accelerate.pytree import find_batch_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from nb_accelerate.comm import Collectives
    from nb_accelerate.data.source import TorchSource


class Share(Protocol):
    """What decides which rows are this rank's: a sampler's shard, or that of an iterable dataset."""

    even_batches: bool
    """Whether all ranks get equal batches."""

    def real_rows(self, rows_on_rank: int) -> int | None:
        """Return how many rows of the last group are real, or None if all are. Called after the last batch."""
        ...


@dataclass(frozen=True, slots=True)
class Reached:
    """Where reading was when a batch was handed out.

    Attributes:
        reading: torchdata's state; None if there is none.
        repeat: batches that were handed out since then.
    """

    reading: dict[str, Any] | None = None
    repeat: int = 0


class Reader:
    """Reads this rank's batches, where each rank reads what its sampler or dataset gives it.

    Args:
        source: the loader of torch.
        share: what decides which rows are this rank's; None if all are.
        items_are_batches: the loader has no batch size: what it reads are batches by themselves.
        dropped: batches to read and leave out at the beginning of every epoch, counted in positions.

    Attributes:
        dropped: as given, and those that `starting_at` left out of a dataset that is read in order.
        not_drawn: batches that the sampler leaves out at the beginning of every epoch, counted in positions.
        reread: batches that come first although they are left out: the last group is filled up with their rows.
        per_batch: how many batches are read for one that is handed out.
    """

    per_batch = 1

    def __init__(
        self, source: TorchSource, *, share: Share | None = None, items_are_batches: bool = False, dropped: int = 0
    ) -> None:
        self.source = source
        self.share = share
        self.items_are_batches = items_are_batches
        self.dropped = dropped
        self.not_drawn = self.reread = 0

    @property
    def skipped(self) -> int:
        """Batches left out at the beginning of every epoch: where positions begin."""
        return self.not_drawn + self.dropped

    @property
    def even(self) -> bool:
        """Whether all ranks get equal batches at the end of the data."""
        return self.share is None or self.share.even_batches

    @even.setter
    def even(self, value: bool) -> None:
        if self.share is not None:
            self.share.even_batches = value

    @property
    def compares_lengths(self) -> bool:
        """Whether the datasets of all ranks have to be equally long."""
        return self.even

    def __len__(self) -> int:
        return max(len(self.source.loader) - self.dropped * self.per_batch, 0)

    def starting_at(self, batches: int) -> Self:
        """Return a reader that leaves out the first batches of every epoch, and shares samplers with this one.

        Args:
            batches: how many of those that this one hands out.
        """
        later = self.without_reads(batches * self.per_batch)
        if self.source.reads_in_order:
            later.dropped += batches
        else:
            later.not_drawn += batches
        return later

    def without_reads(self, reads: int) -> Self:
        """Return a reader whose sampler leaves out more batches at the beginning, which positions do not count.

        Args:
            reads: batches of the loader of torch. If its dataset is read in order, none is left out.
        """
        later = copy.copy(self)
        later.source = self.source.without(reads, self._to_reread())
        if not self.source.reads_in_order:
            later.reread = getattr(later.source.sampler, "reread", 0)
        if self.share is self.source.sampler:
            later.share = later.source.sampler
        return later

    def _to_reread(self) -> int:
        """Return how many batches at the beginning are read although they are left out."""
        return 0

    def read(self, epoch: int, *, resumed: bool) -> Iterator[Any]:
        """Begin an epoch; return its batches from position `skipped` on, or from where `restore` said.

        All ranks call it together. Arguments are those of `TorchSource.open`.
        """
        dropped = 0 if resumed and self.source.is_restored else self.dropped
        batches = self.source.open(epoch, resumed=resumed)
        if dropped:
            skip(batches, dropped)
        return batches

    def last(self, batch: Any) -> LastBatch:
        """Return the last batch of an epoch with what is known of its group: how many rows are real.

        Args:
            batch: one that `read` yielded; the loop may call this for a `LastBatch` in the middle of an epoch as well.
        """
        if type(batch) is LastBatch:
            if not self.items_are_batches:
                return batch
            rows = find_batch_size(batch.batch) or 1
            return LastBatch(batch.batch, (batch.real or 0) * rows, rows, batch.rows_of_ranks)
        if self.share is None:
            return LastBatch(batch, None, count_rows(batch))
        rows = (find_batch_size(batch) or 1) if self.items_are_batches else count_rows(batch) or 0
        real = self.share.real_rows(rows)
        return LastBatch(batch, real, rows, getattr(self.share, "last_rows_of_ranks", None))

    def reached(self) -> Reached:
        """Return where reading is after the batch that `read` yielded last."""
        return Reached(self.source.state())

    def ended(self) -> Reached:
        """Return where reading is at the end of the data."""
        return Reached(self.source.state())

    def saved(self, reached: Reached, *, epoch: int, position: int) -> dict[str, Any]:
        """Return a position to be saved.

        Args:
            reached: what `reached` returned after the batch that was handed out last.
            epoch: the current one; between epochs the next.
            position: batches of it that were handed out or left out.
        """
        reading = positions.moved(reached.reading or {}, self._uncounted, over=not position)
        return self.source.saved(
            SavedPosition(epoch=epoch, position=position, reading=reading, repeat=reached.repeat), self.per_batch
        )

    def restore(self, saved: SavedPosition) -> None:
        """Begin the next epoch at a saved position, as far as samplers or datasets have a state there."""
        self.source.restore(positions.moved(saved.to_restore, -self._uncounted))

    @property
    def _uncounted(self) -> int:
        """How many batches samplers leave out, which torchdata therefore does not count."""
        return self.not_drawn * self.per_batch - self.reread


class CollectiveReader(Reader):
    """Reads in step with the other ranks, which learn from each other what they have.

    Args:
        source: the loader of torch.
        collectives: connect the ranks; by default there are no others.
        even_batches: give all ranks equally many batches.
        dropped: batches of each rank to read and leave out at the beginning of every epoch.
        drop_reads: batches of ``source`` to read and leave out at the beginning of every epoch.
    """

    compares_lengths = False  # the lengths of datasets on other ranks do not count, or may differ

    def __init__(
        self,
        source: TorchSource,
        *,
        collectives: Collectives | None = None,
        even_batches: bool = True,
        dropped: int = 0,
        drop_reads: int = 0,
    ) -> None:
        super().__init__(source, dropped=dropped)
        self.collectives = collectives or SingleCollectives()
        self.even_batches = even_batches
        self.drop_reads = drop_reads

    @property
    @override
    def even(self) -> bool:
        return self.even_batches

    @even.setter
    def even(self, value: bool) -> None:
        self.even_batches = value


def skip(batches: Iterator[Any], number: int) -> None:
    """Read some batches, or as many as there are, and leave them out."""
    for _ in islice(batches, number):
        pass
