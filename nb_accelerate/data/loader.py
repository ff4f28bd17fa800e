"""The loader that a rank iterates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from nb_accelerate.data.iterable import LastBatch
from nb_accelerate.data.tracker import LoaderTracker
from nb_accelerate.nested import find_batch_size, send_to_device, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class DataLoaderShard(DataLoader[Any]):
    """A user's loader, prepared. Made by `prepare_data_loader`; all else is as in `torch.utils.data.DataLoader`.

    It looks one batch ahead, so that while a batch is used it is known whether it is the last.

    Args:
        dataset: the user's, or this rank's part of an iterable one.
        device: where batches go; None leaves them where they are.
        tracker: told when an epoch begins and ends.
        on_start: called before each epoch.
        last_group_rows: asked after the last batch how many rows of the last group are real; None means all.
        last_group_items: likewise, for loaders whose items are batches by themselves.
        rows: of the user's dataset; None if it does not say.
        total_batch_size: rows of all ranks together in one step.
        even: whether all ranks get equal batches.
        non_blocking: do not wait for copies to the device; batches are then sent there one ahead.
        **kwargs: those of `torch.utils.data.DataLoader`.

    Attributes:
        end_of_dataloader: whether the batch handed out is the last.
        remainder: real rows in the last batch of all ranks together; 0 if all are, -1 if not known yet.
        batch_remainder: the same for the current batch; None if all its rows are real.
        rows_on_rank: rows of the current batch on this rank; set together with ``batch_remainder``.
        iteration: epochs begun.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None = None,
        tracker: LoaderTracker | None = None,
        on_start: Callable[[], None] | None = None,
        last_group_rows: Callable[[], int | None] | None = None,
        last_group_items: Callable[[], int | None] | None = None,
        rows: int | None = None,
        total_batch_size: int | None = None,
        even: bool = True,
        non_blocking: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.even = even
        self.end_of_dataloader = False
        self.remainder = -1
        self.batch_remainder: int | None = None
        self.rows_on_rank = 0
        self.iteration = 0
        self._tracker = tracker or LoaderTracker()
        self._on_start = on_start
        self._last_group_rows = last_group_rows
        self._last_group_items = last_group_items
        self._rows = rows
        self._total_batch_size = total_batch_size
        self._non_blocking = non_blocking

    @property
    def total_batch_size(self) -> int:
        """Rows of all ranks together in one step.

        Raises:
            TypeError: batches of this loader have no fixed size.
        """
        if self._total_batch_size is None:
            raise TypeError("the batches of this loader have no fixed size")
        return self._total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Rows of the whole dataset, before it was shared out.

        Raises:
            TypeError: the dataset does not say how long it is.
        """
        if self._rows is None:
            raise TypeError(f"{type(self.dataset).__name__} does not say how long it is")
        return self._rows

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and dataset which epoch comes, those that want to know."""
        self.iteration = epoch
        outer: Any = self.batch_sampler
        inner = getattr(outer, "batch_sampler", None)
        innermost = getattr(outer if inner is None else inner, "sampler", None)
        seen: list[Any] = []
        things: tuple[Any, ...] = (outer, inner, innermost, self.sampler, self.dataset)
        for thing in things:
            if hasattr(thing, "set_epoch") and not any(thing is other for other in seen):
                seen.append(thing)
                thing.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, so that leaving the loop is seen
        self.end_of_dataloader = False
        self.batch_remainder = None
        if self._on_start is not None:
            self._on_start()
        self._tracker.begin(self)
        try:
            source = iter(super().__iter__())
            self.iteration += 1
            try:
                current = next(source)
            except StopIteration:
                return
            place = self._placement(current)
            # Copies that nobody waits for start as early as possible; others as late as possible, so that only one
            # batch at a time takes the memory of the device.
            ahead, late = (place, None) if self._non_blocking else (None, place)
            if ahead is not None:
                current = ahead(current)
            for upcoming in source:
                if type(current) is LastBatch:  # of one worker of several; others go on
                    current = self._open(current)
                    yield current if late is None else late(current)
                    self.batch_remainder = None
                else:
                    yield current if late is None else late(current)
                current = upcoming if ahead is None else ahead(upcoming)
            self.end_of_dataloader = True
            current = self._open(current) if type(current) is LastBatch else self._mark(current)
            yield current if late is None else late(current)
        finally:
            self._tracker.end(self)

    def _placement(self, first: Any) -> Callable[[Any], Any] | None:
        """Return what moves batches to the device; None if the first is there already and so nothing has to move.

        Only the CPU is believed to be where all batches are if the first is: datasets live there.
        """
        device, non_blocking = self.device, self._non_blocking
        if device is None:
            return None
        first = first.batch if type(first) is LastBatch else first
        movable = not isinstance(first, (dict, list, tuple, torch.Tensor)) and hasattr(first, "to")
        if device.type == "cpu" and not movable and all(tensor.device.type == "cpu" for tensor in tensors_in(first)):
            return None

        def place(batch: Any) -> Any:
            if type(batch) is LastBatch:
                return LastBatch(send_to_device(batch.batch, device, non_blocking=non_blocking), batch.real, batch.rows)
            return send_to_device(batch, device, non_blocking=non_blocking)

        return place

    def _open(self, marked: LastBatch) -> Any:
        """Take a batch of an incomplete group out of its wrapping and note how many of its rows are real."""
        rows = marked.rows if self._last_group_items is None else find_batch_size(marked.batch) or 1
        real = marked.real if self._last_group_items is None else marked.real * rows
        self.remainder = self.batch_remainder = real
        self.rows_on_rank = rows
        return marked.batch

    def _mark(self, batch: Any) -> Any:
        """Note, at the last batch, how many rows of its group are real."""
        rows = self._last_group_rows and self._last_group_rows()
        items = self._last_group_items and self._last_group_items()
        if rows is not None:
            self.rows_on_rank = find_batch_size(batch) or 0
            self.batch_remainder = rows
        elif items is not None:
            self.rows_on_rank = find_batch_size(batch) or 1
            self.batch_remainder = items * self.rows_on_rank
        self.remainder = self.batch_remainder or 0
        return batch
