"""Train on devices of torch_xla: the whole model on every rank, or one model sharded over all devices of a process.

Gradients are averaged when the optimizer steps, in the program of the step. XLA's partitioner (SPMD), which drives all
devices of a process as one, is in charge where the user has called ``torch_xla.runtime.use_spmd()`` before the first
`Accelerator`. There is one rank then; weights, gradients and the state of optimizers are cut as fully sharded data
parallel training cuts them, and batches by their rows. XLA puts the collectives into the program of the step.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch_xla
from torch.utils._pytree import tree_map_only
from torch_xla import runtime
from torch_xla.debug import metrics
from torch_xla.distributed import spmd
from typing_extensions import override

from nb_accelerate.training.pytree import tensors_in
from nb_accelerate.training.strategies.strategy import Strategy
from nb_accelerate.training.strategies.unwrapping import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.training.comm.xla import XLACollectives
    from nb_accelerate.training.strategies.strategy import ModelRequest

_SUBMISSIONS = "MarkStep"  # XLA's counter of the programs that were submitted


class XLAStrategy(Strategy):
    """Train on devices of torch_xla."""

    collectives: XLACollectives

    def __init__(self, device: torch.device, collectives: XLACollectives, distributed_type: DistributedType) -> None:
        super().__init__(device, collectives, distributed_type)
        self._averaged: dict[int, tuple[int, int]] = {}

    @override
    def prepare(
        self,
        models: Sequence[ModelRequest],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        earlier: Iterable[torch.optim.Optimizer] = (),
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        for optimizer in optimizers:
            _follow(optimizer, [request.model for request in models])
        return super().prepare(models, optimizers, earlier=earlier)

    @override
    def prepare_model(self, request: ModelRequest) -> nn.Module:
        model = request.model
        if request.place:
            with _swapping():
                model.to(self.device)
        if self.collectives.world_size > 1:
            held = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
            self.collectives.broadcast_([weight.detach() for weight in held.values() if weight.device.type == "xla"])
        return model

    @override
    def average_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[bool], None] | None:
        optimizer.register_step_post_hook(_SubmitsSteps())
        if self.collectives.world_size == 1:
            return None

        def average(steps: bool) -> None:  # noqa: ARG001
            parameters = [weight for weight in parameters_of(optimizer) if weight.grad is not None]
            new = [weight for weight in parameters if self._averaged.get(id(weight)) != _version(weight.grad)]
            self.collectives.average_([weight.grad for weight in new])
            self._note(new)

        return average

    def _note(self, parameters: Iterable[Tensor]) -> None:
        """Note that gradients are averages, also after a change that was the same on all ranks."""
        for weight in parameters:
            if weight.grad is not None:
                self._averaged[id(weight)] = _version(weight.grad)

    @override
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        norm = super().clip_grad_norm(parameters, max_norm, norm_type)
        self._note(parameters)
        return norm

    @override
    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        super().clip_grad_value(parameters, clip_value)
        self._note(parameters)

    @override
    def model_state(self, model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
        torch_xla.sync()
        # The parameters themselves, because a tied one has to be recognised: XLA tensors have no address to compare.
        return _on_host(model.state_dict(keep_vars=True)) if keep else model.state_dict()

    @override
    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        super().load_model_state(model, state, **kwargs)
        torch_xla.sync()

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Any]:
        torch_xla.sync()
        return _on_host(optimizer.state_dict()) if keep else optimizer.state_dict()

    @override
    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, state)
        torch_xla.sync()


class _SubmitsSteps:
    """Submits the program of a step where no loader has done so since the step before."""

    def __init__(self) -> None:
        self._seen = -1
        self._counts = runtime.addressable_device_count() == 1

    def __call__(self, *_: object) -> None:
        if not self._counts or metrics.counter_value(_SUBMISSIONS) == self._seen:
            torch_xla.sync()
        self._seen = metrics.counter_value(_SUBMISSIONS)


def _version(gradient: Tensor) -> tuple[int, int]:
    """Return what changes when a gradient is computed again or changed in place."""
    return torch_xla._XLAC._xla_get_tensor_id(gradient), gradient._version  # noqa: SLF001 - torch has no other name


@contextlib.contextmanager
def _swapping() -> Iterator[None]:
    """Let ``module.to`` change parameters in place, so that tied ones stay tied and optimizers keep theirs."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _follow(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
    """Give a new optimizer the parameters of models that the user has moved to the device after it was made."""
    # `model.to("xla")` makes new parameters. The parameters of an optimizer are recognised by shapes and values, in
    # order. Nothing is changed unless all of them are, nor where one has a gradient, is on the device already, or
    # belongs to a model as it is.
    of_models = {id(weight): weight for model in models for weight in model.parameters()}
    held = parameters_of(optimizer)
    is_followed = [id(old) in of_models or old.grad is not None or old.device.type == "xla" for old in held]
    if optimizer.state or any(is_followed):
        return
    moved = (weight for weight in of_models.values() if weight.device.type == "xla")
    successors: dict[int, nn.Parameter] = {}
    for old in held:
        value = old.detach().cpu()
        alike = (weight for weight in moved if (weight.shape, weight.dtype) == (old.shape, old.dtype))
        new = next((weight for weight in alike if torch.equal(weight.detach().cpu(), value)), None)
        if new is None:
            return
        successors[id(old)] = new
    for group in optimizer.param_groups:
        group["params"] = [successors[id(weight)] for weight in group["params"]]


def _on_host(state: Any) -> Any:
    """Return nested dicts and lists with all tensors on the CPU; what was one tensor stays one."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().cpu()
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copied, state)


_AXIS = "fsdp"


class XLASpmdStrategy(XLAStrategy):
    """Train a model whose weights are sharded over the devices of this process."""

    def __init__(self, device: torch.device, collectives: XLACollectives, distributed_type: DistributedType) -> None:
        super().__init__(device, collectives, distributed_type)
        self._num_devices = runtime.global_runtime_device_count()
        self._mesh = spmd.Mesh(np.arange(self._num_devices), (self._num_devices,), (_AXIS,))

    @override
    def prepare_model(self, request: ModelRequest) -> nn.Module:
        model = super().prepare_model(request)
        self._shard_weights(model)
        model.register_forward_pre_hook(self._shard_inputs, with_kwargs=True)
        return model

    @override
    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        super().load_model_state(model, state, **kwargs)
        self._shard_weights(model)

    def _shard_weights(self, model: nn.Module) -> None:
        """Cut each weight along its longest dimension that can be cut evenly; one without is whole on each device."""
        for weight in {id(tensor): tensor for tensor in model.parameters() if tensor.device.type == "xla"}.values():
            evenly = [axis for axis, length in enumerate(weight.shape) if length and not length % self._num_devices]
            if evenly:
                self._shard(weight, max(evenly, key=lambda axis: weight.shape[axis]))
        torch_xla.sync()

    def _shard_inputs(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in([args, kwargs]):
            num_rows = tensor.shape[0] if tensor.dim() else 0
            if tensor.device.type == "xla" and num_rows and not num_rows % self._num_devices:
                self._shard(tensor, 0)

    def _shard(self, tensor: Tensor, axis: int) -> None:
        if not torch_xla._XLAC._get_xla_sharding_spec(tensor):  # noqa: SLF001 - there is no other name
            axes = tuple(_AXIS if number == axis else None for number in range(tensor.dim()))
            spmd.mark_sharding(tensor, self._mesh, axes)


def choose_strategy(
    device: torch.device, collectives: XLACollectives, distributed_type: DistributedType
) -> XLAStrategy:
    """Return the strategy for XLA devices: sharded where the user has asked XLA for SPMD."""
    chosen = XLASpmdStrategy if runtime.is_spmd() else XLAStrategy
    return chosen(device, collectives, distributed_type)
