"""Collectives of a single process: each returns its argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.training.comm.collectives import Collectives

if TYPE_CHECKING:
    from torch import Tensor

    from nb_accelerate.training.comm.collectives import ReduceOp


class SingleCollectives(Collectives):
    """Run the collectives of one process, without torch.distributed."""

    rank = 0
    world_size = 1
    device = torch.device("cpu")

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return tensor

    @override
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor

    @override
    def scatter(self, parts: Tensor | None, like: Tensor, source: int) -> Tensor:
        assert parts is not None
        return parts[0]

    @override
    def all_gather_object(self, item: Any) -> list[Any]:
        return [item]

    @override
    def broadcast_objects(self, items: list[Any], source: int) -> list[Any]:
        return items

    @override
    def barrier(self) -> None:
        return
