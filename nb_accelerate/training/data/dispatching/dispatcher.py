"""Read data on rank 0 alone, and send the other ranks their part of each group.

A group is what all ranks together see in one step, see `training.data.plan.plan`.

::

    rank 0   read a group -> one part for each rank -> layouts ──broadcast──> all     only when they change
                                                       bytes   ──scatter────> each    once per batch
    others                                             bytes + layout -> batch

Each message begins with a code for what comes after it: the same layouts, other layouts, the end, or that reading
failed. So a batch takes one collective, and a rank that waits for data learns when there will be none.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.errors import ConfigError, DispatchError
from nb_accelerate.training.data.dispatching.batch_parts import (
    CannotCutError,
    count_batch,
    count_rows,
    grouped,
    next_or_error,
    num_rows,
    parts_of_last_group,
    pieces_of,
    raise_on_next,
    take_from,
)
from nb_accelerate.training.data.dispatching.packing import ALIGNMENT_BYTES, BatchLayout, pack, unpack, write
from nb_accelerate.training.data.loader import DataLoaderShard
from nb_accelerate.training.data.plan.plan import part_bounds, rows_of_ranks
from nb_accelerate.training.data.plan.samplers import innermost_sampler
from nb_accelerate.training.data.reading.iterable import LastBatch
from nb_accelerate.training.data.reading.reader import CollectiveReader, ReadState
from nb_accelerate.training.data.reading.source import numbers_drawn
from nb_accelerate.training.process import rng
from nb_accelerate.training.process.devices import device_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data.dispatching.batch_parts import CountedBatch
    from nb_accelerate.training.data.plan.plan import GroupRows
    from nb_accelerate.training.data.reading.reader import Reader
    from nb_accelerate.training.data.reading.source import TorchSource
    from nb_accelerate.training.data.resuming.positions import SavedPosition

SliceFunction = Callable[..., Any]

_SAME, _OTHER, _END, _FAILED = range(4)  # what follows a batch: one with the same layouts, with others, none, an error
_CODE_BYTES = ALIGNMENT_BYTES  # bytes in front of those of the tensors; the first byte is the code, the rest is unused


@dataclass(frozen=True, slots=True)
class _Message:
    """One batch for each rank, ready to be sent. All lists have an item for each rank."""

    parts: list[Any]  # None for a rank that gets nothing
    end: list[GroupRows] | None  # if some rows of the group are copies or missing
    layouts: list[BatchLayout]  # how parts are rebuilt from bytes
    tensors: list[list[Tensor]]  # those of a part in the order of its layout
    read_state: ReadState  # after this group was read

    @property
    def row_bytes(self) -> int:
        """Bytes that each rank receives."""
        return _CODE_BYTES + max(layout.size for layout in self.layouts)


class OwnRandomState:
    """Restore a separate random state at the beginning of a ``with`` block, and the former one at its end.

    Each block goes on where the last one ended. Rank 0 reads data inside such blocks, so that outside of them its
    random state stays equal to the other ranks'.
    """

    def __init__(self, kind: DeviceKind) -> None:
        self._kind = kind
        self._outside: dict[str, Any] = {}
        self._inside: dict[str, Any] | None = None

    def __enter__(self) -> None:
        self._outside = rng.capture(self._kind, all_devices=False)
        if self._inside is not None:
            rng.restore(self._inside, self._kind)

    def __exit__(self, *_: object) -> None:
        self._inside = rng.capture(self._kind, all_devices=False)
        rng.restore(self._outside, self._kind)


class DispatchingReader(CollectiveReader):
    """Reads all data on rank 0 and sends the others their part. With ``even_batches`` the last parts are filled up.

    With ``split_batches`` each rank gets a part of each batch, and else a batch. ``slice_fn`` cuts a batch, or as many
    as there are ranks, joined: it is called with the batch, a slice, ``process_index`` and ``num_processes``.
    ``bring_back`` leaves parts on the CPU if they came from there, also where another device carries them.
    """

    def __init__(
        self,
        source: TorchSource,
        *,
        split_batches: bool = False,
        slice_fn: SliceFunction | None = None,
        bring_back: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(source, **kwargs)
        self.split_batches = split_batches
        self._slice = slice_fn
        self._bring_back = bring_back
        self._ranks = self.collectives.world_size
        self.per_batch = 1 if split_batches else self._ranks
        self._buffer: Tensor | None = None
        # First batches of the epoch that were left out: the end is filled with them.
        self._beginning: list[CountedBatch] = []
        self._yielded_state = ReadState()  # after the group whose part was yielded last

    @override
    def __len__(self) -> int:
        steps, rest = divmod(super().__len__(), self.per_batch)
        if self._drops_last:
            return steps
        steps += rest > 0
        size, rank = self._batch_rows, self.collectives.rank
        if self.even_batches or not steps:
            return steps
        # An incomplete last group that is not filled up may have no row for this rank.
        if size is None:
            return steps - (0 < rest <= rank)
        real = self._rows_of_last_group(size)
        first, end = part_bounds(real, self._ranks, even=False)[rank]
        return steps - (real > 0 and first == end)

    def _rows_of_last_group(self, size: int) -> int:
        """Return how many rows an incomplete last group has; a TypeError if that cannot be told."""
        source = self.source
        sized: Any = source.loader.dataset if source.reads_in_order else innermost_sampler(source.sampler)
        return len(sized) % (size * self.per_batch)

    @property
    @override
    def is_uneven(self) -> bool:
        size = self._batch_rows
        if self.even_batches or self._drops_last:
            return False
        try:
            return super().__len__() % self.per_batch > 0 if size is None else self._rows_of_last_group(size) > 0
        except TypeError:
            return True

    @property
    def _drops_last(self) -> bool:
        loader = self.source.loader
        return bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))

    @property
    def _batch_rows(self) -> int | None:
        """Rows of a batch of the user's loader, if these have a fixed size."""
        loader = self.source.loader
        return loader.batch_size if loader.batch_sampler is None else getattr(loader.batch_sampler, "batch_size", None)

    @override
    def _to_reread(self) -> int:
        if self._drops_last or not self.even_batches:
            return 0
        return max(self.per_batch - 1, 1)  # batches that a last group lacks at most; one is split

    @override
    def read(self, epoch: int, *, resumed: bool, repeat: int = 0) -> Iterator[Any]:
        self._yielded_state = ReadState()
        shares = self.collectives.num_sharing > 1
        random_state = OwnRandomState(device_kind(self.collectives.device.type)) if shares else contextlib.nullcontext()
        batches: Iterator[Any] | None = None
        if self.collectives.is_first:
            try:
                with random_state:
                    batches = self._opened(epoch, resumed=resumed)
            except Exception as error:
                batches = raise_on_next(error)  # the others have to be told
        loader = self.source.loader
        if batches is None or (shares and loader.generator is None):
            # iter(loader) draws seeds, on rank 0 only. Drawing as many here keeps random states equal.
            for _ in range(numbers_drawn(loader, epoch)):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return self._receive() if batches is None else self._send(batches, random_state)

    def _opened(self, epoch: int, *, resumed: bool) -> Iterator[Any]:
        """Begin to read, and drop the batches that are left out at the beginning of the epoch."""
        self._beginning = []
        dropped = self.reread + self.dropped * self.per_batch
        dropped = 0 if resumed and self.source.is_restored else dropped
        batches = self.source.open(epoch, resumed=resumed)
        keep = self._to_reread()
        for number, batch in enumerate(itertools.islice(batches, dropped)):
            if number < keep:
                self._beginning += self._pieces(batch)
        return batches

    def _pieces(self, batch: Any) -> list[CountedBatch]:
        """Return a batch as a list, or its parts for ranks."""
        if not self.split_batches or self._slice is not None:
            return [count_batch(batch)]
        try:
            return pieces_of(batch, self._ranks)
        except CannotCutError as error:
            raise ConfigError(
                f"split_batches=True gives each rank a part of each batch, and one cannot be cut: {error}. Write "
                "split_batches=False, which gives each rank whole batches; or let the DataLoader make batches of rows "
                "(batch_size=..., collate_fn=...), which need no cut; or write a function that cuts them: "
                "accelerator.prepare_data_loader(loader, slice_fn_for_dispatch=...)."
            ) from error

    @override
    def read_state(self) -> ReadState:
        return self._yielded_state

    @override
    def end_state(self) -> ReadState:
        return super().end_state() if self.collectives.is_first else ReadState()

    @override
    def restore(self, saved: SavedPosition) -> None:
        if self.collectives.is_first:
            super().restore(saved)

    def _send(self, source: Iterator[Any], random_state: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
        """Read groups, send the other ranks their parts, and yield the part of rank 0. Runs on rank 0."""
        collectives = self.collectives
        groups = self._groups(source)
        with random_state:
            message, failure = next_or_error(groups)
        collectives.broadcast_objects([_header(message, failure)], 0)
        # One group ahead: a message says what comes after it, so that the end and an error take no collective more.
        while message is not None:
            with random_state:
                following, failure = next_or_error(groups)
            if failure is not None:
                code = _FAILED
            elif following is None:
                code = _END
            else:
                same = following.layouts == message.layouts and following.end == message.end
                code = _SAME if same else _OTHER
            collectives.scatter(*self._filled(message, code), 0)
            if code in (_OTHER, _FAILED):
                collectives.broadcast_objects([_header(following, failure)], 0)
            self._yielded_state = message.read_state
            part, end = message.parts[0], message.end
            if part is not None:
                yield part if end is None else LastBatch(part, end[0])
            message = following
        if failure is not None:
            raise failure

    def _receive(self) -> Iterator[Any]:
        """Yield the parts that rank 0 sends. Runs on all other ranks."""
        collectives = self.collectives
        rank = collectives.rank
        header = collectives.broadcast_objects([None], 0)[0]
        while header is not None:
            if isinstance(header, str):
                raise DispatchError(
                    f"Rank 0, which reads the data for all ranks (dispatch_batches=True), failed: {header}"
                )
            row_bytes, layouts, end = header
            row = torch.empty(row_bytes, dtype=torch.uint8, device=collectives.device)
            row = collectives.scatter(None, row, 0)
            code = int(row[0])
            if code in (_OTHER, _FAILED):
                header = collectives.broadcast_objects([None], 0)[0]
            elif code == _END:
                header = None
            if layouts[rank].skeleton is not None:
                part = unpack(layouts[rank], row[_CODE_BYTES:], bring_back=self._bring_back)
                yield part if end is None else LastBatch(part, end[rank])

    def _filled(self, message: _Message, code: int) -> tuple[Tensor, Tensor]:
        """Return the arguments of rank 0 for scatter: bytes of shape (ranks, row_bytes) and (row_bytes,)."""
        size = message.row_bytes
        device = self.collectives.device
        if self._buffer is None or self._buffer.shape[1] != size:
            self._buffer = torch.empty((self._ranks, size), dtype=torch.uint8, device=device)
        buffer = self._buffer
        buffer[:, 0] = code
        for rank in range(self._ranks):  # the part of rank 0 has no tensors if no other process needs it
            write(message.layouts[rank], message.tensors[rank], buffer[rank, _CODE_BYTES:])
        return buffer, torch.empty(size, dtype=torch.uint8, device=device)

    def _groups(self, source: Iterator[Any]) -> Iterator[_Message]:
        """Yield a message for each group that ``source`` yields, the incomplete last one included."""
        start = self._beginning
        for batches in grouped(source, self.per_batch):
            group = list(itertools.chain.from_iterable(map(self._pieces, batches)))
            size = self._batch_rows
            if self.split_batches:
                full = num_rows(group) % self._ranks == 0
            else:
                full = len(group) == self._ranks and (size is None or all(each.rows in (size, None) for each in group))
            start = start or group
            if not full and self._drops_last:
                continue
            if self._slice is not None:
                yield self._message(*self._cut_by_user(self._slice, group, start))
            elif full:
                yield self._message([counted.batch for counted in group], None)
            else:
                by_row = self.split_batches or size is not None
                last = parts_of_last_group(group, start, self._ranks, even=self.even_batches, by_row=by_row)
                yield self._message(*last)

    def _cut_by_user(
        self, cut: SliceFunction, group: list[CountedBatch], start: list[CountedBatch]
    ) -> tuple[list[Any], list[GroupRows] | None]:
        """Cut a group by the user's function, filled up if its rows can be joined with those of ``start``."""
        if any(counted.rows is None for counted in group):
            raise ConfigError(
                "A batch has no tensor, array or list whose rows can be counted, so it cannot be cut by "
                "slice_fn_for_dispatch. Leave that out: then each rank gets whole batches."
            )
        real = num_rows(group)
        missing = -real % self._ranks if self.even_batches else 0
        whole = group[0].batch
        if len(group) > 1 or missing:
            take = take_from(group + start * missing, careful=False) or take_from(group, careful=False)
            if len(group) > 1 and take is None:
                raise ConfigError(
                    "slice_fn_for_dispatch gets the batches of all ranks as one, and these cannot be joined. Write "
                    "split_batches=True, where it gets each batch as it is, or leave it out: then each rank gets whole "
                    "batches."
                )
            whole = whole if take is None else take(slice(0, real + missing))
        parts = [
            cut(whole, slice(first, end), process_index=rank, num_processes=self._ranks) if first < end else None
            for rank, (first, end) in enumerate(part_bounds(real, self._ranks, even=self.even_batches))
        ]
        rows = [0 if part is None else count_rows(part) or 0 for part in parts]
        return parts, rows_of_ranks(real, rows) if real % self._ranks else None

    def _message(self, parts: list[Any], end: list[GroupRows] | None) -> _Message:
        layouts, tensors = [], []
        stays = 0 if self.collectives.num_sharing == 1 else None  # the rank whose part does not travel
        for rank, part in enumerate(parts):
            layout, inside = pack(part) if rank != stays and part is not None else (BatchLayout(None), [])
            layouts.append(layout)
            tensors.append(inside)
        return _Message(parts, end, layouts, tensors, super().read_state())


class DataLoaderDispatcher(DataLoaderShard):
    """A user's loader, prepared so that rank 0 reads all data and sends the others their part.

    Args:
        dataset: the user's, whole.
        collectives: carries the parts; by default there are no others.
        split_batches: cut each batch into parts; otherwise each rank gets a batch.
        even_batches: fill up the last parts with rows from the start, so that all ranks have equally many.
        slice_fn: cuts a batch: called with the batch, a slice, ``process_index`` and ``num_processes``.
        reader: made by `prepare_data_loader`, in place of one with the four arguments above.
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
        reader: Callable[..., Reader] | None = None,
        **kwargs: Any,
    ) -> None:
        reader = reader or partial(
            DispatchingReader,
            collectives=collectives,
            split_batches=split_batches,
            even_batches=even_batches,
            slice_fn=slice_fn,
            bring_back=kwargs.get("device") is None,
        )
        super().__init__(dataset, reader=reader, **kwargs)


def _header(message: _Message | None, failure: Exception | None) -> Any:
    """Return what ranks need before they receive bytes: sizes and layouts, an error as text, or None at the end."""
    if failure is not None:
        return f"{type(failure).__name__}: {failure}"
    return None if message is None else (message.row_bytes, message.layouts, message.end)
