"""The loader that a rank iterates.

A batch goes forward through these steps::

    read -> look ahead -> note what is known of the last group -> place on the device -> yield

`training.data.reading.reader` reads; the steps after that are those of `DataLoaderShard.__iter__`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.base.devices import find_kind
from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.training.data.adapter import DataLoaderAdapter
from nb_accelerate.training.data.epoch_guess import epoch_of
from nb_accelerate.training.data.loops import DataLoaderStateMixin, LoaderView
from nb_accelerate.training.data.reading.iterable import LastBatch
from nb_accelerate.training.process import context
from nb_accelerate.training.process.rng import RNGType
from nb_accelerate.training.pytree import is_on, send_to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nb_accelerate.training.data.loops import RunningLoops
    from nb_accelerate.training.data.resuming.epochs import EpochProgress


_READING, _EVALUATING = Phase.DATA, Phase.EVALUATING  # Python 3.11 looks members of an enum up slowly

_END = object()  # stands for the batch after the last


class DataLoaderShard(DataLoaderStateMixin, DataLoaderAdapter):
    """A `torch.utils.data.DataLoader` that yields the batches of one rank. Made by `prepare_data_loader`.

    It reads one batch ahead, to know while a batch is used whether it is the last. accelerate reads ahead as well, so
    random augmentations draw the same numbers.

    Args:
        dataset: the user's, or this rank's part of an iterable one.
        device: where batches go; None leaves them where they are.
        gradient_state: has the `RunningLoops` that are told when an epoch begins and ends; a new one by default.
        rng_types: which random states are set to those of rank 0 before each epoch.
        on_start: called before each epoch to set them.
        rows: length of the user's dataset; None if it has none.
        total_batch_size: rows of all ranks together in one step.
        non_blocking: do not wait for copies to the device; batches are then sent there one ahead.
        prepared: whether its rows are divided among ranks already, so that `prepare_data_loader` returns it as it is.
        **kwargs: those of `DataLoaderAdapter`.

    Attributes:
        gradient_state: the position of the loop in its loaders and, of an `Accelerator`, in its accumulation window.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None = None,
        gradient_state: LoaderView | None = None,
        rng_types: Sequence[RNGType] = (),
        on_start: Callable[[], None] | None = None,
        rows: int | None = None,
        total_batch_size: int | None = None,
        non_blocking: bool = False,
        prepared: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.prepared = prepared
        self.gradient_state = gradient_state or LoaderView()
        self._loops = self.gradient_state.loops
        self._rng_types = rng_types
        self._on_start = on_start
        self._rows = rows
        self._total_batch_size = total_batch_size
        self._non_blocking = non_blocking

    @property
    def even(self) -> bool:
        """Whether all ranks get equal batches at the end of the data."""
        return self._reader.even

    @even.setter
    def even(self, value: bool) -> None:
        self._reader.even = value

    @property
    def rng_types(self) -> list[RNGType]:
        """Which random states are set to those of rank 0 before each epoch, without generators that do not exist."""
        generator = self.synchronized_generator
        return [kind for kind in self._rng_types if kind is not RNGType.GENERATOR or generator is not None]

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator of the sampler or dataset that is set to the state of rank 0's; None if there is none."""
        called = (self._on_start, getattr(self._reader.shard, "on_start", None))
        generators = (getattr(sync, "generator", None) for sync in called)
        return next((generator for generator in generators if generator is not None), None)

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

    @property
    @override
    def end_of_dataloader(self) -> bool:  # type: ignore[override]  # set by the epoch that is in progress
        """Whether the batch handed out is the last."""
        return self._progress.end_of_dataloader

    @property
    @override
    def remainder(self) -> int:  # type: ignore[override]  # likewise
        """Real rows (not copies) in the last batch of all ranks together; 0 if all are real, -1 if not known."""
        return self._progress.remainder

    @property
    def batch_remainder(self) -> int | None:
        """Real rows in the current batch of all ranks together; None if all its rows are real."""
        rows = self._progress.rows
        return None if rows is None else rows.real

    @override
    def _start(self) -> None:
        if self._on_start is not None:
            self._on_start()

    def track(self, loops: RunningLoops) -> None:
        """Report epochs to these from now on. Called by ``prepare``."""
        self._loops = loops

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, so that leaving the loop is seen
        # Four are told that an epoch begins, in this order: samplers and datasets (`announce`), the progress page, the
        # counter of epochs (in `_begin`), and the running loops, by which accumulation windows close.
        evaluates = not torch.is_grad_enabled()
        self.epochs.announce()
        page = here()
        enter, step = page.enter, page.step
        begin_work = partial(enter, _EVALUATING) if evaluates else page.begin_work
        if page.is_read and not evaluates:
            page.guess_epoch(epoch_of(sys._getframe(1)))  # noqa: SLF001 - as `warnings` does
        num_batches = self._known_length()
        loop = page.begin_loop(
            total=None if num_batches is None else num_batches + self.skip_batches,
            rows=self._total_batch_size,
            epoch=self.iteration + 1,
            evaluates=evaluates,
            step=self._first_position,
            num_workers=self._reader.source.loader.num_workers,
        )
        enter(_READING)
        progress, loops = None, self._loops
        try:
            progress, reading = self._begin()
            loops.begin(progress)
            if progress.reader.source.is_stateful:
                reading = _with_read_states(reading, progress)
            current = next(reading, _END)
            if current is _END:
                return
            kind = None if self.device is None else find_kind(self.device.type)
            end_step = None if kind is None or kind.end_step is None else kind.end_step()
            place_at_yield = place = _placement(current, self.device, non_blocking=self._non_blocking)
            if (rehearsal := context.rehearsal()) is not None:
                place_at_yield = place = rehearsal.placement(place)
            if place is not None and self._non_blocking:
                # Asynchronous copies start as early as possible; others as late as possible, so that only one batch at
                # a time takes memory of the device.
                place_at_yield = None
                current, reading = place(current), map(place, reading)
            position = progress.position
            for upcoming in chain(reading, (_END,)):
                position += 1
                if upcoming is _END:
                    progress.end_of_dataloader = True
                    progress.position = 0
                    current = progress.reader.with_rows(current)
                else:
                    progress.position = position
                # Another loop is active if it advances together with this one (`zip`), or was left unclosed inside it.
                if loops.active is not progress:
                    loops.advance(progress)
                step(position)
                begin_work()
                # One of several workers may be at its end, and mark its last batch, before the others are.
                if type(current) is LastBatch:
                    progress.rows, current = current.rows, current.batch
                else:
                    progress.rows = None
                yield current if place_at_yield is None else place_at_yield(current)
                if end_step is not None:
                    end_step(position, current)
                current = upcoming
                if upcoming is not _END:
                    enter(_READING)
        finally:
            page.end_loop(loop)
            if progress is not None:
                self._end(progress)
                loops.end(progress)

    def extent(self) -> tuple[int, int] | None:
        """Return the rows of the dataset and the batches of this rank, or None if ranks may differ in them."""
        batches = self._known_length() if self._reader.compares_lengths else None
        return None if batches is None or self._rows is None else (self._rows, batches)

    def _known_length(self) -> int | None:
        """Return the length of this loader if it has one."""
        # len() sets this flag, which makes torch warn about longer iterables; it is restored, because the user did not
        # call len().
        loader = self._reader.source.loader
        len_called = loader._IterableDataset_len_called  # noqa: SLF001 - torch's
        try:
            return len(self._reader)
        except Exception:  # a dataset's own, as when the loader was prepared
            return None
        finally:
            loader._IterableDataset_len_called = len_called  # noqa: SLF001 - torch's


def _with_read_states(batches: Iterator[Any], progress: EpochProgress) -> Iterator[Any]:
    """Yield batches; store in ``progress``, before each is read, the state of reading after the one handed out last."""
    reader = progress.reader
    while True:
        progress.read_state = reader.read_state()
        try:
            batch = next(batches)
        except StopIteration:
            progress.read_state = reader.end_state()
            return
        yield batch


def _placement(first: Any, device: torch.device | None, *, non_blocking: bool) -> Callable[[Any], Any] | None:
    """Return a function that moves batches to a device, or None if batches are there already."""
    # If the first batch is on the CPU, and that is the device, later ones are taken to be there too.
    if device is None:
        return None
    if device.type == "cpu":
        if is_on(first.batch if type(first) is LastBatch else first, device):
            return None
        non_blocking = False  # the batch would be read before it has come from its device

    def place(batch: Any) -> Any:
        if type(batch) is LastBatch:
            return replace(batch, batch=send_to_device(batch.batch, device, non_blocking=non_blocking))
        return send_to_device(batch, device, non_blocking=non_blocking)

    return place
