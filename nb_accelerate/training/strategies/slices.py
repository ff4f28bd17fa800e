"""Fill a model so that the ranks compute each layer together: every rank takes its slices of mapped weights.

The plan is the tensor-parallel plan. Nothing is sent: the model is parallelized on ``meta``, and a rank cuts what is
its own out of the files, which all ranks of a machine map::

    meta model --parallelize_module--> DTensors on meta --slice of the map--> DTensors whose local parts are views
                                       plain parameters --whole weight------> views of the map

On another device than the CPU, the slices are copied there. A forward gives what the whole model gives, up to rounding:
a row-wise layer adds up the products of each rank first, and then those sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.comm import TorchCollectives
from nb_accelerate.training.comm.data_parallel import between_groups, share_random_numbers
from nb_accelerate.training.process.setup import setup_process
from nb_accelerate.training.strategies.dtensors import MeshLayout
from nb_accelerate.training.strategies.tensor_parallel import TensorParallelizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor


def take_slices(
    model: nn.Module, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Give a model this rank's slices of the weights, on the device of this rank. All ranks call it together.

    The plan is ``model._tp_plan``; what it does not name is whole on each rank. A process that is alone takes
    everything, and needs no plan. From then on every rank has to call the model with the same inputs. Random numbers
    of rank 0 are those of all ranks, so that sampled tokens are the same.

    Weights take no gradients: models to train are prepared with ``ParallelismConfig(tp_size=...)``.

    Args:
        model: changed in place; on ``meta``, as `init_empty_weights` makes it.
        tensors: whole weights by the names of the model, on the CPU. Only slices of them are read, and on the CPU they
            stay views of them. Of tied weights one is enough.
        dtypes: of the numbers that weights are to have, by name; by default those of the model. A weight that is read
            in another one is converted: this rank's slice of it is a copy then.

    Raises:
        CheckpointError: a weight is missing, or has another shape. Nothing is changed then.
        ConfigError: the model has no plan, or one that cannot be split over as many ranks.

    Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
    """
    _check(model, tensors)
    process = setup_process()
    if process.topology.world_size > 1 and process.group is not None:
        mesh = MeshLayout(tp=process.topology.world_size).make(process.device.type)
        TensorParallelizer(mesh, None, trains=False).parallelize(model, lambda _: None)
        share_random_numbers(between_groups(TorchCollectives(process.device), process.topology.world_size))
    for names, owners, now in _tied(model):
        found = next((name for name in names if name in tensors), None)
        if found is None:  # a buffer, say, that the code of the model fills
            value: Any = now.detach().to(process.device)
        else:
            value = _slice_of(tensors[found], now, process.device, (dtypes or {}).get(found, now.dtype))
        if isinstance(now, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        for owner, key in owners:
            setattr(owner, key, value)


def _check(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for names, _, now in _tied(model):
        found = next((name for name in names if name in tensors), None)
        if found is None and now.is_meta:
            raise CheckpointError(
                f"The checkpoint has no {' or '.join(names)}, and this {type(model).__name__} was made without weights."
            )
        if found is not None and tensors[found].shape != now.shape:
            raise CheckpointError(
                f"{found} is of shape {tuple(tensors[found].shape)} in the checkpoint and {tuple(now.shape)} here."
            )


def _tied(model: nn.Module) -> list[tuple[list[str], list[tuple[nn.Module, str]], Tensor]]:
    """Return each parameter and buffer once, with all of its names, and with those who hold it."""
    found: dict[int, tuple[list[str], list[tuple[nn.Module, str]], Tensor]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            names, owners, _ = found.setdefault(id(tensor), ([], [], tensor))
            names.append(f"{prefix}.{key}" if prefix else key)
            owners.append((module, key))
    return list(found.values())


def _slice_of(whole: Tensor, now: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return this rank's slice of a weight, sharded as ``now`` is; the weight itself where ``now`` is not sharded."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(now, DTensor):
        return whole.to(device, dtype)
    mesh, (placement,) = now.device_mesh, now.placements
    part = whole
    if isinstance(placement, Shard):
        # As torch cuts: the last parts are smaller, or empty, where the size is not a multiple of the number of ranks.
        parts, rank = whole.chunk(mesh.size(), placement.dim), mesh.get_local_rank()
        part = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    local = part.detach().to(device, dtype)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
