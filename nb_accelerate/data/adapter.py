"""A loader that knows its position: leaves out the beginning of an epoch, saves where it is, goes on from there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from nb_accelerate.data.epochs import EpochCounter, numbers_kept
from nb_accelerate.data.samplers import put_sampler, sampler_inside
from nb_accelerate.data.skipping import skipping
from nb_accelerate.data.stateful import is_stateful, stateful
from nb_accelerate.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


class DataLoaderAdapter(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` with a position. Prepared loaders are of this class.

    Args:
        dataset: as for a DataLoader.
        use_stateful_dataloader: make a loader of torchdata, which also saves the state of a dataset that has one. Give
            it by name.
        batch_sampler: as for a DataLoader.
        skip_batches: batches to leave out at the beginning of every epoch. Those of an iterable dataset are read,
            others are not.
        epochs: counts epochs; loaders over the same samplers share one.
        **kwargs: those of a DataLoader.

    Attributes:
        skip_batches: batches left out at the beginning of every epoch, by whatever means.
        position: batches of the epoch that were handed out or left out so far; 0 when it is over.
        dl_state_dict: what `state_dict` returned last.

    Raises:
        MissingDependencyError: a stateful loader is asked for, and torchdata is not installed.
    """

    _looks_ahead = False
    """Whether one more batch is read than was handed out."""

    _reads_itself = True
    """Whether this process reads the data; otherwise another one sends it."""

    def __new__(cls, *_args: Any, use_stateful_dataloader: bool = False, **_kwargs: Any) -> Self:
        """Return a new loader, of a subclass built on torchdata's if it is to be stateful."""
        if not use_stateful_dataloader:
            return super().__new__(cls)
        kind: Any = cls
        return cast("Self", super().__new__(stateful(kind)))

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        *,
        skip_batches: int = 0,
        epochs: EpochCounter | None = None,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader and not is_stateful(self):
            raise ConfigError("use_stateful_dataloader was given by its place. Write use_stateful_dataloader=True.")
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        self.skip_batches = skip_batches
        self.position = 0
        self.dl_state_dict: dict[str, Any] = {}
        self._dropped = skip_batches  # those that are left out after they were read
        self._reread = 0  # batches that are read first and not handed out, to fill up an incomplete end
        self._repeat = 0  # batches to leave out once, after reading was taken up where a state says
        self._resume_at: int | None = None  # where the next epoch begins, if a position was loaded
        # What reads the rest of the current epoch, if it was resumed in its middle.
        self._rest: DataLoaderAdapter | None = None
        self._epochs = epochs or EpochCounter(self.batch_sampler, self.sampler, dataset)
        self._arguments = {
            "dataset": dataset,
            "batch_sampler": batch_sampler,
            "skip_batches": skip_batches,
            "epochs": self._epochs,
            **kwargs,
        }

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether this loader is one of torchdata's."""
        return is_stateful(self)

    @property
    def base_dataloader(self) -> Self:
        """The loader that reads: this one. accelerate's is wrapped around another."""
        return self

    def skipping(self, batches: int) -> Self:
        """Return a loader that leaves out the first batches of every epoch, and shares all else with this one.

        Samplers stay the same, so that an epoch of one is an epoch of the other.

        Args:
            batches: how many of this rank's batches to leave out.
        """
        return self._later(batches * self._read_per_batch(), self.skip_batches + batches)

    def _later(self, reads: int, skip: int) -> Self:
        """Return a loader that leaves out more batches of its sampler, ``skip`` of its own in all."""
        changed: dict[str, Any] = dict(self._arguments)
        if isinstance(self.dataset, IterableDataset):
            return type(self)(**(changed | {"skip_batches": skip}))
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        sampler = getattr(self, name)
        for one in ("shuffle",) if self.batch_sampler is None else ("shuffle", "batch_size", "drop_last"):
            changed.pop(one, None)  # what torch made the sampler of
        reread = self._to_reread()
        changed[name] = skipping(sampler, reads, reread=reread)
        if reread:
            changed["reread"] = changed[name].reread
        if changed.get("share") is sampler:
            changed["share"] = changed[name]
        later = type(self)(**changed)
        later.skip_batches = skip
        return later

    def _to_reread(self) -> int:
        """Return how many batches at the beginning of the data are read although they are left out."""
        return 0

    @property
    def left_out_by_reading(self) -> int:
        """Batches at the beginning of every epoch that are left out after they were read."""
        return self._dropped

    @property
    def iteration(self) -> int:
        """Epochs begun, or what `set_epoch` said."""
        return self._epochs.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._epochs.epoch = epoch

    @property
    def whereabouts(self) -> tuple[int, int]:
        """The epoch it is in, from 0, and the batches of that so far; between epochs the next one, and 0.

        A loader that `skipping` returned moves the one that it was made of along.
        """
        if self._resume_at is not None:  # loaded, and not begun yet
            return self.iteration, self._resume_at
        reader = self._epochs.reader
        position = 0 if reader is None else reader.position
        return self.iteration - (position > 0), position

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and dataset which epoch comes, those that want to know."""
        self._epochs.set(epoch)

    def get_sampler(self) -> Any:
        """Return what says in which order rows are read, inside of all that shares them out; None if nothing does."""
        return sampler_inside(self.batch_sampler if self.batch_sampler is not None else self.sampler)

    def set_sampler(self, sampler: Any) -> None:
        """Read rows in another order, from the next epoch on. All ranks call it with the same sampler.

        Args:
            sampler: in the place of what `get_sampler` returns.

        Raises:
            ConfigError: there is no sampler that could be replaced.
        """
        put_sampler(self.batch_sampler if self.batch_sampler is not None else self.sampler, sampler)
        self._epochs.listen(self.batch_sampler, self.sampler, self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch that was handed out last, for `load_state_dict`."""
        self.dl_state_dict = self._state()
        self.adjust_state_dict_for_prefetch()
        return self.dl_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next epoch at a position.

        Rows of a dataset that is read by number are left out without being read. Random samplers need their seed or
        generator restored as well, as ``use_seedable_sampler`` does by itself.

        Args:
            state_dict: what `state_dict` returned. Loaders of torchdata also take what torchdata's own returned, as of
                the first epoch; then call `set_epoch` if it was another.

        Raises:
            CheckpointError: it is nothing of the kind.
        """
        try:
            epoch, position = int(state_dict["epoch"]), int(state_dict["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"A loader was given a position that it cannot read ({type(error).__name__}: {error}). It has to be "
                "what state_dict() of such a loader returned. Positions of torchdata's loaders are for loaders with "
                "use_stateful_dataloader=True."
            ) from error
        self.set_epoch(epoch)
        self._resume_at = position or None

    def adjust_state_dict_for_prefetch(self) -> None:
        """Change ``dl_state_dict`` before `state_dict` returns it: for subclasses that read ahead. It is exact here."""

    def _state(self) -> dict[str, Any]:
        epoch, position = self.whereabouts
        return {"epoch": epoch, "position": position}

    def __len__(self) -> int:
        return self._read_length()

    def _read_length(self) -> int:
        """Return how many batches this rank would read if it read all that it may."""
        return max(super().__len__() - self._dropped * self._read_per_batch(), 0)

    def _read_per_batch(self) -> int:
        """Return how many batches are read for one that is handed out."""
        return 1

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, so that its position is counted
        self._epochs.announce()
        source = self._begin()
        for batch in source:
            self.position += 1
            yield batch
        self.position = 0

    def _begin(self) -> Iterator[Any]:
        """Start an epoch: return its batches, and set ``position`` to how many of them are left out."""
        resume_at, self._resume_at = self._resume_at, None
        self.position = self.skip_batches if resume_at is None else resume_at
        # torch draws a number when reading begins, and rows that are left out may draw some when they are read. An
        # epoch that is resumed has done so before, so what follows (dropout, say) gets the numbers it would have got.
        with numbers_kept(when=self.position > 0):
            source = self._source() if resume_at is None else self._source_from(resume_at)
        self._epochs.begins(self)
        return source

    def _source(self) -> Iterator[Any]:
        """Return the batches of an epoch, where they are handed out."""
        self._rest = None
        return self._read()

    def _source_from(self, position: int) -> Iterator[Any]:
        """Return the batches of an epoch without those before ``position``."""
        self._rest = rest = self.skipping(max(position - self.skip_batches, 0))
        return rest._source()  # noqa: SLF001 - this class

    def _read(self) -> Iterator[Any]:
        """Return the batches of an epoch, where they are read."""
        with self._seeded_before():
            source = iter(super().__iter__())
        self._leave_out(source)
        return source

    def _leave_out(self, source: Iterator[Any]) -> None:
        """Read what is to be left out of an epoch, as far as it has to be read."""
        for _ in range(self._dropped * self._read_per_batch()):
            next(source, None)

    @contextlib.contextmanager
    def _seeded_before(self) -> Iterator[None]:
        """Start workers in a later epoch without drawing the number that seeds them.

        Workers that stay draw it once. If this process starts them in a later epoch because training is resumed, the
        uninterrupted one had drawn it before.
        """
        if not (self.persistent_workers and self._epochs.epoch and self._iterator is None):
            yield
            return
        own, self.generator = self.generator, torch.Generator()
        try:
            self.generator.manual_seed((torch.initial_seed() + self._epochs.epoch) % 2**63)
            yield
        finally:
            self.generator = own

    @property
    def _source_loader(self) -> Any:
        """What reads the current epoch: this, or what was made to read its rest."""
        return self if self._rest is None else self._rest

    def _read_state(self) -> Any:
        """Return where reading is, for loaders that save more of it than a number; else None."""
        return None

    @property
    def _to_repeat(self) -> int:
        """How many batches were handed out since reading was where `_reached` says."""
        return 0

    def _reached(self) -> Any:
        """Return where reading was when it had read what `_source` yielded last, likewise."""
        return self._read_state()
