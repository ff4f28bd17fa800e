"""Shard a model over all XLA devices of one process, which XLA's partitioner (SPMD) drives as one device.

It is in charge where the user has called ``torch_xla.runtime.use_spmd()`` before the first `Accelerator`. There is one
rank then; weights, gradients and the state of optimizers are cut as fully sharded data parallel training cuts them, and
batches by their rows. XLA puts the collectives into the program of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch_xla
from torch_xla import runtime
from torch_xla.distributed import spmd
from typing_extensions import override

from nb_accelerate.training.pytree import tensors_in
from nb_accelerate.training.strategies.xla import XLAStrategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor, nn

    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.training.comm.xla import XLACollectives
    from nb_accelerate.training.strategies.strategy import ModelRequest

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
