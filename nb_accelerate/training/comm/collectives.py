"""The interface that a backend implements: collectives on one tensor, or on one list of objects; and one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


ReduceOp = Literal["sum", "max"]


class Collectives(ABC):
    """Run the collectives of one backend. All ranks call the same methods in the same order.

    `training.comm.operations` calls them, with contiguous tensors of the same shape and dtype on all ranks.
    """

    packs_bytes: bool = True  # many small tensors are cheaper as the bytes of one; False if memory cannot be read so
    num_sharing: int = 1  # processes that count as one, because they read the same rows; see `DataParallelCollectives`

    rank: int
    world_size: int
    device: torch.device  # tensors on another kind of device are copied to it first, and results are copied back

    @property
    def is_first(self) -> bool:
        """Whether this is the process that sends where rank 0 does: the only one, if several count as rank 0."""
        return self.rank == 0

    def verify(  # noqa: B027 - not abstract, since most backends check nothing
        self, operation: str, data: Any, tensors: Sequence[Tensor], *, shapes: bool = True, waits: bool = True
    ) -> None:
        """Compare operation, shapes and dtypes across ranks. Does nothing unless a subclass checks.

        ``data`` is what the operation was given, for the path of a tensor that differs. Without ``shapes``, only the
        number of dimensions is compared. An operation that does not synchronize ranks anyway (``waits``) is checked on
        request only.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of shape (world_size, *tensor.shape), in rank order."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return the sum, or the elementwise maximum, over ranks. May overwrite ``tensor``."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of rank ``source``. May overwrite ``tensor``."""

    @abstractmethod
    def scatter(self, parts: Tensor | None, like: Tensor, source: int) -> Tensor:
        """Return row ``rank`` of ``parts`` of rank ``source``; elsewhere these are None.

        ``like`` has shape, dtype and device of one row, and may be overwritten.
        """

    @abstractmethod
    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. Objects are pickled."""

    @abstractmethod
    def broadcast_objects(self, items: list[Any], source: int) -> list[Any]:
        """Return the objects of rank ``source``, pickled; other ranks give a list of the same length."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called it."""


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
