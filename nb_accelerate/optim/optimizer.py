"""An optimizer that steps when its accumulation window closes, in the precision of its run."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.board import Phase, here
from nb_accelerate.errors import ConfigError
from nb_accelerate.optim.accumulation import newest_accumulation
from nb_accelerate.precision import GivenScalerStep, OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.optim.accumulation import AccumulationState


@dataclass(frozen=True, kw_only=True)
class OptimizerTraining:
    """What an `Accelerator` lends to an optimizer.

    Attributes:
        accumulation: knows whether the window closes.
        step: how the precision takes a step.
        scaler: what multiplies losses, if something has to.
        before_first_step: called once with the optimizer inside, when all has been prepared that will be.
        complete_gradients: makes gradients those of all ranks; None if backward did.
    """

    accumulation: AccumulationState
    step: OptimizerStep
    scaler: torch.amp.GradScaler | None = None
    before_first_step: Callable[[torch.optim.Optimizer], None] | None = None
    complete_gradients: Callable[[], None] | None = None


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A user's optimizer, prepared. Made by ``prepare``; made by hand it follows the newest `Accelerator`.

    Inside an accumulation window `step` and `zero_grad` do nothing; when it closes they do what they say. State,
    parameter groups and hooks are those of the optimizer inside.

    Args:
        optimizer: the user's.
        device_placement: move the state it may have to where its parameters are.
        scaler: scales the loss, for a loop that calls ``scaler.scale(loss).backward()`` itself.
        training: what an `Accelerator` lends it; by default the newest one is followed.

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
        training: OptimizerTraining | None = None,
    ) -> None:
        # Optimizer.__init__ would make parameter groups of our own; ours are those of the optimizer inside.
        self.optimizer = optimizer
        self.device_placement = device_placement
        self._takes_set_to_none = _takes_set_to_none(optimizer)
        if training is None:
            step = OptimizerStep(optimizer) if scaler is None else GivenScalerStep(optimizer, scaler)
            training = OptimizerTraining(
                accumulation=newest_accumulation("AcceleratedOptimizer"), step=step, scaler=scaler
            )
        self.join(training)
        if device_placement and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # which moves it to where the parameters are

    def join(self, training: OptimizerTraining) -> None:
        """Belong to an `Accelerator` from now on. Called by ``prepare``."""
        self.scaler = training.scaler
        self.accelerated_step = training.step
        self._accumulation = training.accumulation
        self._before_first_step = training.before_first_step
        self._complete_gradients = training.complete_gradients

    @property
    def is_lent_scaler(self) -> bool:
        """Whether the user scales the loss, with a scaler given to this object when it was made by hand."""
        return isinstance(self.accelerated_step, GivenScalerStep)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step if the accumulation window closes.

        Args:
            closure: recomputes the loss, for optimizers that want it.

        Raises:
            ConfigError: a closure was given with fp16; or the optimizer trains nothing that was prepared or has
                gradients.
            NotPreparedError: with fp16, gradients do not come from ``accelerator.backward``.
        """
        if self._accumulation.sync_gradients:
            if self._before_first_step is not None:
                self._before_first_step(self.optimizer)
                self._before_first_step = None
            board = here()
            board.trains()
            enter = board.enter
            enter(Phase.STEP)
            if self._complete_gradients is not None:
                if closure is None:
                    self._complete_gradients()
                else:
                    closure = _completed(closure, self._complete_gradients)
            taken = self.accelerated_step(closure)
            enter(Phase.RUNNING)
            return taken
        return None

    def complete_gradients(self) -> None:
        """Make gradients those of all ranks, without a loss scale. Called before they are clipped."""
        if self._complete_gradients is not None:
            self._complete_gradients()
        self.accelerated_step.unscale()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients if the accumulation window closes.

        Args:
            set_to_none: keep no zeros, as torch does by default.

        Raises:
            ConfigError: the optimizer inside does not let one choose.
        """
        if self._accumulation.sync_gradients:
            if self._takes_set_to_none:
                self.optimizer.zero_grad(set_to_none=set_to_none is not False)
            elif set_to_none is None:
                self.optimizer.zero_grad()
            else:
                raise ConfigError(
                    f"zero_grad was given set_to_none={set_to_none}, which the zero_grad of "
                    f"{type(self.optimizer).__name__} does not take. Write optimizer.zero_grad()."
                )
            self.accelerated_step.discard()

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
        # What an Accelerator lends belongs to this process.
        given = self.scaler if self.is_lent_scaler else None
        return {"optimizer": self.optimizer, "device_placement": self.device_placement, "scaler": given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        AcceleratedOptimizer.__init__(self, state["optimizer"], state["device_placement"], state["scaler"])

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def _takes_set_to_none(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(optimizer.zero_grad).bind(set_to_none=True)
    except TypeError:
        return False
    return True


def _completed(closure: Callable[[], float], complete_gradients: Callable[[], None]) -> Callable[[], float]:
    """Return a closure whose gradients are those of all ranks."""

    def completed() -> float:
        loss = closure()
        complete_gradients()
        return loss

    return completed


def _nothing() -> None:
    """Do nothing, for optimizers without a mode."""
