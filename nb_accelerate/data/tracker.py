"""Which prepared loader is being iterated right now, and whether it is at its end.

An `Accelerator` has one tracker, and its loaders report to it. Loaders nest: evaluation inside a training loop puts
its loader on top until it ends.
"""

from __future__ import annotations

from typing import Protocol


class Tracked(Protocol):
    """What a loader tells about itself while it is iterated."""

    end_of_dataloader: bool
    """Whether the batch it handed out is its last."""
    batch_remainder: int | None
    """Real rows in the current batch of all ranks together, if some are copies or missing; else None."""
    rows_on_rank: int
    """Rows of the current batch on each rank; known where ``batch_remainder`` is not None."""
    even: bool
    """Whether all ranks got as many rows as this one."""
    remainder: int
    """Real rows in the last batch of all ranks together; 0 if all are real, -1 if not known."""


class LoaderTracker:
    """The loaders that are being iterated, innermost last.

    Attributes:
        active: the innermost, or None.
    """

    __slots__ = ("_loaders", "active")

    def __init__(self) -> None:
        self._loaders: list[Tracked] = []
        self.active: Tracked | None = None

    def begin(self, loader: Tracked) -> None:
        """Note that a loader starts an epoch."""
        self._loaders.append(loader)
        self.active = loader

    def end(self, loader: Tracked) -> None:
        """Note that a loader ended its epoch, or that its loop was left."""
        # An abandoned iterator can end late, under a newer one, so it is not always the innermost.
        for index in range(len(self._loaders) - 1, -1, -1):
            if self._loaders[index] is loader:
                del self._loaders[index]
                break
        self.active = self._loaders[-1] if self._loaders else None

    def clear(self) -> None:
        """Forget all loaders."""
        self._loaders.clear()
        self.active = None

    @property
    def loaders(self) -> tuple[Tracked, ...]:
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
