"""float16 with a loss scaler.

float16 cannot hold small gradients, so the loss is multiplied by a large scale, and gradients are divided by it
before the step. Where they became infinite the step is skipped and the scale shrinks. One `LossScaler` is shared by the
prepared optimizers of all `Accelerator` objects of a process, because a gradient does not tell which of them scaled its
loss. The gradients of an optimizer are in one of these states::

                   scale(loss), backward                unscale                       step
    none or unknown --------------------> scaled ---------------------> unscaled --------------> used
                                             ^                             |
                                             +-- the next loss is scaled --+

The scale is updated when the next loss is scaled, so that several optimizers of one loss use the same scale. Gradients
that are still scaled then are multiplied to fit the new scale. Two optimizers may have the same parameters, as when a
cell that makes one is run again and the first is still referred to. Such a gradient is divided once.
"""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from nb_accelerate.errors import ConfigError, NotPreparedError
from nb_accelerate.training.precision.precision import AutocastPrecision, OptimizerStep, refuse_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from nb_accelerate.base.config.kwargs import AutocastKwargs, GradScalerKwargs


class ScaledStep(OptimizerStep):
    """Take the steps of one optimizer on scaled gradients. Made by `LossScaler.bind`."""

    unscales = True

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: LossScaler) -> None:
        super().__init__(optimizer)
        self.unscaled = False  # gradients were divided by the scale, and wait for their step
        self._scaler = scaler
        # How many losses had been scaled when the gradients that are there now were used or dropped.
        self._used_at = -1 if self.gradients() else scaler.num_scaled

    @property
    def holds_scaled(self) -> bool:
        """Whether there may be gradients of a scaled loss that were neither unscaled nor used."""
        return not self.unscaled and self._used_at < self._scaler.num_scaled

    def parameters(self) -> Iterator[Tensor]:
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
        infinite = self._scaler._found_inf_per_device(self.optimizer)  # noqa: SLF001
        self.skipped = any(bool(value.item()) for value in infinite.values())
        result = self._scaler.step(self.optimizer)
        self.discard()
        return result

    @override
    def unscale(self) -> None:
        if self._scaler.is_enabled() and self.holds_scaled and self.gradients():
            self._scaler.unscale_(self.optimizer)
            self.unscaled = True

    @override
    def discard(self) -> None:
        """Set the state of the gradients to used or dropped."""
        self.unscaled = False
        self._used_at = self._scaler.num_scaled

    def holds_unscaled(self) -> bool:
        """Return whether gradients are unscaled and wait for their step. A user may have dropped them by hand."""
        values = (each._values() if each.is_sparse else each for each in self.gradients())  # noqa: SLF001 - for any()
        if self.unscaled and not any(bool(value.any()) for value in values):
            self.discard()
        return self.unscaled


class LossScaler(torch.amp.GradScaler):
    """torch's scaler, shared by the prepared optimizers of all `Accelerator` objects of this process."""

    def __init__(self, device: str, **options: Any) -> None:
        self.device_type = device
        self._begin(**options)
        self.num_scaled = 0
        self._steps: weakref.WeakValueDictionary[int, ScaledStep] = weakref.WeakValueDictionary()

    def bind(self, optimizer: torch.optim.Optimizer) -> ScaledStep:
        """Return what takes the steps of an optimizer; the same object if it was bound before."""
        step = self._steps.get(id(optimizer))
        if step is None:
            self._update_if_due()
            self._per_optimizer_states.pop(id(optimizer), None)  # of a deleted optimizer that had the same id
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
        self._per_optimizer_states: dict[int, dict[str, Any]] = {}  # torch sets it only if the scaler is enabled
        super().__init__(self.device_type, **options)

    @override
    def scale(self, outputs: Any) -> Any:
        if self.is_enabled():
            self._scale_again()
            self._update_if_due()
            self.num_scaled += 1
        return super().scale(outputs)

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self.is_enabled():
            with self._changing_scale():
                super().update(new_scale)

    @override
    def get_scale(self) -> float:
        self._update_if_due()
        return super().get_scale()

    @override
    def state_dict(self) -> dict[str, Any]:
        self._update_if_due()
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._changing_scale():
            super().load_state_dict(state_dict)
            self._per_optimizer_states.clear()

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("The loss scaler of an Accelerator cannot be copied or pickled. Save its state_dict().")

    def _update_if_due(self) -> None:
        """Update the scale if gradients were searched for infinite ones since, and none waits for its step."""
        held = any(step.holds_unscaled() for step in self.steps())
        if not held and any(state["found_inf_per_device"] for state in self._per_optimizer_states.values()):
            self.update()

    def _scale_again(self) -> None:
        """Multiply gradients that are unscaled and wait for their step with the scale: scaled ones will be added."""
        waiting: dict[int, Tensor] = {}
        for step in self.steps():
            if step.holds_unscaled():
                step.unscaled = False
                self._per_optimizer_states.pop(id(step.optimizer))
                waiting |= {id(gradient): gradient for gradient in step.gradients()}
        for gradient in waiting.values():
            assert self._scale is not None
            gradient.mul_(self._scale.to(gradient.device))

    @contextlib.contextmanager
    def _changing_scale(self) -> Iterator[None]:
        """Run a block that changes the scale, and multiply scaled gradients to fit the new one."""
        self._scale_again()
        before = None if self._scale is None else self._scale.clone()
        yield
        if before is None:
            return
        after = self._scale if self._enabled and self._scale is not None else torch.ones_like(before)
        done = self._ids_of_unscaled()
        scaled = {
            id(parameter): parameter for step in self.steps() if step.holds_scaled for parameter in step.parameters()
        }
        for key, parameter in scaled.items():
            if parameter.grad is not None and key not in done:
                parameter.grad.mul_((after / before).to(parameter.grad.device))

    def _ids_of_unscaled(self, besides: torch.optim.Optimizer | None = None) -> set[int]:
        """Return the ids of the parameters whose gradients, if there are any, some optimizer has unscaled or used."""
        steps = [step for step in self.steps() if step.optimizer is not besides and not step.holds_scaled]
        return {id(parameter) for step in steps for parameter in step.parameters()}

    @override
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Do what torch does, with two exceptions."""
        # It takes no mix of DTensors and others, and exchanges what it found on the host if shards are offloaded to it,
        # where nccl cannot. So each rank unscales its shards as plain tensors, and what is found is exchanged
        # afterwards, once for each mesh. Gradients that another optimizer has unscaled are only searched for infinite
        # ones.
        done = self._ids_of_unscaled(besides=optimizer)
        alike: dict[tuple[Any, torch.device, bool], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mesh = getattr(parameter.grad, "device_mesh", None)
                    key = mesh, parameter.grad.device, id(parameter) in done
                    alike.setdefault(key, []).append(parameter)
        infinite: dict[torch.device, Tensor] = {}
        for (mesh, device, is_done), parameters in alike.items():
            local = parameters
            if mesh is not None:
                local = []
                for parameter in parameters:
                    shard: Any = parameter.grad.to_local()  # type: ignore[union-attr]  # of a DTensor
                    local.append(shard.detach())
                    local[-1].grad = shard
            part: Any = SimpleNamespace(param_groups=[{"params": local}])  # all that torch reads
            # On the device of the gradients, and waited for: torch's own copies would be read before they are there.
            inverse, none = inv_scale.to(device), torch.zeros_like(found_inf, device=device)
            parts = super()._unscale_grads_(part, torch.ones_like(inverse) if is_done else inverse, none, allow_fp16)
            for here in parts.values():
                value = here
                if mesh is not None:
                    value = here.to(mesh.device_type)
                    for dimension in range(mesh.ndim):
                        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
                    value = value.to(here.device)
                infinite[device] = torch.maximum(infinite[device], value) if device in infinite else value
        return infinite


class FP16Precision(AutocastPrecision):
    """Compute in float16 under autocast, with a scaler for the loss.

    That of an earlier `Accelerator` keeps its scale until an optimizer that it does not know is prepared: a new
    training begins with a new scale.
    """

    name = "fp16"
    scaler: LossScaler

    def __init__(
        self,
        device_type: str,
        options: AutocastKwargs,
        scaler_options: GradScalerKwargs,
        scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(device_type, torch.float16, options)
        if scaler is not None and scaler.device_type != device_type:
            scaler = None
        self._scaler_options = scaler_options.to_dict()
        self._takes_over = scaler is not None
        self._has_own_options = bool(scaler_options.to_kwargs())
        self.scaler = LossScaler(device_type, **self._scaler_options) if scaler is None else scaler

    @override
    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Make the forward of a model compute in float16. Weights in float16 are refused."""
        halves = [
            name for name, weight in model.named_parameters() if weight.requires_grad and weight.dtype is torch.float16
        ]
        if halves and self.scaler.is_enabled():
            raise ConfigError(
                f"mixed_precision='fp16' was asked for, but {len(halves)} weights of {type(model).__name__} (the first "
                f"is {halves[0]!r}) are float16 already, too coarse to be updated. Prepare the model in float32: "
                "write model.float() before prepare, or leave mixed_precision out."
            )
        return super().prepare_model(model)

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.scaler.scale(loss).backward(**kwargs)

    @override
    def without_scale(self, norm: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        scale = self.scaler._get_scale_async()  # noqa: SLF001 - get_scale waits for the device
        wanted = {id(parameter) for parameter in parameters}
        if scale is None or any(
            step.unscaled and any(id(parameter) in wanted for parameter in step.parameters())
            for step in self.scaler.steps()
        ):
            return norm
        return norm / scale.to(norm.device)

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> ScaledStep:
        if self._takes_over:
            self._takes_over = False
            if self._has_own_options or not self.scaler.knows(optimizer):
                self.scaler.restart(**self._scaler_options)
        return self.scaler.bind(optimizer)
