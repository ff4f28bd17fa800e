"""The prepared learning rate scheduler: it steps when its optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from nb_accelerate.training.optim.accumulation import has_accelerator, newest_accumulation
from nb_accelerate.training.optim.optimizer import AcceleratedOptimizer
from nb_accelerate.training.process.context import topology_here
from nb_accelerate.training.process.notes import note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim.lr_scheduler import LRScheduler

    from nb_accelerate.training.optim.accumulation import AccumulationState


class AcceleratedScheduler:
    """Wrap a user's scheduler. ``prepare`` makes it; made by hand it follows the newest `Accelerator`.

    Schedules are usually written for the number of batches one process would see. With n ranks there are n times
    fewer optimizer steps, so each advances the schedule n times. A schedule that counts epochs advances once: one that
    is stepped outside of the loop over a prepared loader, after several optimizer steps, and `ReduceLROnPlateau`.

    Args:
        scheduler: the user's.
        optimizers: its optimizer, or several; if one skipped its step, so does the schedule.
        step_with_optimizer: False advances the schedule at every call instead.
        split_batches: the batch size is the total over all processes, so the schedule advances once.
        accumulation: tells whether optimizers stepped.
        repeats: how often the schedule advances for one optimizer step. Default: once with ``split_batches``, else
            once for each process.

    Raises:
        NotPreparedError: it was made by hand, and there is no `Accelerator` yet.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        accumulation: AccumulationState | None = None,
        repeats: int | None = None,
    ) -> None:
        if repeats is None:
            repeats = 1 if split_batches else topology_here().world_size
        self.scheduler = scheduler
        self.optimizers = [optimizers] if isinstance(optimizers, AcceleratedOptimizer) else list(optimizers)
        self.repeats = 1 if isinstance(scheduler, ReduceLROnPlateau) else repeats
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._accumulation = accumulation or newest_accumulation("AcceleratedScheduler")
        # OneCycleLR raises when it is stepped past its end, which rounding up to whole steps of n does.
        self._last: int | None = getattr(scheduler, "total_steps", None)
        self._steps_before = [optimizer.num_steps for optimizer in self.optimizers]
        self._is_told = False

    def join(self, accumulation: AccumulationState) -> None:
        """Follow another `Accelerator` from now on. Called by ``prepare``."""
        self._accumulation = accumulation

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if an optimizer step was taken.

        Args:
            *args: handed to the scheduler inside, such as the metric of ReduceLROnPlateau.
            **kwargs: likewise.
        """
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        if self.repeats > 1 and self._counts_epochs():
            scheduler.step(*args, **kwargs)
            return
        if not self._accumulation.window.closes:
            if self._accumulation.adjust_scheduler and hasattr(scheduler, "_step_count"):  # not of ReduceLROnPlateau
                scheduler._step_count += 1  # noqa: SLF001 - torch keeps the count of calls nowhere else
            return
        for optimizer in self.optimizers:
            if optimizer.accelerated_step.skipped:
                return
        for _ in range(self.repeats):
            if self._last is None or scheduler.last_epoch < self._last:
                scheduler.step(*args, **kwargs)

    def _counts_epochs(self) -> bool:
        """Return whether optimizers have taken several steps since the last call, and no loop over a loader is on."""
        # Inside of such a loop, a schedule that is stepped every hundredth batch still counts batches.
        before, self._steps_before = self._steps_before, [optimizer.num_steps for optimizer in self.optimizers]
        several = any(now - then > 1 for now, then in zip(self._steps_before, before, strict=False))
        counts = several and self._accumulation.loaders.active is None
        if counts and not self._is_told:
            self._is_told = True
            if topology_here().is_main:
                note(
                    f"{type(self.scheduler).__name__} is stepped after several optimizer steps, so it counts epochs: "
                    "it advances once each time, and not once for each process"
                )
        return counts

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of the parameter groups."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """Return what the scheduler inside computes for its current step."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print learning rates, where the scheduler inside can."""
        self.scheduler.print_lr(*args, **kwargs)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler inside, as if it had not been prepared."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the scheduler inside."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # The AccumulationState belongs to this process and is not pickled.
        given = self.scheduler, self.optimizers, self.step_with_optimizer, self.split_batches, self.repeats
        return _rebuild, (type(self), *given)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"


def _rebuild(
    kind: type[AcceleratedScheduler],
    scheduler: LRScheduler,
    optimizers: Sequence[AcceleratedOptimizer],
    step_with_optimizer: bool,
    split_batches: bool,
    repeats: int,
) -> LRScheduler | AcceleratedScheduler:
    """Wrap a scheduler that was unpickled, unless this process, such as the notebook's, has no `Accelerator`."""
    if not has_accelerator():
        return scheduler
    return kind(scheduler, optimizers, step_with_optimizer, split_batches, repeats=repeats)
