"""`RunningLoops`: which prepared loader is being iterated, and whether it is at its end.

A process has one `RunningLoops`, to which loops over prepared loaders report. Loops nest: an evaluation inside a
training loop is on top until it ends. Loaders can also advance together, as in ``zip(first, second)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.training.data.plan.plan import GroupRows

if TYPE_CHECKING:
    from collections.abc import Iterable


class RunningLoop:
    """One loop over a loader, while it is in `RunningLoops`."""

    loader: Any = None
    position = 0  # changes whenever a batch is handed out
    end_of_dataloader = False  # whether the batch that was handed out is the last
    rows: GroupRows | None = None  # of the current batch's group; None if it is not known to be incomplete

    @property
    def is_uneven(self) -> bool:
        """Whether ranks have, or may have at the end, different numbers of rows."""
        return False

    @property
    def remainder(self) -> int:
        """Real rows in the last batch of all ranks together; 0 if all are real, -1 if not known."""
        return -1 if self.rows is None else self.rows.real or 0


class RunningLoops:
    """The loops over loaders that are running, innermost last.

    `active` is the innermost, and `beside` has others that advance together with it: those of ``zip`` over several
    loaders.
    """

    __slots__ = ("_loops", "_positions", "active", "beside")

    def __init__(self) -> None:
        self.__setstate__(None)

    def __getstate__(self) -> bool:
        """Return nothing: loops, and the functions that it calls, stay with this process."""
        return True  # so that `__setstate__` is called

    def __setstate__(self, _: object) -> None:
        self._loops: list[RunningLoop] = []
        self._positions: dict[int, int] = {}  # of loops, by id, when one outside of them advanced last
        self.active: RunningLoop | None = None
        self.beside: tuple[RunningLoop, ...] = ()

    def begin(self, loop: RunningLoop) -> None:
        self._loops.append(loop)
        self.active, self.beside = loop, ()

    def advance(self, loop: RunningLoop) -> None:
        """Note that a loop hands out a batch which is not the innermost."""
        # Loops inside of it that have handed out batches since it did so last advance together with it. Others were
        # left without being closed, as by `next(iter(loader))`: they are not inside any more.
        if loop not in self._loops:
            return
        index = self._loops.index(loop)
        inside = self._loops[index + 1 :]
        moving = [other for other in inside if other.position != self._positions.get(id(other))]
        self._positions = {id(other): other.position for other in inside}
        left = [other for other in inside if other not in moving]
        self._loops[index:] = [*left, loop, *moving]
        self.active, self.beside = self._loops[-1], (loop, *moving)[:-1]

    def end(self, loop: RunningLoop) -> None:
        """Remove a loop that ended, or was left."""
        # An abandoned iterator can end late, under a newer one, so it is not always the innermost.
        self._keep([other for other in self._loops if other is not loop])

    def innermost_of(self, loader: object) -> RunningLoop | None:
        return next((loop for loop in reversed(self._loops) if loop.loader is loader), None)

    def forget(self, loaders: Iterable[Any]) -> None:
        """Remove loops over loaders, and over loaders that `DataLoaderAdapter.skipping` made of them."""
        gone = {id(getattr(loader, "epochs", loader)) for loader in loaders}
        self._keep([loop for loop in self._loops if id(getattr(loop.loader, "epochs", loop.loader)) not in gone])

    def _keep(self, loops: list[RunningLoop]) -> None:
        self._loops = loops
        self.active = loops[-1] if loops else None
        self.beside = tuple(loop for loop in self.beside if loop in loops and loop is not self.active)

    @property
    def together(self) -> tuple[RunningLoop, ...]:
        """The innermost loop and the loops that advance together with it, outer ones first; empty outside loops."""
        return () if self.active is None else (*self.beside, self.active)

    @property
    def loaders(self) -> tuple[Any, ...]:
        """All loaders that are being iterated, innermost last."""
        return tuple(loop.loader for loop in self._loops)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader, or of one that advances with it; False outside loops."""
        active = self.active
        return active is not None and (active.end_of_dataloader or any(loop.end_of_dataloader for loop in self.beside))

    @property
    def remainder(self) -> int:
        """The ``remainder`` of the active loop; -1 outside loops."""
        return -1 if self.active is None else self.active.remainder


class LoaderView:
    """The members of ``GradientState`` about loaders."""

    def __init__(self) -> None:
        self._own_loops = RunningLoops()

    @property
    def loops(self) -> RunningLoops:
        """Which prepared loaders are being iterated: where `DataLoaderStateMixin` makes loaders known."""
        return self._own_loops

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that is being iterated, the innermost of several; None outside loops."""
        active = self.loops.active
        return None if active is None else active.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """None (for code outside of loops), then all loaders that are being iterated, innermost last."""
        return [None, *self.loops.loaders]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader."""
        return self.loops.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real rows in the last batch of all processes together; 0 if all are, -1 if not known or in no loader."""
        return self.loops.remainder


class DataLoaderStateMixin:
    """Report the epochs of a loader to `RunningLoops`. Prepared loaders inherit it; your own can.

    Such a loader sets ``gradient_state = GradientState()``, calls `begin` before its first batch and `end` after its
    last, and sets ``end_of_dataloader`` to True before it hands out the last. Then accumulation windows close there,
    and ``gather_for_metrics`` leaves out rows that fill up the last batch, if the loader has a ``total_batch_size``
    and a ``total_dataset_length`` or ``dataset``.
    """

    reports_progress = True
    """Read by other code that reports loops to the progress page, and leaves out this one."""

    gradient_state: LoaderView
    end_of_dataloader: bool = False
    remainder: int = -1

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
        self.gradient_state.loops.begin(_OwnLoop(self))

    def end(self) -> None:
        """Report that the epoch is over, or that its loop was left."""
        loops = self.gradient_state.loops
        loop = loops.innermost_of(self)
        if loop is not None:
            loops.end(loop)


class _OwnLoop(RunningLoop):
    """A loop over a loader of the user's, which reports by itself: what is known of its end is what the loader says."""

    def __init__(self, loader: DataLoaderStateMixin) -> None:
        self.loader = loader

    @property
    @override
    def end_of_dataloader(self) -> bool:  # type: ignore[override]  # read from the loader
        return bool(self.loader.end_of_dataloader)

    @property
    @override
    def remainder(self) -> int:
        return int(self.loader.remainder)

    @property
    @override
    def rows(self) -> GroupRows | None:  # type: ignore[override]  # likewise
        return GroupRows(self.remainder, None) if self.end_of_dataloader and self.remainder > 0 else None
