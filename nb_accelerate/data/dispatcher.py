"""A loader whose data is read by rank 0 alone.

::

    rank 0   read a group -> one part for each rank -> label ──broadcast──> all     only when labels change
                                                       bytes ──scatter────> each    once per batch
    others                                             bytes + label -> batch

Each message ends with a word about the next one: the same label, another label, the end, or that reading failed. So
a batch takes one collective, and a rank that waits for data learns when there will be none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.comm import SingleCollectives
from nb_accelerate.data.iterable import LastBatch
from nb_accelerate.data.loader import DataLoaderShard
from nb_accelerate.data.parcel import ALIGNMENT, Label, pack, unpack, write
from nb_accelerate.data.plan import dealt
from nb_accelerate.data.rows import count_rows, join_rows, slice_rows
from nb_accelerate.errors import DispatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from nb_accelerate.comm import Collectives

SliceFunction = Callable[..., Any]

_SAME, _OTHER, _END, _FAILED = range(4)
_WORD = ALIGNMENT  # bytes in front of the tensors, of which the first is the word about the next message


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One batch for each rank, ready to be sent."""

    parts: list[Any]  # None where a rank gets nothing
    real: int | None  # real rows, if some are copies or missing
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
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.split_batches = split_batches
        self._collectives = collectives or SingleCollectives()
        self._even = even_batches
        self._slice = slice_fn
        self._ranks = self._collectives.world_size
        self._per_group = 1 if split_batches else self._ranks
        self._buffer: Tensor | None = None
        self._reads_itself = self._collectives.rank == 0
        self._dealt: Any = None  # where reading was when it had read the parcel that was yielded last
        self._arguments |= {
            "collectives": self._collectives,
            "split_batches": split_batches,
            "even_batches": even_batches,
            "slice_fn": slice_fn,
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
        if self.split_batches:
            return batches
        whole, rest = divmod(batches, self._ranks)
        return whole if self._drops_last else whole + (rest > 0)

    @property
    def _drops_last(self) -> bool:
        return bool(getattr(self.batch_sampler, "drop_last", self.drop_last))

    @override
    def _read_per_batch(self) -> int:
        return self._per_group

    @override
    def _source(self) -> Iterator[Any]:
        self._rest = self._dealt = None
        return self._deal(self._read()) if self._reads_itself else self._receive()

    @override
    def _reached(self) -> Any:
        return self._dealt

    def _deal(self, source: Iterator[Any]) -> Iterator[Any]:
        """Read, send the others their parts, and yield our own. Runs on rank 0."""
        collectives = self._collectives
        groups = self._groups(source)
        parcel, failure = _next(groups)
        collectives.broadcast_objects([_headline(parcel, failure)], 0)
        while parcel is not None:
            following, failure = _next(groups)
            word = _word(parcel, following, failure)
            collectives.scatter(*self._filled(parcel, word), 0)
            if word in (_OTHER, _FAILED):
                collectives.broadcast_objects([_headline(following, failure)], 0)
            if parcel.reached is not None:
                self._dealt = parcel.reached
            if parcel.parts[0] is not None:
                yield _marked(parcel.parts[0], parcel.real)
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
            row_bytes, labels, real = headline
            row = torch.empty(row_bytes, dtype=torch.uint8, device=collectives.device)
            row = collectives.scatter(None, row, 0)
            word = int(row[0])
            if word in (_OTHER, _FAILED):
                headline = collectives.broadcast_objects([None], 0)[0]
            elif word == _END:
                headline = None
            if labels[rank].skeleton is not None:
                yield _marked(unpack(labels[rank], row[_WORD:]), real)

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
        start: list[Any] = []
        group: list[Any] = []
        size = getattr(self.batch_sampler, "batch_size", None) if self.batch_sampler is not None else self.batch_size
        for batch in source:
            group.append(batch)
            if len(group) < self._per_group:
                continue
            start = start or group
            rows = count_rows(batch)
            if (size is None or rows == size) and (not self.split_batches or (rows or 0) % self._ranks == 0):
                yield self._parcel(self._parts_of_full(group), None)
            elif not self._drops_last:
                yield self._parcel(*self._parts_of_rest(group, start))
            group = []
        if group and not self._drops_last:
            yield self._parcel(*self._parts_of_rest(group, start or group))

    def _parts_of_full(self, group: list[Any]) -> list[Any]:
        if self._slice is None and not self.split_batches:
            return group  # each rank gets one of the batches as it is
        whole = join_rows(group)
        rows = count_rows(whole) or 0
        return self._cut(whole, dealt(rows, self._ranks, even=True))

    def _parts_of_rest(self, group: list[Any], start: list[Any]) -> tuple[list[Any], int | None]:
        real = sum(count_rows(batch) or 0 for batch in group)
        bounds = dealt(real, self._ranks, even=self._even)
        filled, rows = list(group), real
        while rows < bounds[-1][1]:
            filled += start
            rows += sum(count_rows(batch) or 0 for batch in start)
        exact = real % self._ranks == 0
        return self._cut(join_rows(filled), bounds), None if exact else real

    def _cut(self, whole: Any, bounds: list[tuple[int, int]]) -> list[Any]:
        cut = self._slice or slice_rows
        return [
            cut(whole, slice(first, end), process_index=rank, num_processes=self._ranks) if first < end else None
            for rank, (first, end) in enumerate(bounds)
        ]

    def _parcel(self, parts: list[Any], real: int | None) -> _Parcel:
        labels, tensors = [], []
        for rank, part in enumerate(parts):
            label, inside = pack(part) if rank and part is not None else (Label(None), [])
            labels.append(label)
            tensors.append(inside)
        return _Parcel(parts, real, labels, tensors, self._read_state())


def _next(groups: Iterator[_Parcel]) -> tuple[_Parcel | None, Exception | None]:
    try:
        return next(groups, None), None
    except Exception as error:
        return None, error


def _word(parcel: _Parcel, following: _Parcel | None, failure: Exception | None) -> int:
    if failure is not None:
        return _FAILED
    if following is None:
        return _END
    same = following.labels == parcel.labels and following.real == parcel.real
    return _SAME if same else _OTHER


def _headline(parcel: _Parcel | None, failure: Exception | None) -> Any:
    """Return what others have to know before bytes come: sizes and labels, what failed, or None at the end."""
    if failure is not None:
        return f"{type(failure).__name__}: {failure}"
    return None if parcel is None else (parcel.row_bytes, parcel.labels, parcel.real)


def _marked(part: Any, real: int | None) -> Any:
    return part if real is None else LastBatch(part, real, count_rows(part) or 0)
