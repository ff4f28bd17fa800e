"""Loaders that can save their position and take it up again, with the help of torchdata.

What such a loader saves is what torchdata's own would save after the batch that was handed out last, although prepared
loaders have read further by then; see `nb_accelerate.data.positions`.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.data import positions
from nb_accelerate.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.data.adapter import DataLoaderAdapter


def is_stateful(loader: object) -> bool:
    """Whether a loader is torchdata's. Does not import it: where it was not imported there is none."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)


@functools.cache
def stateful(kind: type[DataLoaderAdapter]) -> type[DataLoaderAdapter]:
    """Return a kind of prepared loader with ``state_dict`` and ``load_state_dict``, built on torchdata's loader.

    Raises:
        MissingDependencyError: torchdata is not installed.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise MissingDependencyError(
            "torchdata", needed_for="DataLoaderConfiguration(use_stateful_dataloader=True)", extra="torchdata"
        ) from None

    class Stateful(kind, StatefulDataLoader):  # type: ignore[misc, valid-type]  # both are loaders of torch
        """A loader that saves its position, and the state of a dataset that has one."""

        next_iter_state: dict[str, Any] | None  # torchdata's: what was loaded
        _before: dict[str, Any] | None = None  # where reading was when it had read the batch that was handed out
        _repeated_before = 0  # batches that were handed out since then
        _loaded: dict[str, Any] | None = None  # a position that was loaded, until the next epoch begins

        def _source(self) -> Iterator[Any]:
            self._loaded = None
            return self._remembered(super()._source())

        def _source_from(self, position: int) -> Iterator[Any]:
            self._loaded = None
            if self.next_iter_state is not None:
                return self._source()
            # Where only the position counts, rows before it need not be drawn one by one.
            later: Iterator[Any] = super()._source_from(position)
            return later

        def _read(self) -> Iterator[Any]:
            if self.next_iter_state is None:
                fresh: Iterator[Any] = super()._read()
                return fresh
            if positions.is_over(self.next_iter_state) and self.position:
                self.next_iter_state = None  # this rank's part is over; those of others are not
                return iter(())
            with self._seeded_before():
                if positions.is_over(self.next_iter_state) and not self.persistent_workers:
                    # torchdata begins the epoch that is over, for the sake of its states, and then the next one; an
                    # uninterrupted run draws a number for the next one only.
                    with torch.random.fork_rng(devices=()):
                        self._get_iterator()
                source: Iterator[Any] = iter(StatefulDataLoader.__iter__(self))
            return source

        def _remembered(self, source: Iterator[Any]) -> Iterator[Any]:
            mine: Any = vars(self)  # a DataLoader looks at every attribute that is set
            while True:
                mine["_before"] = self._reached()
                mine["_repeated_before"] = self._to_repeat
                try:
                    batch = next(source)
                except StopIteration:
                    mine["_before"] = self._read_state()
                    mine["_repeated_before"] = 0
                    return
                yield batch

        def _read_state(self) -> Any:
            return StatefulDataLoader.state_dict(self) if self._reads_itself else None

        def _state(self) -> dict[str, Any]:
            epoch, position = self.whereabouts
            reading = self._reading(position) if self._loaded is None else self._loaded
            return positions.complete(
                reading,
                epoch=epoch,
                position=position,
                per_batch=self._read_per_batch(),
                repeat=self._repeat if self._loaded is not None else self._repeated,
            )

        def _reading(self, position: int) -> dict[str, Any]:
            """Return torchdata's part of a position, counted from the beginning of the epoch."""
            reader = self._epochs.reader  # another loader if the beginning of the epoch is left out
            source = (self if reader is None else reader)._source_loader  # noqa: SLF001 - one of ours
            now = source._last_read()  # noqa: SLF001 - likewise
            if not now:  # no epoch was begun
                return {}
            if not position:  # between epochs, perhaps because a loop was left
                now = {**now, positions.OVER: True}
            return positions.moved(now, source._uncounted)  # noqa: SLF001 - likewise

        @property
        def _repeated(self) -> int:
            """How many batches were handed out since reading was where the state of this epoch says."""
            reader = self._epochs.reader
            source = (self if reader is None else reader)._source_loader  # noqa: SLF001 - one of ours
            repeated: int = source._repeated_before  # noqa: SLF001 - likewise
            return repeated

        def _last_read(self) -> dict[str, Any] | None:
            return self._read_state() if self._before and not self._looks_ahead else self._before

        @property
        def _uncounted(self) -> int:
            """How many batches samplers leave out, which torchdata therefore does not count."""
            batches: int = (self.skip_batches - self._dropped) * self._read_per_batch() - self._reread
            return batches

        def state_dict(self) -> dict[str, Any]:
            return kind.state_dict(self)  # of the two bases

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            found = positions.find(state_dict, per_batch=self._read_per_batch(), workers=self.num_workers)
            self.set_epoch(found.epoch)
            self._resume_at = found.position or None
            self._loaded = found.reading
            self._repeat = found.repeat if found.to_restore else 0
            to_restore = found.to_restore if self._reads_itself else {}
            self.next_iter_state = None  # torchdata keeps one that was loaded before if there is nothing to restore
            StatefulDataLoader.load_state_dict(self, positions.moved(to_restore, -self._uncounted))

    Stateful.__name__ = Stateful.__qualname__ = f"Stateful{kind.__name__}"
    return Stateful
