"""`AccumulationState`: the position of a training loop in its accumulation window.

A window is ``num_steps`` batches whose gradients are added up before one optimizer step. The last batch of a
loader closes a window early. Each `Accelerator` has a window length of its own. Whether the current batch closes a
window is shared by all of a process (`Window`), since a loop may train what several of them prepared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nb_accelerate.errors import NotPreparedError
from nb_accelerate.training.process import context

if TYPE_CHECKING:
    from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin


class LoaderProgress(Protocol):
    """The part of `training.data.RunningLoops` that accumulation and schedulers need."""

    @property
    def active(self) -> object | None:
        """The loader that is being iterated; None outside of loops over prepared loaders."""
        ...

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader."""
        ...


class Window:
    """State of the current batch that all `Accelerator` objects of a process share."""

    __slots__ = ("closes", "num_open")

    def __init__(self) -> None:
        self.closes = True
        self.num_open = 0  # blocks of `accumulate`, which may be nested

    def join(self) -> None:
        """Note that another `Accelerator` was made."""
        # It closes a window that an interrupted loop left open, which would keep the next loop from stepping.
        if not self.num_open:
            self.closes = True


class AccumulationState:
    """The position of a loop in its accumulation window."""

    def __init__(
        self, options: GradientAccumulationPlugin, loaders: LoaderProgress, window: Window | None = None
    ) -> None:
        self.num_steps = options.num_steps or 1
        self.adjust_scheduler = options.adjust_scheduler
        self.sync_with_dataloader = options.sync_with_dataloader
        self.sync_each_batch = options.sync_each_batch
        self.loaders = loaders
        self.window = window or Window()
        self.step = 0  # batches since the loader began; 0 after its last one

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch closes a window, so that gradients are exchanged and optimizers step."""
        return self.window.closes

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.window.closes = value

    def advance(self) -> bool:
        """Count one more batch; return whether its gradients are exchanged."""
        if self.sync_with_dataloader and self.loaders.end_of_dataloader:
            self.close()
        else:
            self.step += 1
            self.window.closes = self.step % self.num_steps == 0
        return self.window.closes or self.sync_each_batch

    def close(self) -> None:
        """Have the current batch close the window, as the last batch of a loader does."""
        self.step = 0
        self.window.closes = True


def has_accelerator() -> bool:
    """Return whether this process has an `Accelerator`."""
    process = context.current()
    return process is not None and process.newest is not None


def newest_accumulation(asked_by: str) -> AccumulationState:
    """Return the state of the newest `Accelerator` of this process, for wrappers that users make by hand."""
    process = context.current()
    if process is None or process.newest is None:
        raise NotPreparedError(
            f"{asked_by} was made before any Accelerator, so it cannot know when an accumulation window closes. Write "
            "accelerator = Accelerator() first; accelerator.prepare makes it for you."
        )
    state: AccumulationState = process.newest.accumulation
    return state
