"""The prepared optimizer: it steps when its accumulation window closes, in the precision of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.training.optim.accumulation import has_accelerator, newest_accumulation
from nb_accelerate.training.precision import GivenScalerStep, OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.training.optim.accumulation import AccumulationState

_STEP, _RUNNING = Phase.STEP, Phase.RUNNING  # Python 3.11 looks members of an enum up slowly


@dataclass(frozen=True, kw_only=True)
class OptimizerTraining:
    """What an `Accelerator` gives to a prepared optimizer."""

    accumulation: AccumulationState
    step: OptimizerStep
    scaler: torch.amp.GradScaler | None = None
    # averages what backward has not averaged; told whether a step follows
    average_gradients: Callable[[bool], None] | None = None
    drop_gradients: Callable[[], None] | None = None  # those kept elsewhere than in ``parameter.grad``
    owns_gradients: bool = False  # `drop_gradients` drops all: the optimizer's own ``zero_grad`` is not called


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wrap a user's optimizer. ``prepare`` makes it; made by hand it follows the newest `Accelerator`.

    Inside an accumulation window `step` and `zero_grad` do nothing. State, parameter groups and hooks are those of the
    optimizer inside.

    Args:
        optimizer: the user's.
        device_placement: move the state it may already have to the devices of its parameters.
        scaler: scales the loss, for a loop that calls ``scaler.scale(loss).backward()`` itself.
        training: what an `Accelerator` gives it; by default what belongs to the newest one.

    Attributes:
        optimizer: the one inside.
        accelerated_step: takes steps in the precision of the run; clipping makes it unscale gradients.
        num_steps: how many it has taken in this process.

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
        # Optimizer.__init__ is not called: it would make parameter groups, and ours are those of the optimizer inside.
        self.optimizer = optimizer
        self.device_placement = device_placement
        self.num_steps = 0
        if training is None:
            step = OptimizerStep(optimizer) if scaler is None else GivenScalerStep(optimizer, scaler)
            training = OptimizerTraining(
                accumulation=newest_accumulation("AcceleratedOptimizer"), step=step, scaler=scaler
            )
        self.join(training)
        if device_placement and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # moves the state to the devices of the parameters

    def join(self, training: OptimizerTraining) -> None:
        """Follow another `Accelerator` from now on. Called by ``prepare``."""
        self.scaler = training.scaler
        self.accelerated_step = training.step
        self._training = training
        self._accumulation = training.accumulation

    @property
    def is_lent_scaler(self) -> bool:
        """Whether this was made by hand with a scaler, so that the user scales the loss."""
        return isinstance(self.accelerated_step, GivenScalerStep)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step if the accumulation window closes.

        Args:
            closure: recomputes the loss, for optimizers that want it.

        Raises:
            ConfigError: a closure was given with fp16.
            NotPreparedError: with fp16, gradients do not come from ``accelerator.backward``.
        """
        if self._accumulation.window.closes:
            page = here()
            page.trains()
            page.enter(_STEP)
            average_gradients = self._training.average_gradients
            if average_gradients is not None:
                if closure is None:
                    average_gradients(True)
                else:
                    closure = _averaging(closure, average_gradients)
            taken = self.accelerated_step(closure)
            self.num_steps += 1
            page.enter(_RUNNING)
            return taken
        return None

    @property
    def averages_or_unscales(self) -> bool:
        """Whether `average_and_unscale` has anything to do."""
        return self._training.average_gradients is not None or self.accelerated_step.unscales

    def average_and_unscale(self) -> None:
        """Average gradients over all ranks and divide them by the loss scale. Called before they are clipped.

        In the middle of an accumulation window they stay those of each rank: they are not complete.
        """
        if self._training.average_gradients is not None and self._accumulation.window.closes:
            self._training.average_gradients(False)
        self.accelerated_step.unscale()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients if the accumulation window closes.

        Args:
            set_to_none: False fills gradients with zeros instead; the default is torch's, True.
        """
        if self._accumulation.window.closes:
            if self._training.owns_gradients:
                pass  # an engine keeps them in buffers that its optimizer must not take away
            elif set_to_none is None:  # which optimizers of other libraries do not take
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)
            self._discard()

    def drop_gradients(self) -> None:
        """Drop gradients, also in the middle of an accumulation window. Called when ranks go on after a failure."""
        self.optimizer.zero_grad()
        self._discard()

    def _discard(self) -> None:
        """Drop gradients that are kept elsewhere, once those of the parameters are dropped."""
        self.accelerated_step.discard()
        if self._training.drop_gradients is not None:
            self._training.drop_gradients()

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
        """Switch a schedule-free optimizer to training; does nothing for others."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation; does nothing for others."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __getattr__(self, name: str) -> Any:
        # Hooks and attributes of the optimizer inside; it is missing while this object is made.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # The OptimizerTraining belongs to this process and is not pickled.
        scaler = self.scaler if self.is_lent_scaler else None
        return _rebuild, (type(self), self.optimizer, self.device_placement, scaler)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def _rebuild(
    kind: type[AcceleratedOptimizer],
    optimizer: torch.optim.Optimizer,
    device_placement: bool,
    scaler: torch.amp.GradScaler | None,
) -> torch.optim.Optimizer:
    """Wrap an optimizer that was unpickled, unless this process, such as the notebook's, has no `Accelerator`."""
    return kind(optimizer, device_placement, scaler) if has_accelerator() else optimizer


def _averaging(closure: Callable[[], float], average_gradients: Callable[[bool], None]) -> Callable[[], float]:
    """Return a closure that also averages its gradients over all ranks."""

    def averaged() -> float:
        loss = closure()
        average_gradients(True)
        return loss

    return averaged
