"""Pack a batch for a rank into bytes, and a layout that says what they are.

The tensors of a batch lie one after the other in one buffer, at offsets that fit every dtype, so that a rank uses
them where they arrived. All else in the batch is in the layout, which has to be sent only when it changes.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 16
"""Of the offset of a tensor; the largest item, of complex128, has 16 bytes."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where in a buffer a tensor lies.

    Attributes:
        offset: bytes before it.
        size: bytes of it.
        shape: of the tensor.
        dtype: of the tensor.
        of_cpu: whether the tensor was on the CPU before it was sent.
    """

    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_cpu: bool = True


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """What the bytes for a rank are.

    Attributes:
        skeleton: the batch without its tensors, pickled; None if there is no batch for this rank.
        slots: where its tensors lie, in the order in which they were pickled.
        size: bytes of all tensors.
    """

    skeleton: bytes | None
    slots: tuple[TensorSlot, ...] = ()
    size: int = 0


class _Packer(pickle.Pickler):
    """Pickles a structure, and puts its tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of a tensor; None pickles any other object as usual."""
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    """Rebuilds a structure around tensors that came by another way."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        """Return the tensor with a number."""
        return self.tensors[pid]


def pack(batch: Any) -> tuple[BatchLayout, list[Tensor]]:
    """Return the layout of a batch, and its tensors."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(batch)
    slots = []
    offset = 0
    for tensor in packer.tensors:
        size = tensor.numel() * tensor.element_size()
        slots.append(TensorSlot(offset, size, tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu"))
        offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return BatchLayout(file.getvalue(), tuple(slots), offset), packer.tensors


def write(layout: BatchLayout, tensors: list[Tensor], buffer: Tensor) -> None:
    """Copy the tensors of a batch into a buffer of at least ``layout.size`` bytes."""
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        _view(slot, buffer).copy_(tensor)


def unpack(layout: BatchLayout, buffer: Tensor, *, bring_back: bool = False) -> Any:
    """Return the batch that arrived. Its tensors lie in the buffer.

    Args:
        layout: what the bytes are; of a batch.
        buffer: the bytes, on the device that carried them.
        bring_back: copy tensors to the CPU that came from there, instead of leaving them on that device.
    """
    assert layout.skeleton is not None
    tensors = [_view(slot, buffer) for slot in layout.slots]
    if bring_back:
        tensors = [tensor.cpu() if slot.of_cpu else tensor for slot, tensor in zip(layout.slots, tensors, strict=True)]
    return _Unpacker(io.BytesIO(layout.skeleton), tensors).load()


def _view(slot: TensorSlot, buffer: Tensor) -> Tensor:
    part: Tensor = buffer[slot.offset : slot.offset + slot.size].view(slot.dtype)
    return part.view(slot.shape)
