"""An optimizer that steps when its accumulation window closes, in the precision of its run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.board import Phase, here
from nb_accelerate.optim.accumulation import newest_accumulation
from nb_accelerate.precision import GivenScalerStep, OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.optim.accumulation import AccumulationState


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A user's optimizer, prepared. Made by ``prepare``; made by hand it follows the newest `Accelerator`.

    Inside an accumulation window `step` and `zero_grad` do nothing; when it closes they do what they say. State,
    parameter groups and hooks are those of the optimizer inside.

    Args:
        optimizer: the user's.
        device_placement: move the state it may have to where its parameters are.
        scaler: scales the loss, for a loop that calls ``scaler.scale(loss).backward()`` itself.
        accumulation: knows whether the window closes.
        step: how the precision takes a step.
        before_first_step: called once with this, when all has been prepared that will be.

    Attributes:
        optimizer: the one inside.
        accelerated_step: how it steps; clipping asks it to unscale gradients.

    Raises:
        NotPreparedError: it was made by hand, and there is no `Accelerator` yet.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        accumulation: AccumulationState | None = None,
        step: OptimizerStep | None = None,
        before_first_step: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        # Optimizer.__init__ would make parameter groups of our own; ours are those of the optimizer inside.
        self.optimizer = optimizer
        self.device_placement = device_placement
        self.scaler = scaler
        if step is None:
            step = OptimizerStep(optimizer) if scaler is None else GivenScalerStep(optimizer, scaler)
        self.accelerated_step = step
        self._accumulation = accumulation or newest_accumulation("AcceleratedOptimizer")
        self._before_first_step = before_first_step
        if device_placement and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # which moves it to where the parameters are

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step if the accumulation window closes.

        Args:
            closure: recomputes the loss, for optimizers that want it.

        Raises:
            ConfigError: a closure was given with fp16.
        """
        if self._accumulation.sync_gradients:
            if self._before_first_step is not None:
                self._before_first_step(self.optimizer)
                self._before_first_step = None
            board = here()
            board.trains()
            enter = board.enter
            enter(Phase.STEP)
            taken = self.accelerated_step(closure)
            enter(Phase.RUNNING)
            return taken
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients if the accumulation window closes."""
        if self._accumulation.sync_gradients:
            self.accelerated_step.discard()
            self.optimizer.zero_grad(set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not taken, because fp16 gradients were infinite."""
        return self.accelerated_step.skipped

    @property
    def state(self) -> Any:
        """The state of the optimizer inside."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The parameter groups of the optimizer inside."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> Any:
        """The defaults of the optimizer inside."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: Any) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer inside."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, as if it had not been prepared."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer inside."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Tell a schedule-free optimizer that training goes on; others have nothing to tell."""
        getattr(self.optimizer, "train", _nothing)()

    def eval(self) -> None:
        """Tell a schedule-free optimizer that evaluation comes; others have nothing to tell."""
        getattr(self.optimizer, "eval", _nothing)()

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here: hooks and attributes of the optimizer inside, which is not there yet
        # while this is unpickled.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_before_first_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def _nothing() -> None:
    """Do nothing, for optimizers without a mode."""
