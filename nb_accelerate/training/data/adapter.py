"""A data loader with a position, which can be saved and restored, and which can begin in the middle of an epoch."""

from __future__ import annotations

import contextlib
import copy
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader

from nb_accelerate.training.data.plan.samplers import innermost_sampler, replace_sampler
from nb_accelerate.training.data.reading.reader import Reader
from nb_accelerate.training.data.resuming.epochs import EpochCounter, EpochProgress
from nb_accelerate.training.data.resuming.orders import Order, numbers_of, order_of, shuffles
from nb_accelerate.training.data.resuming.stateful import loader_class, source_of, stateful_class
from nb_accelerate.training.process import rng
from nb_accelerate.training.process.devices import device_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from nb_accelerate.training.data.resuming.positions import SavedPosition


class DataLoaderAdapter(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` with a position. Prepared loaders are of this class.

    It has the attributes of the loader of torch that reads, `base_dataloader`; setting one of them changes that loader.

    Args:
        dataset: as for a DataLoader.
        use_stateful_dataloader: read with a loader of torchdata, which also saves the state of a dataset that has one.
            The loader is then one of torchdata's class too.
        batch_sampler: as for a DataLoader.
        skip_batches: batches to read and leave out at the beginning of every epoch. `skipping` does not read those of a
            dataset that is read by number.
        reader: called with a `TorchSource` and ``dropped=skip_batches``; returns the `Reader` of this rank's batches.
        **kwargs: those of a DataLoader.

    Attributes:
        dl_state_dict: what `state_dict` returned last.
        epochs: counts epochs, those of loaders that `skipping` returned included.

    Raises:
        MissingDependencyError: a stateful loader is asked for, and torchdata is not installed.
    """

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        *,
        skip_batches: int = 0,
        reader: Callable[..., Reader] = Reader,
        **kwargs: Any,
    ) -> None:
        loader = loader_class(stateful=use_stateful_dataloader)(dataset, batch_sampler=batch_sampler, **kwargs)
        if use_stateful_dataloader:
            self.__class__ = cast("type[Self]", stateful_class(cast("Any", type(self))))
        self._reader = reader(source_of(loader), dropped=skip_batches)
        self.epochs = EpochCounter(loader.batch_sampler, loader.sampler, dataset)
        self.dl_state_dict: dict[str, Any] = {}
        self._progress = EpochProgress(self._reader, 0)
        self._loaded: SavedPosition | None = None  # where the next epoch begins, if a position was loaded

    # Attributes of torch's DataLoader are read from, and set on, the loader that reads, so that both never differ.

    def __getattr__(self, name: str) -> Any:
        reader = self.__dict__.get("_reader")
        if reader is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(reader.source.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        reader = None if name in own else own.get("_reader")
        if reader is not None and name in reader.source.loader.__dict__:
            setattr(reader.source.loader, name, value)
        else:
            object.__setattr__(self, name, value)

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The loader of torch, or of torchdata, that reads."""
        return self._reader.source.loader

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler in the batch sampler, as a DataLoader has it that was not given a batch sampler."""
        inner = getattr(self.batch_sampler, "sampler", None)
        return self.base_dataloader.sampler if inner is None else inner

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether this loader is one of torchdata's."""
        return self._reader.source.is_stateful

    @property
    def skip_batches(self) -> int:
        """Batches left out at the beginning of every epoch, read or not."""
        return self._reader.skipped

    @property
    def left_out_by_reading(self) -> int:
        """Batches at the beginning of every epoch that are read, but not yielded."""
        return self._reader.dropped

    @property
    def position(self) -> int:
        """Batches of the epoch that were handed out or left out so far; 0 when it is over."""
        return self._progress.position

    def skipping(self, batches: int) -> Self:
        """Return a loader that leaves out the first batches of this rank in every epoch.

        Both loaders use the same samplers and count epochs together. Rows of an iterable dataset are read to be left
        out, others are not.
        """
        later = copy.copy(self)
        later._reader = self._reader.starting_at(batches)  # noqa: SLF001 - this class
        later._progress = EpochProgress(later._reader, 0)  # noqa: SLF001 - this class
        later._loaded = None  # noqa: SLF001 - this class
        later.dl_state_dict = {}
        return later

    @property
    def iteration(self) -> int:
        """Number of epochs that were begun; `set_epoch` sets it."""
        return self.epochs.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.epochs.epoch = epoch

    @property
    def epoch_and_batch(self) -> tuple[int, int]:
        """The epoch it is in, from 0, and the batches of that so far; between epochs the next one, and 0."""
        if self._loaded is not None and self._loaded.position:  # and not begun yet
            return self.iteration, self._loaded.position
        current = self.epochs.current
        if current is None or not current.position:
            return self.iteration, 0
        return current.epoch, current.position

    @property
    def _first_position(self) -> int:
        """Position at which the next epoch begins."""
        loaded = self._loaded
        return loaded.position if loaded is not None and loaded.position else self._reader.skipped

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next, also of samplers and datasets that have a ``set_epoch``."""
        self.epochs.set(epoch)

    def get_sampler(self) -> Any:
        """Return the sampler that decides the order of rows, without wrappers; None if there is none."""
        return innermost_sampler(self._reader.source.sampler)

    def set_sampler(self, sampler: Any) -> None:
        """Read rows in another order, from the next epoch on. All ranks call it with the same sampler.

        Args:
            sampler: replaces what `get_sampler` returns.

        Raises:
            ConfigError: the loader has no sampler that could be replaced.
        """
        replace_sampler(self._reader.source.sampler, sampler)
        self.epochs.listen(self.batch_sampler, self.sampler, self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch that was handed out last, for `load_state_dict`."""
        self.dl_state_dict = self._state()
        self.adjust_state_dict_for_prefetch()
        return self.dl_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next epoch at a position.

        Rows of a dataset that is read by number are left out without being read. Random samplers draw the order of that
        epoch again.

        Args:
            state_dict: what `state_dict` returned. Loaders of torchdata also take what torchdata's own returned, as of
                the first epoch; then call `set_epoch` if it was another.

        Raises:
            CheckpointError: ``state_dict`` is not the position of such a loader.
        """
        saved = self._reader.source.decode(state_dict, self._reader.per_batch)
        order = Order.decoded(saved.order) if saved.order else None
        self.set_epoch(saved.epoch)
        if order is not None:
            self.draw_again(order)
        self._loaded = saved
        self._reader.restore(saved)

    def order(self) -> Order | None:
        """Return what draws the order of the epoch that it is in, or of the next one; None if nothing does."""
        _, position = self.epoch_and_batch
        saved = self.epochs.saved_order if self._loaded is not None else None
        last = self.epochs.current or self._progress
        return saved or order_of(self.base_dataloader, last.began if position else None)

    def draw_again(self, order: Order) -> None:
        """Draw the order of the epoch that comes next as it was drawn before, if its first batches are left out.

        Args:
            order: what `order` returned in that epoch; or between epochs, for the next one.
        """
        order.put_back(self.base_dataloader)
        self.epochs.saved = self.iteration, order

    def adjust_state_dict_for_prefetch(self) -> None:
        """Change ``dl_state_dict`` before `state_dict` returns it. Does nothing; subclasses may override it."""

    def _state(self) -> dict[str, Any]:
        epoch, position = self.epoch_and_batch
        drawn = self.order()
        order = {} if drawn is None else drawn.encoded()
        if self._loaded is not None:
            return self._reader.source.encode(
                replace(self._loaded, epoch=epoch, position=position, order=order), self._reader.per_batch
            )
        last = self.epochs.current or self._progress  # of another loader if the beginning of the epoch is left out
        return last.reader.saved(last.read_state, epoch=epoch, position=position, order=order)

    def leave_epoch(self) -> None:
        """Count the epoch that was begun as over, though not all of its batches were handed out."""
        self._progress.position = 0
        self._progress.read_state = self._progress.reader.end_state()

    def __len__(self) -> int:
        return len(self._reader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, so that its position is counted
        self.epochs.announce()
        progress, batches = self._begin()
        try:
            for batch in batches:
                progress.position += 1
                progress.read_state = progress.reader.read_state()
                yield batch
            progress.position = 0
            progress.read_state = progress.reader.end_state()
        finally:
            self._end(progress)

    def _begin(self) -> tuple[EpochProgress, Iterator[Any]]:
        """Begin an epoch: return its progress, and its batches without the skipped ones."""
        reader, position = self._reader, self._first_position
        loaded, self._loaded = self._loaded, None
        resumed = loaded is not None and loaded.position > 0
        if resumed and not reader.source.is_restored:
            # Without a saved sampler state, batches before the position need not be drawn.
            reader = reader.starting_at(max(position - reader.skipped, 0))
        progress = EpochProgress(reader.for_one_pass(), position, self.epochs.epoch)
        repeat = 0 if loaded is None else loaded.repeat
        loader, order = self.base_dataloader, self.epochs.saved_order if position else None
        # torch draws a random number when reading begins, and rows that are left out may draw some when they are read.
        # A resumed epoch drew them before it was saved, so later draws (dropout) must not be shifted by drawing again.
        # Where it is known by its seed alone, as in scripts, it draws what a whole epoch draws.
        as_whole = not position or (order is None and shuffles(loader))
        with contextlib.ExitStack() as stack:
            if self._progress.is_running:  # a loop inside of a loop, which does not take its persistent workers away
                base: Any = reader.source.loader
                stack.callback(setattr, base, "_iterator", base._iterator)  # noqa: SLF001 - torch's
                base._iterator = None  # noqa: SLF001 - torch's
            if not as_whole:
                cpu = device_kind("cpu")
                stack.callback(rng.restore, rng.capture(cpu), cpu)
            if order is not None:
                stack.enter_context(order.again(loader))
            progress.began = numbers_of(loader) if as_whole or order is not None else None
            self._start()
            batches = progress.reader.read(self.epochs.epoch, resumed=resumed, repeat=repeat)
            # A sampler draws when a batch is asked for, and the loop had asked for one more than it was given.
            first = [] if order is None else list(itertools.islice(batches, 1))
        self.epochs.begins(progress)
        progress.loader = self
        self._progress = progress
        return progress, itertools.chain(first, batches) if first else batches

    def _start(self) -> None:
        """Prepare an epoch, before anything is drawn for it. Subclasses override it."""

    def _end(self, progress: EpochProgress) -> None:
        """Note that an epoch is over, or that its loop was left."""
        progress.loader = None
        self.epochs.ends(progress)
        outer = progress.outer
        while outer is not None and outer.loader is not self:
            outer = outer.outer
        if outer is not None and self._progress is progress:
            self._progress = outer
