"""Where in its accumulation window a training loop is.

A window is ``num_steps`` batches whose gradients are added up before one optimizer step. The last batch of a
loader closes a window early. How long windows are is for each `Accelerator` to say. Whether the current batch closes
one is the same for all of a process (`Window`): what one of them prepared may be trained in a loop of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nb_accelerate.errors import NotPreparedError
from nb_accelerate.process import context

if TYPE_CHECKING:
    from nb_accelerate.config.accumulation import GradientAccumulationPlugin


class KnowsTheEnd(Protocol):
    """Whatever knows whether the loader that is being iterated has handed out its last batch."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last."""
        ...


class Window:
    """What all `Accelerator` objects of a process know of the current batch.

    Attributes:
        closes: whether it closes an accumulation window.
        num_open: how many blocks of ``accumulate`` the program is in.
    """

    __slots__ = ("closes", "num_open")

    def __init__(self) -> None:
        self.closes = True
        self.num_open = 0

    def join(self) -> None:
        """Note that there is a further `Accelerator`.

        A window that was left in its middle, by an interrupt say, must not keep the next loop from stepping.
        """
        if not self.num_open:
            self.closes = True


class AccumulationState:
    """Where in its window a loop is.

    Args:
        options: how gradients accumulate; ``num_steps`` is set.
        loaders: asked, at each batch, whether it is the last of its loader.
        window: that of this process; one of its own by default.

    Attributes:
        num_steps: batches in a window.
        window: whether the current batch closes one.
        step: batches in the current window so far, modulo nothing: it starts at 0 with each loader.
    """

    __slots__ = (
        "adjust_scheduler",
        "loaders",
        "num_steps",
        "step",
        "sync_each_batch",
        "sync_with_dataloader",
        "window",
    )

    def __init__(self, options: GradientAccumulationPlugin, loaders: KnowsTheEnd, window: Window | None = None) -> None:
        self.num_steps = options.num_steps or 1
        self.adjust_scheduler = options.adjust_scheduler
        self.sync_with_dataloader = options.sync_with_dataloader
        self.sync_each_batch = options.sync_each_batch
        self.loaders = loaders
        self.window = window or Window()
        self.step = 0

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch closes a window: gradients travel, optimizers step."""
        return self.window.closes

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.window.closes = value

    def advance(self) -> bool:
        """Count one more batch.

        Returns:
            Whether its gradients travel: it closes the window, or every batch is to be synchronised.
        """
        if self.sync_with_dataloader and self.loaders.end_of_dataloader:
            self.step = 0
            closes = True
        else:
            self.step += 1
            closes = self.step % self.num_steps == 0
        self.window.closes = closes
        return closes or self.sync_each_batch


def newest_accumulation(asked_by: str) -> AccumulationState:
    """Return where the loop of the newest `Accelerator` of this process is, for wrappers that users make by hand.

    Raises:
        NotPreparedError: there is none yet.
    """
    known = context.current()
    if known is None or known.newest.value is None:
        raise NotPreparedError(
            f"{asked_by} was made before any Accelerator, so it cannot know when an accumulation window closes. Write "
            "accelerator = Accelerator() first; accelerator.prepare makes it for you."
        )
    state: AccumulationState = known.newest.value.accumulation
    return state
