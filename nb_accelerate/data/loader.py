"""The loader that a rank iterates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from typing_extensions import override

from nb_accelerate.board import Phase, here
from nb_accelerate.data.adapter import DataLoaderAdapter
from nb_accelerate.data.iterable import LastBatch
from nb_accelerate.data.rows import count_rows
from nb_accelerate.data.tracker import DataLoaderStateMixin, LoaderView
from nb_accelerate.errors import ConfigError
from nb_accelerate.process.rng import RNGType
from nb_accelerate.pytree import find_batch_size, map_tensors, send_to_device, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nb_accelerate.data.tracker import HasTracker, LoaderTracker


class Share(Protocol):
    """What decides which rows are this rank's: a sampler's shard, or that of an iterable dataset."""

    even_batches: bool
    """Whether all ranks get equal batches."""

    def real_rows(self, rows_on_rank: int) -> int | None:
        """Return how many rows of the last group are real, or None if all are. Asked after the last batch."""
        ...


class DataLoaderShard(DataLoaderStateMixin, DataLoaderAdapter):
    """A user's loader, prepared. Made by `prepare_data_loader`; all else is as in `torch.utils.data.DataLoader`.

    It looks one batch ahead, so that while a batch is used it is known whether it is the last.

    Args:
        dataset: the user's, or this rank's part of an iterable one.
        device: where batches go; None leaves them where they are.
        gradient_state: has the tracker that is told when an epoch begins and ends; one of its own by default.
        rng_types: which random numbers get the state of rank 0's before each epoch.
        on_start: called before each epoch, to that end.
        share: what decides which rows are this rank's; None if all are.
        rows: of the user's dataset; None if it does not say.
        total_batch_size: rows of all ranks together in one step.
        items_are_batches: the user's loader has no batch size: what it reads are batches by themselves.
        non_blocking: do not wait for copies to the device; batches are then sent there one ahead.
        prepared: whether its rows are shared out between ranks; `prepare_data_loader` does it if they are not.
        **kwargs: those of `DataLoaderAdapter`.

    Attributes:
        end_of_dataloader: whether the batch handed out is the last.
        remainder: real rows in the last batch of all ranks together; 0 if all are, -1 if not known yet.
        batch_remainder: the same for the current batch; None if all its rows are real.
        rows_on_rank: rows of the current batch on this rank; set together with ``batch_remainder``.
        rows_of_ranks: those of all ranks, if batches have no fixed size and ranks have different numbers.
        gradient_state: where the loop is in its loaders, and of an `Accelerator`, in its accumulation window.
    """

    batch_remainder: int | None = None
    rows_on_rank: int | None = None
    rows_of_ranks: tuple[int, ...] | None = None
    _looks_ahead = True

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None = None,
        gradient_state: HasTracker | None = None,
        rng_types: Sequence[RNGType] = (),
        on_start: Callable[[], None] | None = None,
        share: Share | None = None,
        rows: int | None = None,
        total_batch_size: int | None = None,
        items_are_batches: bool = False,
        non_blocking: bool = False,
        prepared: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.prepared = prepared
        self._share = share
        self.gradient_state = gradient_state or LoaderView()
        self._tracker = self.gradient_state.tracker
        self._rng_types = rng_types
        self._on_start = on_start
        self._rows = rows
        self._total_batch_size = total_batch_size
        self._items_are_batches = items_are_batches
        self._non_blocking = non_blocking
        self._arguments |= {
            "device": device,
            "gradient_state": self.gradient_state,
            "rng_types": rng_types,
            "on_start": on_start,
            "share": share,
            "rows": rows,
            "total_batch_size": total_batch_size,
            "items_are_batches": items_are_batches,
            "non_blocking": non_blocking,
            "prepared": prepared,
        }

    @property
    def even(self) -> bool:
        """Whether all ranks get equal batches at the end of the data."""
        return self._share is None or self._share.even_batches

    @even.setter
    def even(self, value: bool) -> None:
        if self._share is not None:
            self._share.even_batches = value

    @property
    def rng_types(self) -> list[RNGType]:
        """Which random numbers get the state of rank 0's before each epoch, as far as there are such."""
        generator = self.synchronized_generator
        return [kind for kind in self._rng_types if kind is not RNGType.GENERATOR or generator is not None]

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator of the sampler or dataset that is among these; None if there is none."""
        called = (self._on_start, getattr(self._share, "on_start", None))
        found = (getattr(one, "generator", None) for one in called)
        return next((generator for generator in found if generator is not None), None)

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

    @override
    def reset(self) -> None:
        super().reset()
        self.batch_remainder = self.rows_of_ranks = None

    @override
    def begin(self) -> None:
        self.reset()
        self._tracker.begin(self)

    def track(self, tracker: LoaderTracker) -> None:
        """Tell this tracker, from now on, when an epoch begins and ends. Called by ``prepare``."""
        self._tracker = tracker

    @override
    def _tracked_by(self) -> LoaderTracker:
        return self._tracker

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, so that leaving the loop is seen
        self.reset()
        if self._on_start is not None:
            self._on_start()
        self._epochs.announce()
        self.begin()
        board = here()
        enter, step = board.enter, board.step
        evaluates = not torch.is_grad_enabled()
        reads, works = Phase.DATA, Phase.EVALUATING if evaluates else Phase.FORWARD
        loop = board.begin_loop(
            total=self._total_steps(),
            rows=self._total_batch_size,
            epoch=self.iteration + 1,
            evaluates=evaluates,
            step=self.skip_batches if self._resume_at is None else self._resume_at,
        )
        enter(reads)
        try:
            source = self._begin()
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
            position = self.position
            state = vars(self)  # a DataLoader looks at every attribute that is set, at a microsecond each
            for upcoming in source:
                position += 1
                state["position"] = position
                step(position)
                enter(works)
                if type(current) is LastBatch:  # of one worker of several; others go on
                    current = self._open(current)
                    yield current if late is None else late(current)
                    self.batch_remainder = self.rows_of_ranks = None
                else:
                    yield current if late is None else late(current)
                current = upcoming if ahead is None else ahead(upcoming)
                enter(reads)
            self.end_of_dataloader = True
            self.position = 0
            step(position + 1)
            enter(works)
            current = self._open(current) if type(current) is LastBatch else self._mark(current)
            yield current if late is None else late(current)
        finally:
            board.end_loop(loop)
            self.end()

    def extent(self) -> tuple[int, int] | None:
        """Return rows of the dataset and batches of this rank, if they have to be alike on all ranks; else None."""
        if not self.even or self._rows is None:
            return None
        batches = self._known_length()
        return None if batches is None else (self._rows, batches)

    def _total_steps(self) -> int | None:
        """Return how many batches an epoch has, those left out at its beginning included; None if not known."""
        batches = self._known_length()
        return None if batches is None else batches + self.skip_batches

    def _known_length(self) -> int | None:
        """Return the length of this loader if it has one.

        torch takes a length that was asked for as a promise, and warns for each batch beyond it: here nobody asked.
        """
        asked = self._IterableDataset_len_called
        try:
            return len(self)
        except Exception:  # a dataset's own, as when the loader was prepared
            return None
        finally:
            self._IterableDataset_len_called = asked

    def _placement(self, first: Any) -> Callable[[Any], Any] | None:
        """Return what moves batches to the device; None if the first is there already and so nothing has to move.

        Only the CPU is believed to be where all batches are if the first is: datasets live there.
        """
        device, non_blocking = self.device, self._non_blocking
        if device is None:
            return None
        first = first.batch if type(first) is LastBatch else first
        leaves: list[Any] = []
        map_tensors(leaves.append, first, movable=True)
        if device.type == "cpu" and all(
            isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" for leaf in leaves
        ):
            return None

        def place(batch: Any) -> Any:
            if type(batch) is LastBatch:
                return replace(batch, batch=send_to_device(batch.batch, device, non_blocking=non_blocking))
            try:
                return send_to_device(batch, device, non_blocking=non_blocking)
            except NotImplementedError as error:  # a device that cannot be copied from
                places = {str(tensor.device) for tensor in tensors_in(batch)}
                raise ConfigError(
                    f"A batch with tensors on {', '.join(sorted(places))} could not be moved to {device}: {error} Let "
                    "the dataset and collate_fn make all tensors on the CPU; batches are moved to the device here."
                ) from error

        return place

    def _open(self, marked: LastBatch) -> Any:
        """Take a batch of an incomplete group out of its wrapping and note how many of its rows are real."""
        rows, real = marked.rows, marked.real
        if self._items_are_batches:
            rows = find_batch_size(marked.batch) or 1
            real *= rows
        self.remainder = self.batch_remainder = real
        self.rows_on_rank = rows
        self.rows_of_ranks = marked.rows_of_ranks
        return marked.batch

    def _mark(self, batch: Any) -> Any:
        """Note, at the last batch, how many rows of its group are real."""
        share = self._source_loader._share  # noqa: SLF001 - this class
        if share is not None:
            rows = (find_batch_size(batch) if self._items_are_batches else count_rows(batch)) or 0
            rows = rows or int(self._items_are_batches)
            self.batch_remainder = share.real_rows(rows)
            self.rows_on_rank = rows
            self.rows_of_ranks = getattr(share, "last_rows_of_ranks", None)
        else:
            self.rows_on_rank = count_rows(batch)
        self.remainder = self.batch_remainder or 0
        return batch
