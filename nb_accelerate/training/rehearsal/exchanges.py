"""What ranks exchange in a rehearsal: nothing, but for what rank 0 sends, which the others read from a file.

::

    rank 0 ──> tape ──> the others       rank 0 never waits; who reads waits until it has sent, or has ended
"""

from __future__ import annotations

import os
import pickle
import time
from typing import IO, TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.training.comm.torch_distributed import TorchCollectives

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from nb_accelerate.training.comm.collectives import ReduceOp
    from nb_accelerate.training.rehearsal.torch_parts import Collective

_LARGEST = 1 << 26
"""Bytes. A larger tensor that rank 0 sends is a weight, which the others have as they made it."""

_PADDED = "_is_padded_in_rehearsal"
"""Attribute of a tensor."""

_POLL = 0.001
"""Seconds between two looks at the tape."""


class Tape:
    """The file with what rank 0 sends. A rank that is not in step with it may read what was meant for another call."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._writes = writes
        self._file: IO[bytes] = path.open("ab" if writes else "rb")

    def write(self, value: Any) -> None:
        """Append what rank 0 sends; None at its end."""
        data = pickle.dumps(value)
        self._file.write(len(data).to_bytes(8, "little") + data)
        self._file.flush()

    def read(self) -> Any:
        """Return what rank 0 sends next, when it is there; None if it has ended before."""
        data = self._read(self._read_size())
        value = pickle.loads(data)
        if value is None:
            self._file.seek(-len(data) - 8, os.SEEK_CUR)
        return value

    def _read_size(self) -> int:
        return int.from_bytes(self._read(8), "little")

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._file.read(size - len(data))
            if len(data) < size:
                time.sleep(_POLL)
        return data

    def of_rank_0(self, value: Any) -> Any:
        """Return the value that rank 0 gives."""
        if not self._writes:
            return self.read()
        self.write(value)
        return value

    def carry(self, collective: Collective, ranks: Sequence[int], rank: int) -> None:
        """Write, or put in place, the tensors of a collective that rank 0 is the source of."""
        received = collective.received
        if sum(tensor.nbytes for tensor in received) > _LARGEST:
            return
        if self._writes:
            given = collective.given
            is_shared_out = collective.name == "scatter"
            self.write({each: [given[each]] if is_shared_out else given for each in ranks})
        elif isinstance(sent := self.read(), dict):  # else rank 0 has ended, or is not in step
            for mine, value in zip(received, sent.get(rank, ()), strict=False):
                if mine.shape == value.shape and mine.dtype == value.dtype:
                    mine.copy_(value)


class RehearsedCollectives(TorchCollectives):
    """Exchange nothing, as torch's group for this does, and name what was asked for as users know it.

    Other ranks are taken to have the numbers that this one has.
    """

    packs_bytes = False

    def __init__(self, device: torch.device, told: Callable[[str], None]) -> None:
        super().__init__(device)
        self._told = told

    @override
    def verify(
        self, operation: str, data: Any, tensors: Sequence[Tensor], *, shapes: bool = True, waits: bool = True
    ) -> None:
        given = ", ".join(described(tensor) if shapes else f"{tensor.dim()} dimensions" for tensor in tensors)
        self._told(f"{operation} of {given or 'nothing'}")
        if operation == "pad_across_processes":  # which returns these tensors where no other rank has longer ones
            for tensor in tensors:
                vars(tensor)[_PADDED] = True

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        reduced = super().all_reduce(tensor, op)
        return reduced if op == "max" else reduced * self.world_size


def described(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor: ``float32 (4, 2)``; or its dimensions, where ranks pad it to the longest."""
    shape = f"{tensor.dim()} dimensions" if _PADDED in vars(tensor) else tuple(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
