"""Split tensors into the shards of ranks, and put them together again. See `torch.distributed.tensor.DTensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def shard_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the optimizer state of one parameter, with what is of its shape sharded as it is."""
    return {
        name: shard_like(value, parameter) if getattr(value, "shape", None) == parameter.shape else value
        for name, value in state.items()
    }


def shard_like(value: Any, like: Any) -> Any:
    """Return this rank's shard of a tensor that all ranks have whole, sharded like another one. Exchanges nothing.

    It is returned as it is where one of them is no tensor, or the other one no DTensor.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    mesh = like.device_mesh
    whole = DTensor.from_local(value.detach().to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements)


def gather_whole(value: Any, *, keep: bool) -> Any:
    """Return a copy of a tensor, whole and in host memory; None if it is not to be kept. Collective for a DTensor."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        gathered = _gathered(value.detach())
        return gathered.cpu() if keep else None
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone() if keep else None
    return value


def _gathered(value: Any) -> Any:
    """Return a DTensor whole, gathered along one dimension of its mesh after the other.

    ``full_tensor`` does the same, and logs a warning for each mesh of several dimensions. Dimensions that were
    sharded last are gathered first: strided ones, which FSDP makes of what tensor parallelism has sharded, and then
    from the right.
    """
    from torch.distributed.tensor import Replicate

    value = value.to(value.device_mesh.device_type)  # shards that were offloaded: NCCL takes no tensors of the host
    placements = list(value.placements)
    split = [dim for dim in reversed(range(len(placements))) if not placements[dim].is_replicate()]
    for dim in sorted(split, key=lambda dim: not hasattr(placements[dim], "split_factor")):
        placements[dim] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is this rank's part of a larger one."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: all of a plain tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split(placement: Any) -> bool:
    """Return whether ranks along a dimension of a mesh hold different parts. ``is_shard`` leaves out strided ones."""
    return not placement.is_replicate() and not placement.is_partial()


def settled(gradient: Any) -> Any:
    """Return a gradient without sums that are still to be taken over ranks. Collective if there are some."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(gradient, DTensor):
        return gradient
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=placements) if placements != list(gradient.placements) else gradient
