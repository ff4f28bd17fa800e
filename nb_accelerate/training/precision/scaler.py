"""`LossScaler`: the loss scale of a process, and the state of the gradients of each optimizer.

All `Accelerator` objects of a process share one scaler, because a gradient does not tell which of them scaled its loss.
The gradients of an optimizer are in one of these states; "true" are those that were divided by the scale::

                   scale(loss), backward                unscale                       step
    none or unknown --------------------> scaled ----------------------> true ------------------> used
                                           |  ^                           |                        |
                 dropped: none <-----------+  | scale: no gradient left ? |    scale: the next     |
                                              +---------------------------+----- loss is scaled ---+

If a loss is scaled while an optimizer holds true gradients, hooks divide what backward adds to them.

The scale is updated when the next loss is scaled, from the infinite gradients found since the last one, so that several
optimizers of one loss use the same scale. Gradients that are still scaled are multiplied to fit the new scale.

Two optimizers may have the same parameters, as when a cell that makes one is run again and the first is still referred
to. Such a gradient is divided once: it is true if it is true for one of them.
"""

from __future__ import annotations

import contextlib
import weakref
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from nb_accelerate.errors import NotPreparedError
from nb_accelerate.training.precision.step import OptimizerStep, refuse_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    State = dict[str, Any]


class ScaledStep(OptimizerStep):
    """Take the steps of one optimizer on scaled gradients. Made by `LossScaler.bind`."""

    unscales = True

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: LossScaler) -> None:
        super().__init__(optimizer)
        self.unscaled = False
        self._scaler = scaler
        self._checked = True  # whether the gradients were searched for infinite ones since they last changed
        self._hooks: list[RemovableHandle] = []
        # How many losses had been scaled when the gradients that are there now were used or dropped.
        self._used_at = -1 if self.gradients() else scaler.num_scaled

    @property
    def holds_scaled(self) -> bool:
        """Whether there may be gradients of a scaled loss that were neither unscaled nor used."""
        return not self.unscaled and self._used_at < self._scaler.num_scaled

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters of the optimizer."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that are not None."""
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    @override
    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        refuse_closure(closure)
        if not self._scaler.is_enabled() or not self.gradients():
            self.skipped = False
            return self.optimizer.step()
        if not self.unscaled and not self.holds_scaled:
            raise NotPreparedError(
                f"{type(self.optimizer).__name__}.step found gradients, but accelerator.backward was not called since "
                "its last step. With mixed_precision='fp16' the loss has to be scaled: write "
                "accelerator.backward(loss) instead of loss.backward()."
            )
        self.unscale()
        # The sum that GradScaler.step looks at, read here because step does not say what it decided. Optimizers that
        # decide on the device (fused Adam) do not show it otherwise.
        found = self._scaler._found_inf_per_device(self.optimizer)  # noqa: SLF001
        self.skipped = any(bool(value.item()) for value in found.values())
        result = self._scaler.step(self.optimizer)
        self._forget()
        return result

    @override
    def unscale(self) -> None:
        if not self._scaler.is_enabled() or not self.gradients():
            return
        if self.holds_scaled:
            self._scaler.unscale_(self.optimizer)
            self.unscaled = self._checked = True
        elif not self._checked:
            self._release()
            self._scaler._check_inf_per_device(self.optimizer)  # noqa: SLF001 - of all that came since
            self._checked = True

    @override
    def discard(self) -> None:
        self._forget()

    def check_dropped(self) -> None:
        """Update the state if true gradients were dropped other than by ``zero_grad`` of this optimizer."""
        if self.unscaled and not any(bool(_values(gradient).any()) for gradient in self.gradients()):
            self._forget()

    def divide_by(self, inverse: Tensor, done: set[int]) -> None:
        """Multiply the gradients of the next backward, which adds them to true ones, by ``inverse`` of the scale.

        Args:
            inverse: of the scale, of shape ``()``.
            done: the ids of the parameters that another optimizer does this for; those of this one are added.
        """
        self._release()
        self._checked = False
        own = [parameter for parameter in self.parameters() if parameter.requires_grad and id(parameter) not in done]
        self._hooks = [
            parameter.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient * inverse.to(gradient.device)
            )
            for parameter in own
        ]
        done.update(id(parameter) for parameter in own)

    def _forget(self) -> None:
        """Set the state of the gradients to used or dropped."""
        self._release()
        self.unscaled, self._checked = False, True
        self._used_at = self._scaler.num_scaled

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class LossScaler(torch.amp.GradScaler):
    """torch's scaler, shared by the prepared optimizers of all `Accelerator` objects of this process.

    Args:
        device: torch's name for the type of device.
        **options: those of `torch.amp.GradScaler`.

    Attributes:
        device_type: the type of device.
        num_scaled: losses scaled so far.
    """

    def __init__(self, device: str, **options: Any) -> None:
        self.device_type = device
        self._begin(**options)
        self.num_scaled = 0
        self._steps: weakref.WeakValueDictionary[int, ScaledStep] = weakref.WeakValueDictionary()
        self._gone = count(-1, -1)
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._unowned: list[weakref.ref[Tensor]] = []
        self._unowned_of: tuple[int, ...] = ()
        self._scaled_unowned: dict[int, weakref.ref[Tensor]] = {}
        own = weakref.ref(self)

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            scaler = own()
            if scaler is not None:
                scaler._check_prepared(optimizer)  # noqa: SLF001 - this class

        weakref.finalize(self, register_optimizer_step_pre_hook(check).remove)

    def bind(self, optimizer: torch.optim.Optimizer) -> ScaledStep:
        """Return what takes the steps of an optimizer; the same object if it was bound before."""
        step = self._steps.get(id(optimizer))
        if step is None:
            if id(optimizer) in self._per_optimizer_states:  # of a deleted optimizer that had the same id
                self._per_optimizer_states[next(self._gone)] = self._per_optimizer_states.pop(id(optimizer))
            step = self._steps[id(optimizer)] = ScaledStep(optimizer, self)
        return step

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer was bound before."""
        return id(optimizer) in self._steps

    def steps(self) -> list[ScaledStep]:
        """Return the `ScaledStep` of each bound optimizer that still exists."""
        return list(self._steps.values())

    def restart(self, **options: Any) -> None:
        """Reset the scale, for a new training."""
        with self._changing_scale():
            self._begin(**options)
            if self._enabled:
                self._lazy_init_scale_growth_tracker(torch.device(self.device_type))

    def _begin(self, **options: Any) -> None:
        self._scale = None
        self._per_optimizer_states: dict[int, State] = {}  # torch sets it only if the scaler is enabled
        super().__init__(self.device_type, **options)

    @override
    def scale(self, outputs: Any) -> Any:
        if self.is_enabled():
            if self._has_checked_gradients():
                self.update()
            self.num_scaled += 1
            held = [step for step in self.steps() if step.unscaled]
            if held:
                assert self._scale is not None
                inverse = self._scale.double().reciprocal().float()  # as GradScaler.unscale_ computes it
                done: set[int] = set()
                for step in held:
                    step.divide_by(inverse, done)
        return super().scale(outputs)

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self.is_enabled():
            with self._changing_scale():
                super().update(new_scale)

    @override
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Do what torch does, with two exceptions.

        It takes no mix of DTensors and others: the gradients on each mesh are unscaled by themselves. Gradients that
        are true for another optimizer are only searched for infinite ones.
        """
        true = {id(parameter) for parameter in self._true_parameters(besides=optimizer)}
        alike: dict[tuple[Any, bool], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = getattr(parameter.grad, "device_mesh", None), id(parameter) in true
                    alike.setdefault(key, []).append(parameter)
        if len(alike) < 2 and not any(is_true for _, is_true in alike):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found: dict[torch.device, Tensor] = {}
        for (_, is_true), parameters in alike.items():
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])  # all that torch reads
            inverse = torch.ones_like(inv_scale) if is_true else inv_scale
            parts = super()._unscale_grads_(part, inverse, torch.zeros_like(found_inf), allow_fp16)
            for device, value in parts.items():
                found[device] = torch.maximum(found[device], value) if device in found else value
        return found

    def _true_parameters(self, besides: torch.optim.Optimizer | None = None) -> Iterator[Tensor]:
        """Yield the parameters whose gradients, if there are any, some optimizer has unscaled or used."""
        for step in self.steps():
            if step.optimizer is not besides and not step.holds_scaled:
                yield from step.parameters()

    @override
    def get_scale(self) -> float:
        return self._updated_copy().get_scale() if self._has_checked_gradients() else super().get_scale()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._updated_copy().state_dict() if self._has_checked_gradients() else super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._changing_scale():
            super().load_state_dict(state_dict)
            self._per_optimizer_states.clear()

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("The loss scaler of an Accelerator cannot be copied or pickled. Save its state_dict().")

    def add_model(self, model: nn.Module) -> None:
        """Add a model whose losses are scaled. Called when it is prepared."""
        self._models.add(model)

    def record_unowned(self) -> None:
        """Record which scaled gradients belong to no prepared optimizer. Called after each backward."""
        shape = (
            len(self._models),
            *(len(group["params"]) for step in self.steps() for group in step.optimizer.param_groups),
        )
        if shape != self._unowned_of:
            self._unowned_of = shape
            owned = {id(parameter) for step in self.steps() for parameter in step.parameters()}
            parameters = [parameter for model in self._models for parameter in model.parameters()]
            self._unowned = [weakref.ref(parameter) for parameter in parameters if id(parameter) not in owned]
            self._scaled_unowned.clear()
        for one in self._unowned:
            parameter = one()
            if parameter is not None and parameter.grad is not None:
                self._scaled_unowned[id(parameter)] = weakref.ref(parameter.grad)

    def scaled_unowned(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose scaled gradients no prepared optimizer will unscale."""
        noted = self._scaled_unowned
        return [
            parameter
            for parameter in parameters
            if id(parameter) in noted and parameter.grad is not None and noted[id(parameter)]() is parameter.grad
        ]

    def _check_prepared(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of an optimizer that was not prepared, on scaled gradients. Called before every step."""
        if not self._scaled_unowned or id(optimizer) in self._steps:
            return
        if self.scaled_unowned(parameter for group in optimizer.param_groups for parameter in group["params"]):
            raise NotPreparedError(
                f"{type(optimizer).__name__}.step was called on gradients that are multiplied with the loss scale of "
                f"mixed_precision='fp16' ({self._scale and self._scale.item():g}), because this optimizer did not go "
                "through prepare. Write optimizer = accelerator.prepare(optimizer)."
            )

    def _has_checked_gradients(self) -> bool:
        """Return whether used or dropped gradients were checked for infinities since the scale was last updated."""
        for step in self.steps():
            step.check_dropped()
        return any(state["found_inf_per_device"] for state in self._states_of_used().values())

    def _states_of_used(self) -> dict[int, State]:
        """Return torch's states of the optimizers whose gradients were used or dropped."""
        held = {key for key, step in self._steps.items() if step.unscaled}
        return {key: state for key, state in self._per_optimizer_states.items() if key not in held}

    @contextlib.contextmanager
    def _changing_scale(self) -> Iterator[None]:
        """Run a block that changes the scale. Scaled gradients are multiplied to fit; states of true ones are kept."""
        known = self._per_optimizer_states
        held = {key: known.pop(key) for key, step in self._steps.items() if step.unscaled and key in known}
        scaled = {id(one): one for step in self.steps() if step.holds_scaled for one in step.parameters()}
        for parameter in self._true_parameters() if scaled else ():
            scaled.pop(id(parameter), None)
        before = None if self._scale is None else self._scale.clone()
        try:
            yield
        finally:
            self._per_optimizer_states.update(held)
        if before is None:
            return
        after = self._scale if self._enabled and self._scale is not None else torch.ones_like(before)
        for parameter in scaled.values():
            if parameter.grad is not None:
                parameter.grad.mul_((after / before).to(parameter.grad.device))

    def _updated_copy(self) -> torch.amp.GradScaler:
        """Return a copy that was updated: its scale is the one of the next loss."""
        assert self._scale is not None
        assert self._growth_tracker is not None
        copy = torch.amp.GradScaler(
            self.device_type,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
        )
        copy._scale, copy._growth_tracker = self._scale.clone(), self._growth_tracker.clone()  # noqa: SLF001
        for key, state in self._states_of_used().items():
            found = {device: value.clone() for device, value in state["found_inf_per_device"].items()}
            copy._per_optimizer_states[key]["found_inf_per_device"] = found  # noqa: SLF001
        copy.update()
        return copy


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 - a sparse one has no any()
