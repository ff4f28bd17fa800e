"""How weights come to a device while another block computes there: two pinned buffers, and a stream.

::

    weights at rest --(thread)--> pinned buffer --(stream)--> memory of the device --(event)--> the block computes
                                  the next block fills the    belongs to the stream, which waits for the block's end
                                  other one; this one again   before it uses the memory again: never more than the
                                  after its copy's event      block that computes and the next one are there
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    Slot = tuple[nn.Module, str]

_ALIGNMENT = 256  # bytes, of weights in a buffer; memory that torch allocates on GPUs has the same


@dataclass
class Resting:
    """What is in the place of a parameter or buffer at rest."""

    slot: Slot
    tensor: Tensor
    mark: tuple[int, int]  # changes if the user changes or replaces the tensor, but for changes through ``.data``


def unchanged(before: Sequence[Resting], now: Sequence[Resting]) -> bool:
    """Return whether what was copied is still what is at rest."""

    def identities(seen: Sequence[Resting]) -> list[Any]:
        return [(each.mark, each.tensor.data_ptr(), each.tensor.shape) for each in seen]

    return identities(before) == identities(now)


@dataclass
class _Swap:
    num_users: int
    resting: Tensor
    seen: tuple[int, int]  # what is in the place meanwhile


class Swaps:
    """Parameters and buffers in whose place is a copy on a device, with what they are at rest.

    One for a schedule, since two threads may use a tied weight in two blocks at once.
    """

    def __init__(self) -> None:
        self._swaps: dict[Hashable, _Swap] = {}

    def __len__(self) -> int:
        return len(self._swaps)

    def at_rest(self, owner: nn.Module, name: str) -> Resting | None:
        """Return the tensor that a module holds under a name at rest; None if it no longer has the name."""
        tensor = find(owner, name)
        if tensor is None:
            return None
        swap = self._swaps.get(_key(owner, name))
        resting = swap.resting if swap is not None else _numbers(tensor)
        return Resting((owner, name), resting, _mark(tensor if isinstance(tensor, nn.Parameter) else resting))

    def swap(self, owner: nn.Module, name: str, copy: Tensor) -> None:
        """Put a copy in a place, unless there is one."""
        key = _key(owner, name)
        if key in self._swaps:
            self._swaps[key].num_users += 1
            return
        resting = self.at_rest(owner, name)
        assert resting is not None
        put(owner, name, copy)
        self._swaps[key] = _Swap(1, resting.tensor, _mark(find(owner, name)))

    def restore(self, owner: nn.Module, name: str) -> None:
        """Put to rest again, unless another block uses the copy. What was written to it is kept, as by a batch norm."""
        key = _key(owner, name)
        swap = self._swaps.get(key)
        if swap is None:
            return
        swap.num_users -= 1
        if swap.num_users:
            return
        tensor = find(owner, name)
        if tensor is not None and _mark(tensor) != swap.seen and tensor.shape == swap.resting.shape:
            swap.resting.copy_(_numbers(tensor))
        put(owner, name, swap.resting)
        del self._swaps[key]


def _mark(tensor: Tensor | None) -> tuple[int, int]:
    """Return what changes if a tensor is replaced, or changed in place but for changes through ``.data``."""
    version = 0 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001 - autograd's own counter
    return id(tensor), version


def _key(owner: nn.Module, name: str) -> Hashable:
    tensor = find(owner, name)
    return id(tensor) if isinstance(tensor, nn.Parameter) else (owner, name)


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.data if isinstance(tensor, nn.Parameter) else tensor


def find(owner: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer; None where a module has none of that name."""
    parameter = owner._parameters.get(name)  # noqa: SLF001 - a property of a parametrized module has the name too
    return owner._buffers.get(name) if parameter is None else parameter  # noqa: SLF001


def put(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a parameter other numbers, or a module another buffer."""
    current = find(owner, name)
    if isinstance(current, nn.Parameter):
        current.data = tensor
    else:
        owner._buffers[name] = tensor  # noqa: SLF001


@dataclass
class DeviceCopies:
    """The weights of a block on a device."""

    tensors: list[Tensor]  # one for each place; the same one where they are tied
    event: Any  # after the copy, on the stream that copies; None where the host has waited for it


class Staging:
    """Copies weights to a device, by a stream of its own.

    The host memory is twice the largest block, which torch rounds up to a power of two. Where none can be pinned, it is
    plain memory. On a device without streams (MPS) tensors are copied one by one.

    Args:
        device: where blocks compute. It is not touched before the first copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.swaps = Swaps()
        self.lock = threading.Lock()
        """Of the state of blocks. Held for microseconds."""
        self.filling = threading.Lock()
        """Of the buffers. Held while one is filled."""
        self._module = torch.get_device_module(device)
        self._has_streams = hasattr(self._module, "Stream") and hasattr(self._module, "Event")
        self._room = 0
        self.clear()

    def clear(self) -> None:
        """Let go of the buffers."""
        self._stream: Any = None
        self._buffers: list[Tensor | None] = [None, None]
        self._events: list[Any] = [None, None]
        self._turn = 0

    def make_room(self, nbytes: int) -> None:
        """Make buffers of at least so many bytes when they are needed."""
        self._room = max(self._room, nbytes)

    @torch.no_grad()
    def send(self, tensors: Sequence[Tensor]) -> DeviceCopies:
        """Begin to copy tensors, each place in memory once. Only one thread at a time, which holds `filling`."""
        unique = {(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype): tensor for tensor in tensors}
        # Else the copies would be inference tensors, which a forward with gradients refuses.
        with torch.inference_mode(False):
            if self._has_streams:
                copies = self._send(list(unique.values()))
            else:
                copies = DeviceCopies([tensor.to(self.device) for tensor in unique.values()], None)
        on_device = dict(zip(unique, copies.tensors, strict=True))
        keys = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        return DeviceCopies([on_device[key] for key in keys], copies.event)

    def _send(self, tensors: Sequence[Tensor]) -> DeviceCopies:
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        *offsets, nbytes = itertools.accumulate(sizes, initial=0)
        # The other buffer: the device may still read this one, for the block before.
        self._turn ^= 1
        buffer = self._free_buffer(nbytes)
        for tensor, offset in zip(tensors, offsets, strict=True):
            _view(buffer, tensor, offset).copy_(tensor)
        event = self._events[self._turn] = self._module.Event()
        if self._stream is None:
            self._stream = self._module.Stream(self.device)
        with self._module.stream(self._stream):
            on_device = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            try:
                on_device.copy_(buffer[:nbytes], non_blocking=True)
            finally:
                event.record(self._stream)
        return DeviceCopies([_view(on_device, *each) for each in zip(tensors, offsets, strict=True)], event)

    def _free_buffer(self, nbytes: int) -> Tensor:
        event, buffer = self._events[self._turn], self._buffers[self._turn]
        if event is not None:
            event.synchronize()  # else the copy before last would send the numbers of this block
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers[self._turn] = None
            self.make_room(nbytes)
            try:
                buffer = torch.empty(self._room, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:  # the system allows no more, or the device knows none
                buffer = torch.empty(self._room, dtype=torch.uint8, device="cpu")
            self._buffers[self._turn] = buffer
        return buffer

    def wait_for(self, copies: DeviceCopies) -> None:
        if copies.event is not None:
            self._module.current_stream(self.device).wait_event(copies.event)

    def use_again(self) -> None:
        """Let memory on the device be written to after all that the current stream has been given so far."""
        if self._stream is not None:
            event = self._module.Event()
            event.record(self._module.current_stream(self.device))
            self._stream.wait_event(event)


def _view(buffer: Tensor, like: Tensor, offset: int) -> Tensor:
    """Return a part of a buffer as a tensor of the same dtype, shape and order of axes."""
    part = buffer[offset : offset + like.nbytes].view(like.dtype)
    return part.as_strided(like.shape, torch.empty_like(like, device="meta").stride(), part.storage_offset())
