"""Where in its accumulation window a training loop is.

A window is ``num_steps`` batches whose gradients are added up before one optimizer step. The last batch of a
loader closes a window early. One of these objects belongs to one `Accelerator`; nothing is global.
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


class AccumulationState:
    """Where in its window a loop is.

    Args:
        options: how gradients accumulate; ``num_steps`` is set.
        loaders: asked, at each batch, whether it is the last of its loader.

    Attributes:
        num_steps: batches in a window.
        sync_gradients: whether the current batch closes a window: gradients travel, optimizers step.
        step: batches in the current window so far, modulo nothing: it starts at 0 with each loader.
    """

    __slots__ = (
        "adjust_scheduler",
        "loaders",
        "num_steps",
        "step",
        "sync_each_batch",
        "sync_gradients",
        "sync_with_dataloader",
    )

    def __init__(self, options: GradientAccumulationPlugin, loaders: KnowsTheEnd) -> None:
        self.num_steps = options.num_steps or 1
        self.adjust_scheduler = options.adjust_scheduler
        self.sync_with_dataloader = options.sync_with_dataloader
        self.sync_each_batch = options.sync_each_batch
        self.loaders = loaders
        self.sync_gradients = True
        self.step = 0

    def advance(self) -> bool:
        """Count one more batch.

        Returns:
            Whether its gradients travel: it closes the window, or every batch is to be synchronised.
        """
        if self.sync_with_dataloader and self.loaders.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0
        return self.sync_gradients or self.sync_each_batch


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
