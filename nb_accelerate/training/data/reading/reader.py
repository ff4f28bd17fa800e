"""Read the batches of one rank, from the beginning of an epoch or from the middle.

A prepared loader owns a `Reader`, and a reader owns a `TorchSource`::

    DataLoaderShard       position, rng in step, device, end of the data      what the loop sees
      Reader              this rank's batches: `Reader`, `DispatchingReader`, `StreamReader`
        TorchSource       a loader of torch: `TorchSource`, or of torchdata: `StatefulSource`

`Reader.read` begins an epoch; `Reader.starting_at` returns a reader that begins later; `Reader.read_state` and
`Reader.restore` save and restore the state of reading. A group is what all ranks see in one step, see
`training.data.plan.plan`; its real rows are the rows that are no copies.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.training.comm import SingleCollectives
from nb_accelerate.training.data.dispatching.batch_parts import count_rows
from nb_accelerate.training.data.plan.plan import GroupRows
from nb_accelerate.training.data.plan.samplers import IterationEnd
from nb_accelerate.training.data.reading.iterable import LastBatch
from nb_accelerate.training.data.resuming import positions
from nb_accelerate.training.data.resuming.positions import SavedPosition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data.plan.samplers import BatchSamplerShard, SamplerShard
    from nb_accelerate.training.data.reading.iterable import MarkingShard
    from nb_accelerate.training.data.reading.source import TorchSource

    Shard = BatchSamplerShard | SamplerShard | MarkingShard


@dataclass(frozen=True, slots=True)
class ReadState:
    """The state of reading after a batch, from which reading can go on."""

    reading: dict[str, Any] | None = None  # of torchdata's loader; None for loaders of torch
    repeat: int = 0  # batches handed out after that state was taken


class Reader:
    """Reads this rank's batches, where each rank reads what its sampler or dataset gives it.

    ``shard`` is the rank's part of the data; None if the rank reads everything.
    """

    per_batch = 1  # batches that are read for one that is handed out

    def __init__(self, source: TorchSource, *, shard: Shard | None = None, dropped: int = 0) -> None:
        self.source = source
        self.shard = shard
        self.dropped = dropped
        self._end = IterationEnd()
        self.not_drawn = self.reread = 0

    @property
    def skipped(self) -> int:
        """Batches left out at the beginning of every epoch; the position of the first batch that is read."""
        return self.not_drawn + self.dropped

    @property
    def even(self) -> bool:
        """Whether all ranks get equal batches at the end of the data."""
        return self.shard is None or self.shard.even_batches

    @even.setter
    def even(self, value: bool) -> None:
        if self.shard is not None:
            self.shard.even_batches = value

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may have different numbers of rows at the end: that they will, or that cannot be told."""
        return self.shard is not None and self.shard.is_uneven

    @property
    def compares_lengths(self) -> bool:
        """Whether the datasets of all ranks have to be equally long."""
        return self.even

    def for_one_pass(self) -> Self:
        """Return a reader of the same loader, with a state of its own: a loader may be iterated inside its own loop."""
        reader = copy.copy(self)
        reader.source = copy.copy(self.source)
        return reader

    def __len__(self) -> int:
        return max(len(self.source.loader) - self.dropped * self.per_batch, 0)

    def starting_at(self, batches: int) -> Self:
        """Return a reader that leaves out the first batches of every epoch, and shares samplers with this one."""
        later = copy.copy(self)
        later.source = self.source.without(batches * self.per_batch, self._to_reread())
        if self.source.reads_in_order:
            later.dropped += batches
        else:
            later.not_drawn += batches
            later.reread = getattr(later.source.sampler, "reread", 0)
        if self.shard is self.source.sampler:
            later.shard = later.source.sampler
        return later

    def _to_reread(self) -> int:
        """Return how many batches at the beginning are read although they are left out."""
        return 0

    def read(self, epoch: int, *, resumed: bool, repeat: int = 0) -> Iterator[Any]:  # noqa: ARG002 - for a subclass
        """Begin an epoch; return its batches from position `skipped` on, or from where `restore` said. Collective.

        ``resumed`` says that a position in the middle of the epoch was loaded, and ``repeat`` how many batches to leave
        out after the state that was restored, see `ReadState`.
        """
        dropped = 0 if resumed and self.source.is_restored else self.dropped
        batches = self.source.open(epoch, resumed=resumed)
        if self.shard is not None:
            self._end = self.shard.end
        if dropped:
            skip(batches, dropped)
        return batches

    def with_rows(self, batch: Any) -> LastBatch:
        """Return the last batch of an epoch with the numbers of rows of its group.

        Rows are what the sampler drew. Those of a stream that one process reads are counted in the batch.
        """
        if type(batch) is LastBatch:
            return batch
        if self.shard is not None:
            return LastBatch(batch, self._end.rows)
        rows = self.source.rows_of_last()
        return LastBatch(batch, GroupRows(None, count_rows(batch) if rows is None else rows))

    def read_state(self) -> ReadState:
        """Return the state of reading after the batch that `read` yielded last."""
        return ReadState(self.source.state())

    def end_state(self) -> ReadState:
        return ReadState(self.source.state())

    def saved(self, read_state: ReadState, *, epoch: int, position: int, order: dict[str, Any]) -> dict[str, Any]:
        """Return a position to be saved, for the state of reading after the batch that was handed out last."""
        reading = positions.shifted(read_state.reading or {}, self._uncounted, over=not position)
        saved = SavedPosition(epoch=epoch, position=position, reading=reading, repeat=read_state.repeat, order=order)
        return self.source.encode(saved, self.per_batch)

    def restore(self, saved: SavedPosition) -> None:
        """Restore the states of samplers and datasets in a saved position, for the next epoch."""
        self.source.restore(positions.shifted(saved.reading, -self._uncounted) if saved.restores else {})

    @property
    def _uncounted(self) -> int:
        """Batches that samplers leave out, so that torchdata does not count them."""
        return self.not_drawn * self.per_batch - self.reread


class CollectiveReader(Reader):
    """Reads in lockstep with the other ranks, by collectives. Base of `DispatchingReader` and `StreamReader`."""

    compares_lengths = False  # other ranks read nothing, or parts of other lengths

    def __init__(
        self,
        source: TorchSource,
        *,
        collectives: Collectives | None = None,
        even_batches: bool = True,
        dropped: int = 0,
    ) -> None:
        super().__init__(source, dropped=dropped)
        self.collectives = collectives or SingleCollectives()
        self.even_batches = even_batches

    @property
    @override
    def even(self) -> bool:
        return self.even_batches

    @even.setter
    def even(self, value: bool) -> None:
        self.even_batches = value

    @property
    @override
    def is_uneven(self) -> bool:
        return not self.even_batches


def skip(batches: Iterator[Any], number: int) -> None:
    """Read and drop up to ``number`` batches."""
    for _ in islice(batches, number):
        pass
