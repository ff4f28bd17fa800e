"""A loader whose data is read by rank 0 alone.

::

    rank 0   read a group -> one part for each rank -> label ──broadcast──> all     only when labels change
                                                       bytes ──scatter────> each    once per batch
    others                                             bytes + label -> batch

Each message ends with a word about the next one: the same label, another label, the end, or that reading failed. So
a batch takes one collective, and a rank that waits for data learns when there will be none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from nb_accelerate.comm import SingleCollectives
from nb_accelerate.data.counted import counted
from nb_accelerate.data.dealing import GroupEnd, cut, deal_rows, deal_whole, joined
from nb_accelerate.data.loader import DataLoaderShard
from nb_accelerate.data.packing import ALIGNMENT, Label, pack, unpack, write
from nb_accelerate.data.plan import dealt
from nb_accelerate.data.reading import failing, next_of
from nb_accelerate.data.rows import count_rows
from nb_accelerate.errors import DispatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from typing_extensions import Self

    from nb_accelerate.comm import Collectives
    from nb_accelerate.data.counted import Counted

SliceFunction = Callable[..., Any]

_SAME, _OTHER, _END, _FAILED = range(4)
_WORD = ALIGNMENT  # bytes in front of the tensors, of which the first is the word about the next message


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One batch for each rank, ready to be sent."""

    parts: list[Any]  # None where a rank gets nothing
    end: GroupEnd | None  # if some rows are copies or missing
    labels: list[Label]
    tensors: list[list[Tensor]]
    reached: Any  # where reading was when it had read this

    @property
    def row_bytes(self) -> int:
        return _WORD + max(label.size for label in self.labels)


class DataLoaderDispatcher(DataLoaderShard):
    """A user's loader, prepared so that rank 0 reads all data and sends the others their part.

    Args:
        dataset: the user's, whole.
        collectives: carries the parts.
        split_batches: cut each batch into parts; otherwise each rank gets a batch.
        even_batches: fill up the last parts with rows from the start, so that all ranks have equally many.
        slice_fn: cuts a batch: called with the batch, a slice, ``process_index`` and ``num_processes``.
        reread: how many batches come first that are not handed out: the last group is filled up with their rows.
        drop_reads: batches of the user's loader to read and leave out at the beginning of every epoch.
        **kwargs: those of `DataLoaderShard`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collectives: Collectives | None = None,
        split_batches: bool = False,
        even_batches: bool = True,
        slice_fn: SliceFunction | None = None,
        reread: int = 0,
        drop_reads: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self._reread = reread
        self._drop_reads = drop_reads
        self.split_batches = split_batches
        self._collectives = collectives or SingleCollectives()
        self._even = even_batches
        self._slice = slice_fn
        self._ranks = self._collectives.world_size
        self._per_group = 1 if split_batches else self._ranks
        self._buffer: Tensor | None = None
        self._reads_itself = self._collectives.rank == 0
        self._beginning: list[Counted] = []  # what was left out of this epoch and may be needed to fill up its end
        self._dealt: Any = None  # where reading was when it had read the parcel that was yielded last
        self._arguments |= {
            "collectives": self._collectives,
            "split_batches": split_batches,
            "even_batches": even_batches,
            "slice_fn": slice_fn,
            "reread": reread,
            "drop_reads": drop_reads,
        }

    @property
    @override
    def even(self) -> bool:
        return self._even

    @even.setter
    def even(self, value: bool) -> None:
        self._even = value

    @override
    def extent(self) -> None:
        return None  # rank 0 reads for all; what others have does not count

    @override
    def __len__(self) -> int:
        batches = self._read_length()
        steps, rest = divmod(batches, self._per_group)
        if rest and not self._drops_last:
            steps += 1
        return steps - (steps > 0 and not self._even and self._gets_nothing_at_the_end())

    def _gets_nothing_at_the_end(self) -> bool:
        """Whether the incomplete last group, which is not filled up, has no row for this rank."""
        size, rank = self._batch_rows, self._collectives.rank
        if self._drops_last:
            return False
        if size is None:
            return 0 < self._read_length() % self._per_group <= rank
        rows: int = len(self.dataset if isinstance(self.dataset, IterableDataset) else self.get_sampler())  # type: ignore[arg-type]
        real = rows % (size * self._per_group)
        first, end = dealt(real, self._ranks, even=False)[rank]
        return real > 0 and first == end

    @property
    def _drops_last(self) -> bool:
        return bool(getattr(self.batch_sampler, "drop_last", self.drop_last))

    @override
    def _read_per_batch(self) -> int:
        return self._per_group

    def without_reads(self, batches: int) -> Self:
        """Return a loader that leaves out batches of the user's loader, which need not be whole steps of this one.

        For a dataset that is read by number.

        Args:
            batches: how many, at the beginning of every epoch.
        """
        return self._later(batches, self.skip_batches)

    @override
    def _to_reread(self) -> int:
        if self._drops_last or not self._even:
            return 0
        if self._batch_rows is None:
            return self._per_group - 1 or 1
        return -(-(self._ranks - 1) // self._batch_rows)  # as few copies as there can be

    @property
    def _batch_rows(self) -> int | None:
        """Rows of a batch of the user's loader, if these have a fixed size."""
        return self.batch_size if self.batch_sampler is None else getattr(self.batch_sampler, "batch_size", None)

    @override
    def _source(self) -> Iterator[Any]:
        self._rest = self._dealt = None
        if self._reads_itself:
            try:
                return self._deal(self._read())
            except Exception as error:
                return self._deal(failing(error))  # the others have to be told
        if not (self.persistent_workers and self._epochs.epoch):
            # Rank 0 draws a number when reading begins. With it here, ranks that began with the same numbers keep them.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return self._receive()

    @override
    def _leave_out(self, source: Iterator[Any]) -> None:
        self._beginning = []
        keep = self._to_reread()
        for _ in range(self._reread + self._dropped * self._read_per_batch() + self._drop_reads):
            for batch in itertools.islice(source, 1):
                if len(self._beginning) < keep:
                    self._beginning.append(counted(batch))

    @override
    def _reached(self) -> Any:
        return self._dealt

    def _deal(self, source: Iterator[Any]) -> Iterator[Any]:
        """Read, send the others their parts, and yield our own. Runs on rank 0."""
        collectives = self._collectives
        groups = self._groups(source)
        parcel, failure = next_of(groups)
        collectives.broadcast_objects([_headline(parcel, failure)], 0)
        while parcel is not None:
            following, failure = next_of(groups)
            word = _word(parcel, following, failure)
            collectives.scatter(*self._filled(parcel, word), 0)
            if word in (_OTHER, _FAILED):
                collectives.broadcast_objects([_headline(following, failure)], 0)
            if parcel.reached is not None:
                self._dealt = parcel.reached
            if parcel.parts[0] is not None:
                yield parcel.parts[0] if parcel.end is None else parcel.end.mark(parcel.parts[0], 0)
            parcel = following
        if failure is not None:
            raise failure

    def _receive(self) -> Iterator[Any]:
        """Yield the parts that rank 0 sends. Runs on all other ranks."""
        collectives = self._collectives
        rank = collectives.rank
        headline = collectives.broadcast_objects([None], 0)[0]
        while headline is not None:
            if isinstance(headline, str):
                raise DispatchError(
                    f"Rank 0, which reads the data for all ranks (dispatch_batches=True), failed: {headline}"
                )
            row_bytes, labels, end = headline
            row = torch.empty(row_bytes, dtype=torch.uint8, device=collectives.device)
            row = collectives.scatter(None, row, 0)
            word = int(row[0])
            if word in (_OTHER, _FAILED):
                headline = collectives.broadcast_objects([None], 0)[0]
            elif word == _END:
                headline = None
            if labels[rank].skeleton is not None:
                part = unpack(labels[rank], row[_WORD:], bring_back=self.device is None)
                yield part if end is None else end.mark(part, rank)

    def _filled(self, parcel: _Parcel, word: int) -> tuple[Tensor, Tensor]:
        """Return what rank 0 hands to scatter: a row of bytes for each rank, and room for its own."""
        size = parcel.row_bytes
        device = self._collectives.device
        if self._buffer is None or self._buffer.shape[1] != size:
            self._buffer = torch.empty((self._ranks, size), dtype=torch.uint8, device=device)
        buffer = self._buffer
        buffer[:, 0] = word
        for rank in range(1, self._ranks):  # our own part does not travel
            write(parcel.labels[rank], parcel.tensors[rank], buffer[rank, _WORD:])
        return buffer, torch.empty(size, dtype=torch.uint8, device=device)

    def _groups(self, source: Iterator[Any]) -> Iterator[_Parcel]:
        """Read what all ranks get in one step, again and again."""
        start = self._beginning
        group: list[Counted] = []
        size = self._batch_rows
        for batch in map(counted, source):
            group.append(batch)
            if len(group) < self._per_group:
                continue
            start = start or group
            full = size is None or all(one.rows in (size, None) for one in group)
            if full and (not self.split_batches or (batch.rows or 0) % self._ranks == 0):
                yield self._parcel(self._parts_of_full(group), None)
            elif not self._drops_last:
                yield self._parcel(*self._parts_of_rest(group, start))
            group = []
        if group and not self._drops_last:
            yield self._parcel(*self._parts_of_rest(group, start or group))

    def _parts_of_full(self, group: list[Counted]) -> list[Any]:
        if self._slice is None and not self.split_batches:
            return [one.batch for one in group]  # each rank gets one of the batches as it is
        whole = joined(group)
        return cut(whole, dealt(whole.rows or 0, self._ranks, even=True), self._cut_by_user)

    def _parts_of_rest(self, group: list[Counted], start: list[Counted]) -> tuple[list[Any], GroupEnd | None]:
        countable = self._batch_rows is not None and all(one.rows is not None for one in group)
        if self._slice is None and not self.split_batches and not countable:
            return deal_whole(group, start, self._ranks, even=self._even)
        parts, end = deal_rows(group, start, self._ranks, even=self._even, by=self._cut_by_user)
        if end is not None and self._slice is not None:
            end = GroupEnd(end.real, tuple(count_rows(part) or 0 for part in parts))
        return parts, end

    @property
    def _cut_by_user(self) -> Callable[[Any, slice, int], Any] | None:
        own = self._slice
        if own is None:
            return None
        return lambda batch, wanted, rank: own(batch, wanted, process_index=rank, num_processes=self._ranks)

    def _parcel(self, parts: list[Any], end: GroupEnd | None) -> _Parcel:
        labels, tensors = [], []
        for rank, part in enumerate(parts):
            label, inside = pack(part) if rank and part is not None else (Label(None), [])
            labels.append(label)
            tensors.append(inside)
        return _Parcel(parts, end, labels, tensors, self._read_state())


def _word(parcel: _Parcel, following: _Parcel | None, failure: Exception | None) -> int:
    if failure is not None:
        return _FAILED
    if following is None:
        return _END
    same = following.labels == parcel.labels and following.end == parcel.end
    return _SAME if same else _OTHER


def _headline(parcel: _Parcel | None, failure: Exception | None) -> Any:
    """Return what others have to know before bytes come: sizes and labels, what failed, or None at the end."""
    if failure is not None:
        return f"{type(failure).__name__}: {failure}"
    return None if parcel is None else (parcel.row_bytes, parcel.labels, parcel.end)
