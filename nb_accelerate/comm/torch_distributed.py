"""Collectives carried by torch.distributed's default process group."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import ParamSpec, override

from nb_accelerate.board import Collective, here
from nb_accelerate.comm.collectives import Collectives

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nb_accelerate.comm.collectives import ReduceOp

P = ParamSpec("P")
T = TypeVar("T")

# torch 2.13 renamed it, and warns at each call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _on_board(collective: Collective) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Say on the board that a method waits for other ranks. If it fails, that stays there: it is where it failed."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def reported(*args: P.args, **kwargs: P.kwargs) -> T:
            board = here()
            before = board.wait_in(collective)
            value = method(*args, **kwargs)
            board.enter(before)
            return value

        return reported

    return decorate


class TorchCollectives(Collectives):
    """Collectives of torch.distributed.

    Args:
        device: the device of this rank. A tensor that lives elsewhere takes a detour over it, because a backend
            such as nccl carries tensors of its own kind of device only.
        device_ids: what barriers are told, for backends that want to know.
    """

    def __init__(self, device: torch.device, *, device_ids: list[int] | None = None) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self._device_ids = device_ids

    @override
    @_on_board(Collective.all_gather)
    def all_gather(self, tensor: Tensor) -> Tensor:
        here = self._carried(tensor)
        # Flat, because gloo takes the first dimension of the result for the ranks, and of the input for its own.
        gathered = torch.empty(self.world_size * here.numel(), dtype=here.dtype, device=here.device)
        _all_gather(gathered, here.reshape(-1))
        return gathered.view(self.world_size, *here.shape).to(tensor.device)

    @override
    @_on_board(Collective.all_reduce)
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        here = self._carried(tensor)
        dist.all_reduce(here, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return here.to(tensor.device)

    @override
    @_on_board(Collective.broadcast)
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        here = self._carried(tensor)
        dist.broadcast(here, source)
        return here.to(tensor.device)

    @override
    @_on_board(Collective.scatter)
    def scatter(self, parts: Tensor | None, like: Tensor, source: int) -> Tensor:
        here = self._carried(like)
        rows = None if parts is None else list(self._carried(parts).unbind(0))
        dist.scatter(here, rows, source)
        return here.to(like.device)

    @override
    @_on_board(Collective.all_gather_object)
    def all_gather_object(self, item: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, item)
        return gathered

    @override
    @_on_board(Collective.broadcast_object)
    def broadcast_objects(self, items: list[Any], source: int) -> list[Any]:
        received = list(items)
        dist.broadcast_object_list(received, source)
        return received

    @override
    @_on_board(Collective.barrier)
    def barrier(self) -> None:
        dist.barrier(device_ids=self._device_ids)

    def _carried(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == self.device.type else tensor.to(self.device)
