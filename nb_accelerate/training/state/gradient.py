"""`GradientState`: a view of where the loop is in its accumulation window and in its loader."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.training.data.loops import LoaderView
from nb_accelerate.training.state.accelerator import AcceleratorState
from nb_accelerate.training.state.choices import Choices, current_process, newest_choices, remember
from nb_accelerate.training.state.partial import SharedState, View

if TYPE_CHECKING:
    from typing_extensions import Self

    from nb_accelerate.training.data.loops import RunningLoops


class GradientState(View, LoaderView):
    """Where the loop of the newest `Accelerator` is: in its accumulation window, and in its loader.

    Args:
        gradient_accumulation_plugin: how gradients accumulate, for code that makes this state before any
            `Accelerator`; later the `Accelerator` decides.
    """

    _shared_state = SharedState(lambda: newest_choices() is not None, "sync_gradients", "plugin_kwargs")

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self._fixed: Choices | None = None
        if gradient_accumulation_plugin is not None and newest_choices() is None:
            remember(current_process(), Choices.make(plugin=gradient_accumulation_plugin))

    @classmethod
    def of(cls, choices: Choices) -> Self:
        """Return the state of one `Accelerator`."""
        view = cls()
        view._fixed = choices
        return view

    @property
    def _choices(self) -> Choices:
        return self._fixed or newest_choices() or Choices.make()

    @property
    def initialized(self) -> bool:
        """Whether there is an `Accelerator`, or a state, to show."""
        return self._fixed is not None or newest_choices() is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch closes an accumulation window."""
        return self._choices.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._choices.accumulation.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """How many batches make one optimizer step."""
        return self._choices.accumulation.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count batches without an optimizer step."""
        return self._choices.accumulation.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader closes the window."""
        return self._choices.accumulation.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients travel between processes after every batch."""
        return self._choices.accumulation.sync_each_batch

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The fields of the accumulation plugin that differ from their defaults."""
        state = self._choices.accumulation
        values = {field.name: getattr(state, field.name) for field in fields(GradientAccumulationPlugin)}
        return GradientAccumulationPlugin(**values).to_kwargs()

    @property
    @override
    def loops(self) -> RunningLoops:
        return self._choices.loops

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients were already summed over TPU cores; False where there are none."""
        return False

    @staticmethod
    def _reset_state() -> None:
        """Forget what the newest `Accelerator` chose."""
        AcceleratorState._reset_state()  # noqa: SLF001 - accelerate's name, used by ported tests

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )
