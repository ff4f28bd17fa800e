"""Pack a batch into bytes and a layout that describes them.

The tensors and arrays of a batch lie one after the other in one buffer, at offsets aligned for every dtype, so that a
receiver makes views of the buffer. Everything else is in the layout, which is sent only when it changes: also the
classes of tensors, and what sparse, nested and quantized tensors are besides the tensors that they are made of.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from nb_accelerate.base.devices import CPU
from nb_accelerate.training.pytree import map_tensors, tensors_in

ALIGNMENT_BYTES = 16
"""Alignment of the offset of a tensor, in bytes: the size of the largest item, complex128."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The position of a tensor in a buffer, in bytes."""

    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    was_on_cpu: bool = True  # before it was sent
    in_object: bool = False  # that moves itself to a device, and knows which of its tensors stay on the CPU


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A description of the bytes for a rank."""

    skeleton: bytes | None  # the batch without its tensors, pickled; None if there is no batch for this rank
    slots: tuple[TensorSlot, ...] = ()  # in the order in which tensors were pickled
    size: int = 0  # bytes of all tensors


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a structure without its tensors and arrays, collected in ``tensors``. Classes may be of a notebook."""

    def __init__(self, file: io.BytesIO, in_containers: set[int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.in_object: list[bool] = []  # for each of the tensors
        self._in_containers = in_containers
        self._of_objects: dict[int, tuple[Tensor, Any]] = {}  # by id, which the tensor keeps

    def persistent_id(self, obj: Any) -> Any:
        """Return how `_Unpacker.persistent_load` finds a tensor or array; None for other objects, which are pickled."""
        if type(obj) is np.ndarray and not obj.dtype.hasobject:
            numbers = np.require(obj, requirements=["C", "W"]).reshape(-1).view(np.uint8)
            self.tensors.append(torch.from_numpy(numbers))
            self.in_object.append(False)
            return {"index": len(self.tensors) - 1, "dtype": obj.dtype, "shape": obj.shape}
        if not isinstance(obj, Tensor):
            return None
        if obj.is_nested and obj.layout is torch.strided:  # pickled, its parts would be read at wrong places
            return obj.unbind()
        # Whether a tensor is its numbers, shape and dtype, besides its class and attributes.
        if not (
            obj.layout is torch.strided
            and not obj.is_nested
            and not obj.is_quantized
            and type(obj).__torch_dispatch__ is Tensor.__torch_dispatch__
        ):
            return None
        index = len(self.tensors)
        kind = type(obj)
        pid = index if kind is Tensor else [index, kind, obj.__dict__]
        in_object = id(obj) not in self._in_containers
        if in_object:  # one that refers to a tensor twice, as a jagged tensor does, gets the same tensor twice
            _, known = self._of_objects.setdefault(id(obj), (obj, pid))
            if known is not pid:
                return known
        self.in_object.append(in_object)
        self.tensors.append(obj.detach() if kind is Tensor else obj.detach().as_subclass(Tensor))
        return pid


class _Unpacker(pickle.Unpickler):
    """Unpickles a structure that `_Packer` pickled, with the tensors given."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        """Return what `_Packer.persistent_id` stands for: a tensor, an array, a nested tensor, one of a subclass."""
        if isinstance(pid, int):
            return self.tensors[pid]
        if isinstance(pid, dict):
            return self.tensors[pid["index"]].cpu().numpy().view(pid["dtype"]).reshape(pid["shape"])
        if isinstance(pid, tuple):
            return torch.nested.as_nested_tensor(list(pid))
        index, kind, attributes = pid
        tensor = self.tensors[index].as_subclass(kind)
        tensor.__dict__.update(attributes)
        return tensor


def pack(batch: Any) -> tuple[BatchLayout, list[Tensor]]:
    """Return the layout of a batch, and its tensors, detached. One that occurs twice in containers is packed twice."""
    file = io.BytesIO()
    packer = _Packer(file, _in_containers(batch))
    packer.dump(batch)
    slots = []
    offset = 0
    for tensor, in_object in zip(packer.tensors, packer.in_object, strict=True):
        size = tensor.numel() * tensor.element_size()
        was_on_cpu = tensor.device.type == CPU.name
        slots.append(TensorSlot(offset, size, tuple(tensor.shape), tensor.dtype, was_on_cpu, in_object))
        offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return BatchLayout(file.getvalue(), tuple(slots), offset), packer.tensors


def write(layout: BatchLayout, tensors: list[Tensor], buffer: Tensor) -> None:
    """Copy the tensors of a batch into a buffer of bytes, which begin at a multiple of `ALIGNMENT_BYTES` in memory."""
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        _view(slot, buffer).copy_(tensor)


def unpack(layout: BatchLayout, buffer: Tensor, *, bring_back: bool = False) -> Any:
    """Return the batch that `write` wrote. Its tensors are views of the buffer.

    With ``bring_back``, tensors that were on the CPU are copied back to it from the device that received the bytes.
    Those in objects that move themselves always are: a packed sequence has tensors that must be on the CPU.
    """
    assert layout.skeleton is not None
    tensors = [
        _view(slot, buffer).cpu() if slot.was_on_cpu and (bring_back or slot.in_object) else _view(slot, buffer)
        for slot in layout.slots
    ]
    return _Unpacker(io.BytesIO(layout.skeleton), tensors).load()


def _in_containers(batch: Any) -> set[int]:
    """Return the ids of tensors in lists, mappings and the like, and in encodings, all of whose tensors move."""
    ids: set[int] = set()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            ids.add(id(leaf))
        elif isinstance(leaf, Mapping):
            ids.update(map(id, tensors_in(leaf)))
        return leaf

    map_tensors(note, batch, movable=True)
    return ids


def _view(slot: TensorSlot, buffer: Tensor) -> Tensor:
    part: Tensor = buffer[slot.offset : slot.offset + slot.size].view(slot.dtype)
    return part.view(slot.shape)
