"""Collectives between groups of ranks that read the same rows, as the ranks of one tensor-parallel group do.

Neighbouring ranks are in one group, and a group counts as one::

    rank                0   1     2   3
    group (here: rank)    0         1       world_size == 2, num_sharing == 2

Everything travels over all ranks, so that no further process groups are needed, mismatches are found on all of them,
and ranks of one group get the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.training.comm.collectives import Collectives
from nb_accelerate.training.process import rng
from nb_accelerate.training.process.devices import device_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nb_accelerate.training.comm.collectives import ReduceOp


class DataParallelCollectives(Collectives):
    """Collectives in which ranks that read the same rows count once. What they give is the same on all of them."""

    def __init__(self, ranks: Collectives, num_sharing: int) -> None:
        self._ranks = ranks
        self.num_sharing = num_sharing
        self.rank = ranks.rank // num_sharing
        self.world_size = ranks.world_size // num_sharing
        self.device = ranks.device
        self.packs_bytes = ranks.packs_bytes

    @property
    @override
    def is_first(self) -> bool:
        return self._ranks.rank == 0

    @property
    def _is_first_of_group(self) -> bool:
        return self._ranks.rank % self.num_sharing == 0

    def of_first_in_group(self, item: Any) -> Any:
        """Return what the first rank of this rank's group gave. Collective. It is pickled."""
        return self._ranks.all_gather_object(item if self._is_first_of_group else None)[self.rank * self.num_sharing]

    @override
    def verify(
        self, operation: str, data: Any, tensors: Sequence[Tensor], *, shapes: bool = True, waits: bool = True
    ) -> None:
        self._ranks.verify(operation, data, tensors, shapes=shapes, waits=waits)

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._ranks.all_gather(tensor)[:: self.num_sharing].contiguous()

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        counts = op == "max" or self._is_first_of_group
        return self._ranks.all_reduce(tensor if counts else torch.zeros_like(tensor), op)

    @override
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return self._ranks.broadcast(tensor, source * self.num_sharing)

    @override
    def scatter(self, parts: Tensor | None, like: Tensor, source: int) -> Tensor:
        first = source * self.num_sharing
        rows = None
        if self._ranks.rank == first and parts is not None:
            rows = parts.repeat_interleave(self.num_sharing, dim=0)
        return self._ranks.scatter(rows, like, first)

    @override
    def all_gather_object(self, item: Any) -> list[Any]:
        return self._ranks.all_gather_object(item)[:: self.num_sharing]

    @override
    def broadcast_objects(self, items: list[Any], source: int) -> list[Any]:
        return self._ranks.broadcast_objects(items, source * self.num_sharing)

    @override
    def barrier(self) -> None:
        self._ranks.barrier()


def between_groups(ranks: Collectives, num_sharing: int) -> Collectives:
    """Return collectives between groups of ranks that read the same rows; ``ranks`` itself if each reads its own."""
    return ranks if num_sharing == 1 else DataParallelCollectives(ranks, num_sharing)


def share_random_numbers(collectives: Collectives) -> None:
    """Give ranks that read the same rows the random states of the first of them, of Python, numpy and torch."""
    # They compute parts of one model, so what is random in it (dropout, augmentation) has to be alike. Collective,
    # where ranks share rows; else nothing is done.
    if isinstance(collectives, DataParallelCollectives):
        kind = device_kind(collectives.device.type)
        own = rng.capture(kind, all_devices=False)  # ranks compute on different devices: the first on the first, say
        rng.restore(collectives.of_first_in_group(own), kind)
