"""Collectives on the default process group of torch.distributed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import ParamSpec, override

from nb_accelerate.base.progress_page import Collective, here
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.comm.collectives import Collectives

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nb_accelerate.training.comm.collectives import ReduceOp

P = ParamSpec("P")
T = TypeVar("T")

# torch 2.13 renamed all_gather_into_tensor, and warns at each call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def shows(collective: Collective) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method so that the rank's progress shows which collective it waits in.

    After a failure it keeps showing the collective, as the place of the failure.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def reported(*args: P.args, **kwargs: P.kwargs) -> T:
            page = here()
            before = page.wait_in(collective)
            try:
                value = method(*args, **kwargs)
            except ValueError as error:
                if dist.is_initialized():
                    raise
                raise ConfigError(
                    f"{collective.name} needs the process group, which end_training() has closed. Call end_training() "
                    "last; or go on with a new Accelerator()."
                ) from error
            page.enter(before)
            return value

        return reported

    return decorate


class TorchCollectives(Collectives):
    """Run the collectives of torch.distributed.

    Tensors on another device are copied to this rank's: a backend such as nccl takes tensors of one kind of device
    only, and for a device of another number it would connect ranks again, two of them by the same device. For barriers,
    nccl takes ``device_ids``, gloo takes None.
    """

    def __init__(self, device: torch.device, *, device_ids: list[int] | None = None) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self._device_ids = device_ids

    @override
    @shows(Collective.all_gather)
    def all_gather(self, tensor: Tensor) -> Tensor:
        sent = self._on_device(tensor)
        # Flat: gloo expects dimension 0 of the output to be world_size times the input's, which scalars lack.
        gathered = torch.empty(self.world_size * sent.numel(), dtype=sent.dtype, device=sent.device)
        _all_gather(gathered, sent.reshape(-1))
        return gathered.view(self.world_size, *sent.shape).to(tensor.device)

    @override
    @shows(Collective.all_reduce)
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        reduced = self._on_device(tensor)
        dist.all_reduce(reduced, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return reduced.to(tensor.device)

    @override
    @shows(Collective.broadcast)
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        received = self._on_device(tensor)
        dist.broadcast(received, source)
        return received.to(tensor.device)

    @override
    @shows(Collective.scatter)
    def scatter(self, parts: Tensor | None, like: Tensor, source: int) -> Tensor:
        received = self._on_device(like)
        rows = None if parts is None else list(self._on_device(parts).unbind(0))
        dist.scatter(received, rows, source)
        return received.to(like.device)

    @override
    @shows(Collective.all_gather_object)
    def all_gather_object(self, item: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, item)
        return gathered

    @override
    @shows(Collective.broadcast_object)
    def broadcast_objects(self, items: list[Any], source: int) -> list[Any]:
        received = list(items)
        dist.broadcast_object_list(received, source)
        return received

    @override
    @shows(Collective.barrier)
    def barrier(self) -> None:
        dist.barrier(device_ids=self._device_ids)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)  # itself if it is there
