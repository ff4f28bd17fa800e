"""Cut the rows of a call into a part for each rank, and join what the parts give. Both can be differentiated.

What users' code sees is *whole*: equal on all ranks. Inside of a model each rank has its *part*. Gradients inside are
``world_size`` times those of one process, so that the mean over ranks of a parameter's gradient is the gradient of one
process, whether the parameter is used in parts, in what is whole (a penalty on the weights), or in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.autograd import Function
from typing_extensions import override

from nb_accelerate.training.data.plan.plan import bounds
from nb_accelerate.training.pytree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from nb_accelerate.training.comm import Collectives

Join: TypeAlias = "int | Literal['mean', 'sum', 'same']"
"""How parts of an output make the whole: concatenated along a dimension, as mean or sum over rows, or equal."""


class PartsDiffer(Exception):  # noqa: N818 - never seen by users: the call is made once more, whole
    """Parts of an output that were equal so far are not."""


@dataclass(frozen=True)
class Cut:
    """How calls of one kind are cut, and their results joined."""

    dims: tuple[int | None, ...]  # that hold the rows of each argument; None if all ranks get all of it
    joins: tuple[Join, ...]  # for each tensor that is returned

    def rows(self, tensors: Sequence[Tensor]) -> set[int]:
        """Return how many rows arguments have; more than one number if they do not agree."""
        return {tensor.shape[dim] for tensor, dim in zip(tensors, self.dims, strict=True) if dim is not None}

    def own_part(self, arguments: Any, collectives: Collectives) -> Any:
        """Return this rank's part of arguments; the gradients of all parts come back."""

        def part(tensor: Tensor, dim: int | None) -> Tensor:
            if dim is None:
                return tensor
            if tensor.requires_grad and torch.is_grad_enabled():
                return _Part.apply(tensor, dim, collectives)  # type: ignore[no-any-return,no-untyped-call]
            return _narrowed(tensor, dim, collectives)

        return _mapped(part, arguments, self.dims)

    def joined(self, part: Any, rows: int, collectives: Collectives) -> Any:
        """Return the whole from the part that each rank has computed."""
        first, end = bounds(rows, collectives.rank, collectives.world_size)

        def join(tensor: Tensor, how: Join) -> Tensor:
            if how == "same":
                parts = collectives.all_gather(tensor.detach().to(torch.float64))
                if not torch.allclose(parts, parts[:1], rtol=1e-3, equal_nan=True):
                    raise PartsDiffer
                if not tensor.requires_grad:
                    return tensor
            if isinstance(how, int):
                return _Whole.apply(tensor, how, rows, collectives)  # type: ignore[no-any-return,no-untyped-call]
            weight = 1.0 if how == "sum" else (end - first) / rows
            return _Total.apply(tensor, weight, collectives)  # type: ignore[no-any-return,no-untyped-call]

        return _mapped(join, part, self.joins)


def narrowed(data: Any, dims: Sequence[int | None], first: int, end: int) -> Any:
    """Return copies of some rows of arguments, which are leaves."""

    def some(tensor: Tensor, dim: int | None) -> Tensor:
        part = tensor.detach() if dim is None else tensor.detach().narrow(dim, first, end - first)
        return part.clone().requires_grad_(tensor.requires_grad)

    return _mapped(some, data, dims)


def _mapped(function: Callable[[Tensor, Any], Tensor], data: Any, ways: Sequence[Any]) -> Any:
    each = iter(ways)
    return map_tensors(lambda tensor: function(tensor, next(each)), data)


def _narrowed(whole: Tensor, dim: int, collectives: Collectives) -> Tensor:
    first, end = bounds(whole.shape[dim], collectives.rank, collectives.world_size)
    return whole.narrow(dim, first, end - first)


class _Part(Function):
    """This rank's part of what is whole."""

    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, dim: int, collectives: Collectives) -> Tensor:
        ctx.dim, ctx.rows, ctx.collectives = dim, whole.shape[dim], collectives
        return _narrowed(whole, dim, collectives).clone()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        whole = _Whole.apply(gradient, ctx.dim, ctx.rows, ctx.collectives)  # type: ignore[no-untyped-call]
        return whole / ctx.collectives.world_size, None, None


class _Whole(Function):
    """What is whole, of all parts; ranks may have different numbers of rows."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, dim: int, rows: int, collectives: Collectives) -> Tensor:
        ctx.dim, ctx.collectives, ranks = dim, collectives, collectives.world_size
        sent = part.detach().movedim(dim, 0)
        sent = sent.to(torch.uint8) if sent.dtype is torch.bool else sent
        missing = -(-rows // ranks) - sent.shape[0]
        if missing:
            sent = torch.cat([sent, sent.new_zeros(missing, *sent.shape[1:])])
        ends = [bounds(rows, rank, ranks) for rank in range(ranks)]
        parts = collectives.all_gather(sent.contiguous())
        whole = torch.cat([padded[: end - first] for padded, (first, end) in zip(parts, ends, strict=True)])
        return whole.to(part.dtype).movedim(0, dim)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part = _Part.apply(gradient, ctx.dim, ctx.collectives)  # type: ignore[no-untyped-call]
        return part * ctx.collectives.world_size, None, None, None


class _Total(Function):
    """The weighted sum of all parts."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, weight: float, collectives: Collectives) -> Tensor:
        ctx.scale = weight * collectives.world_size
        return collectives.all_reduce(part.detach() * weight)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.scale, None, None
