"""What rank 0 sends each rank for one batch: bytes, and a label that says what they are.

The tensors of a batch lie one after the other in one buffer, at offsets that fit every dtype, so that a rank uses
them where they arrived. All else in the batch travels in the label, which is sent only when it changes.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a buffer a tensor lies, and whether it came from the CPU."""

    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_cpu: bool = True


@dataclass(frozen=True, slots=True)
class Label:
    """What the bytes of a rank are.

    Attributes:
        skeleton: the batch without its tensors, pickled; None if there is no batch for this rank.
        places: where its tensors lie, in the order in which they were pickled.
        size: bytes of all tensors.
    """

    skeleton: bytes | None
    places: tuple[Place, ...] = ()
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


def pack(batch: Any) -> tuple[Label, list[Tensor]]:
    """Return the label of a batch, and its tensors."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(batch)
    places = []
    offset = 0
    for tensor in packer.tensors:
        size = tensor.numel() * tensor.element_size()
        places.append(Place(offset, size, tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu"))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Label(file.getvalue(), tuple(places), offset), packer.tensors


def write(label: Label, tensors: list[Tensor], buffer: Tensor) -> None:
    """Put the tensors of a batch into a buffer."""
    for place, tensor in zip(label.places, tensors, strict=True):
        _at(place, buffer).copy_(tensor)


def unpack(label: Label, buffer: Tensor, *, bring_back: bool = False) -> Any:
    """Return the batch that arrived. Its tensors lie in the buffer.

    Args:
        label: what the bytes are.
        buffer: the bytes, on the device that carried them.
        bring_back: copy tensors to the CPU that came from there, instead of leaving them on that device.
    """
    assert label.skeleton is not None
    tensors = [_at(place, buffer) for place in label.places]
    if bring_back:
        tensors = [
            tensor.cpu() if place.of_cpu else tensor for place, tensor in zip(label.places, tensors, strict=True)
        ]
    return _Unpacker(io.BytesIO(label.skeleton), tensors).load()


def _at(place: Place, buffer: Tensor) -> Tensor:
    part: Tensor = buffer[place.offset : place.offset + place.size].view(place.dtype)
    return part.view(place.shape)
