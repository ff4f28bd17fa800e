"""Track which prepared loader is being iterated, and whether it is at its end.

A process has one tracker, and prepared loaders report to it. Loaders nest: evaluation inside a training loop puts
its loader on top until it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class TrackedLoader(Protocol):
    """The members that a loader has while a `LoaderTracker` tracks it."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch it handed out is its last."""
        ...

    @property
    def batch_remainder(self) -> int | None:
        """Real rows in the current batch of all ranks together, if some are copies or missing; else None."""
        ...

    @property
    def rows_on_rank(self) -> int | None:
        """Rows of the last batch on each rank, where ``batch_remainder`` is not None or there is one rank; or None."""
        ...

    @property
    def rows_of_ranks(self) -> tuple[int, ...] | None:
        """Rows of the current batch on all ranks, where ``batch_remainder`` is not None and they differ; else None."""
        ...

    @property
    def even(self) -> bool:
        """Whether all ranks got as many rows as this one."""
        ...

    @property
    def remainder(self) -> int:
        """Real rows in the last batch of all ranks together; 0 if all are real, -1 if not known."""
        ...


class LoaderTracker:
    """The loaders that are being iterated, innermost last.

    Attributes:
        active: the innermost, or None.
        between_batches: called with a loader before the first batch of a loop that computes gradients, and between two.
        when_a_loop_begins: called before a loader is added.
        look: called with True before a loader is added, and with False after one has ended.
    """

    __slots__ = ("_loaders", "active", "between_batches", "look", "when_a_loop_begins")

    def __init__(self) -> None:
        self.between_batches: Callable[[TrackedLoader], None] = _nothing
        self.when_a_loop_begins: Callable[[], None] = _nothing_to_note
        self.look: Callable[[bool], None] = _nothing_to_compare
        self._loaders: list[TrackedLoader] = []
        self.active: TrackedLoader | None = None

    def __getstate__(self) -> tuple[list[TrackedLoader], TrackedLoader | None]:
        """Return what a copy of it has: the functions that it calls act on this process and stay with it."""
        return self._loaders, self.active

    def __setstate__(self, state: tuple[list[TrackedLoader], TrackedLoader | None]) -> None:
        """Begin as a copy."""
        self.between_batches, self.when_a_loop_begins, self.look = _nothing, _nothing_to_note, _nothing_to_compare
        self._loaders, self.active = state

    def begin(self, loader: TrackedLoader) -> None:
        """Add a loader that begins an epoch."""
        self.when_a_loop_begins()
        self.look(True)
        self._loaders.append(loader)
        self.active = loader

    def end(self, loader: TrackedLoader) -> None:
        """Remove a loader whose epoch ended, or whose loop was left."""
        # An abandoned iterator can end late, under a newer one, so it is not always the innermost.
        for index in range(len(self._loaders) - 1, -1, -1):
            if self._loaders[index] is loader:
                del self._loaders[index]
                break
        self.active = self._loaders[-1] if self._loaders else None
        self.look(False)

    def forget(self, loaders: Iterable[TrackedLoader]) -> None:
        """Remove loaders, and those that `DataLoaderAdapter.skipping` made of them."""
        gone = {id(getattr(loader, "epochs", loader)) for loader in loaders}
        self._loaders = [one for one in self._loaders if id(getattr(one, "epochs", one)) not in gone]
        self.active = self._loaders[-1] if self._loaders else None

    @property
    def loaders(self) -> tuple[TrackedLoader, ...]:
        """All loaders that are being iterated, innermost last."""
        return tuple(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader; False outside loaders."""
        return self.active is not None and self.active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The ``remainder`` of the active loader; -1 outside loaders."""
        return -1 if self.active is None else self.active.remainder


def _nothing(_: TrackedLoader) -> None:
    """Do nothing between batches, where nobody trains."""


def _nothing_to_note() -> None:
    """Do nothing when a loop begins, where nobody trains."""


def _nothing_to_compare(_begins: bool) -> None:
    """Do nothing when a loop begins or ends, where nobody trains."""


class HasTracker(Protocol):
    """An object with a `LoaderTracker`, such as a ``GradientState``."""

    @property
    def tracker(self) -> LoaderTracker:
        """Which loaders are being iterated."""
        ...


class LoaderView:
    """The members of ``GradientState`` about loaders.

    Args:
        tracker: of these loaders; a new one by default.
    """

    def __init__(self, tracker: LoaderTracker | None = None) -> None:
        self._own_tracker = tracker or LoaderTracker()

    @property
    def tracker(self) -> LoaderTracker:
        """Which prepared loaders are being iterated: where `DataLoaderStateMixin` makes loaders known."""
        return self._own_tracker

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def active_dataloader(self) -> TrackedLoader | None:
        """The prepared loader that is being iterated, the innermost of several."""
        return self.tracker.active

    @property
    def dataloader_references(self) -> list[TrackedLoader | None]:
        """None (for code outside of loops), then all loaders that are being iterated, innermost last."""
        return [None, *self.tracker.loaders]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader."""
        return self.tracker.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real rows in the last batch of all processes together; 0 if all are, -1 if not known or in no loader."""
        return self.tracker.remainder


class DataLoaderStateMixin:
    """Report the epochs of a loader to a `LoaderTracker`. Prepared loaders inherit it; your own can.

    Such a loader sets ``gradient_state = GradientState()``, calls `begin` before its first batch and `end` after its
    last, and sets ``end_of_dataloader`` to True before it hands out the last. Then accumulation windows close there,
    and ``gather_for_metrics`` leaves out rows that fill up the last batch, if the loader has a ``total_batch_size``
    and a ``total_dataset_length`` or ``dataset``.
    """

    gradient_state: HasTracker
    end_of_dataloader: bool = False
    remainder: int = -1
    even: bool = True
    rows_on_rank: int | None = None
    rows_of_ranks: tuple[int, ...] | None = None

    @property
    def batch_remainder(self) -> int | None:
        """Real rows in the current batch of all ranks together, if some are copies; else None."""
        return self.remainder if self.end_of_dataloader and self.remainder > 0 else None

    def reset(self) -> None:
        """Clear what is known of the last epoch."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Report that an epoch begins."""
        self.reset()
        rows = getattr(self, "total_dataset_length", None)
        if rows is None and hasattr(getattr(self, "dataset", None), "__len__"):
            rows = len(self.dataset)  # type: ignore[attr-defined]  # asked for in the line above
        size = getattr(self, "total_batch_size", None)
        if rows is not None and size:
            self.remainder = rows % size
        self._tracked_by().begin(self)

    def end(self) -> None:
        """Report that the epoch is over, or that its loop was left."""
        self._tracked_by().end(self)

    def _tracked_by(self) -> LoaderTracker:
        return self.gradient_state.tracker
