"""Collectives of XLA's runtime, between processes that have one device each."""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import runtime
from typing_extensions import override

from nb_accelerate.base.progress_page import Collective
from nb_accelerate.training.comm.collectives import Collectives
from nb_accelerate.training.comm.torch_distributed import shows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from nb_accelerate.training.comm.collectives import ReduceOp

# Objects travel in buffers of this many bytes, or of a power of two: a program is compiled for each size.
_LEAST_BYTES = 64


class XLACollectives(Collectives):
    """Run the collectives of XLA.

    Operations are recorded, and ranks meet when they are submitted. Ranks must submit the same program, so each
    collective is a program of its own: what a rank alone has recorded before is submitted before.
    """

    packs_bytes = False

    def __init__(self, device: torch.device) -> None:
        self.rank = runtime.global_ordinal()
        self.world_size = runtime.world_size()
        self.device = device

    @override
    @shows(Collective.all_gather)
    def all_gather(self, tensor: Tensor) -> Tensor:
        sent = self._alone(tensor).reshape(-1)
        gathered: Tensor = xm.all_gather(_as_numbers(sent), pin_layout=False)
        _submit()
        return gathered.to(tensor.dtype).view(self.world_size, *tensor.shape).to(tensor.device)

    @override
    @shows(Collective.all_reduce)
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        sent = self._alone(tensor)
        reduced: Tensor = xm.all_reduce(xm.REDUCE_MAX if op == "max" else xm.REDUCE_SUM, _as_numbers(sent))
        _submit()
        return reduced.to(tensor.dtype).view(tensor.shape).to(tensor.device)

    @override
    @shows(Collective.broadcast)
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        # The sum with zeros, which unlike a product with zero is right for infinite numbers too.
        sent = self._alone(tensor if self.rank == source else torch.zeros_like(tensor))
        received: Tensor = xm.all_reduce(xm.REDUCE_SUM, _as_numbers(sent))
        _submit()
        return received.to(tensor.dtype).view(tensor.shape).to(tensor.device)

    @override
    def scatter(self, parts: Tensor | None, like: Tensor, source: int) -> Tensor:
        every = torch.zeros((self.world_size, *like.shape), dtype=like.dtype, device="cpu") if parts is None else parts
        return self.broadcast(every.to(self.device), source)[self.rank].to(like.device)

    @override
    @shows(Collective.all_gather_object)
    def all_gather_object(self, item: Any) -> list[Any]:
        return [pickle.loads(row) for row in self._gather_bytes(pickle.dumps(item))]

    @override
    @shows(Collective.broadcast_object)
    def broadcast_objects(self, items: list[Any], source: int) -> list[Any]:
        sent = pickle.dumps(items) if self.rank == source else b""
        received: list[Any] = pickle.loads(self._gather_bytes(sent)[source])
        return received

    @override
    @shows(Collective.barrier)
    def barrier(self) -> None:
        with _keeping_random_state():
            xm.rendezvous("nb_accelerate")

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over ranks, as a part of the program that is recorded."""
        if self.world_size > 1 and tensors:
            _add_up_(tensors, scale=1.0 / self.world_size)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Replace tensors by those of rank ``source``, all in one program."""
        truths = [tensor for tensor in tensors if tensor.dtype is torch.bool]
        numbers = [tensor for tensor in tensors if tensor.dtype is not torch.bool]
        with torch.no_grad():
            for tensor in truths:
                tensor.copy_(self.broadcast(tensor, source))
            if self.rank != source:
                for tensor in numbers:
                    tensor.zero_()
            _submit()
            if numbers:
                _add_up_(numbers)
            _submit()

    def _gather_bytes(self, sent: bytes) -> list[bytes]:
        sizes = self.all_gather(torch.tensor(len(sent), device="cpu")).tolist()
        room = max(_LEAST_BYTES, 1 << (max(sizes) - 1).bit_length())
        buffer = torch.frombuffer(bytearray(sent.ljust(room, b"\0")), dtype=torch.uint8)
        rows = self.all_gather(buffer)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _alone(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device, when all that this rank has recorded so far was submitted."""
        sent = tensor.detach().to(self.device)
        if not sent.dim():
            sent = sent.reshape(1)
        sent = sent.contiguous()
        _submit()
        return sent


def _add_up_(tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """Replace tensors by their sums over ranks, times a number, in one collective."""
    # In place, XLA adds up what a view shows and leaves the tensor behind it as it was. The gradient of a Linear that
    # has accumulated is such a view, and no flag of it says so.
    with torch.no_grad():
        sums = [tensor.clone() for tensor in tensors]
        xm.all_reduce(xm.REDUCE_SUM, sums, scale=scale)
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total)


def _as_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor that XLA can add: truth values as bytes."""
    return tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


def _submit() -> None:
    """Run what was recorded, and keep the random state, which XLA would change at each submission."""
    with _keeping_random_state():
        torch_xla.sync()


@contextlib.contextmanager
def _keeping_random_state() -> Iterator[None]:
    seed = xm.get_rng_state()
    yield
    xm.set_rng_state(seed)
