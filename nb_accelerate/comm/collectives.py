"""The small interface on which all communication is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

ReduceOp = Literal["sum", "max"]


class Collectives(ABC):
    """What ranks can do together. Every rank calls the same method, in the same order.

    `nb_accelerate.comm.operations` calls these, with contiguous tensors of the same shape and dtype on all ranks.

    Attributes:
        rank: the number of this process.
        world_size: how many there are.
        device: where tensors travel from; those that live elsewhere take a detour over it.
    """

    rank: int
    world_size: int
    device: torch.device

    def verify(  # noqa: B027 - to check nothing is a choice
        self, operation: str, data: Any, tensors: Sequence[Tensor], *, shapes: bool = True, waits: bool = True
    ) -> None:
        """Compare what ranks are about to hand to a collective, if these collectives are to be checked.

        Args:
            operation: what was called.
            data: what it was called with.
            tensors: those in ``data``.
            shapes: whether sizes have to be equal; if not, only the number of dimensions has to.
            waits: whether ranks wait for each other in this operation anyway. Where they do not, a check would make
                them, so it has to be asked for.

        Raises:
            CollectiveMismatchError: ranks called different things, or with tensors of different shapes or dtypes.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of shape (world_size, *tensor.shape), in rank order."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return the sum over ranks, or the largest of each element; ``tensor``, given up by the caller, may change."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of rank ``source``. May change ``tensor``, which the caller gives up."""

    @abstractmethod
    def scatter(self, parts: Tensor | None, like: Tensor, source: int) -> Tensor:
        """Return this rank's row of what rank ``source`` hands in.

        Args:
            parts: on rank ``source`` a tensor of shape (world_size, *like.shape); elsewhere None.
            like: of the shape, dtype and device of a row; its content is not used, and may be changed.
            source: whose rows.
        """

    @abstractmethod
    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. They are pickled."""

    @abstractmethod
    def broadcast_objects(self, items: list[Any], source: int) -> list[Any]:
        """Return the objects of rank ``source``; all ranks hand in a list of that length. They are pickled."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks are here."""
