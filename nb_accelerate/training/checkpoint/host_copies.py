"""Copies of tensors in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from nb_accelerate.base.devices import find_kind

if TYPE_CHECKING:
    from torch import Tensor


class HostCopies:
    """Copies states into buffers that are kept for the next copy: fresh memory takes three times as long to fill.

    Buffers for tensors of a device are pinned where that is possible, so that the device copies by itself.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._num_used = 0

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def clear(self) -> None:
        """Let go of the buffers. A checkpoint that is being written from them holds its own until it is there."""
        self._buffers.clear()

    def copy(self, states: list[Any]) -> list[Any]:
        """Return copies of states (trees of dicts, lists and tuples), when all tensors have arrived.

        They are valid until the next call. A tensor that occurs several times is copied once, unless it is
        sparse or of a subclass.
        """
        self._num_used = 0
        copies: dict[Any, Tensor] = {}
        copying: set[torch.device] = set()

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return deep_copy(leaf)
            if type(leaf) not in {torch.Tensor, torch.nn.Parameter} or leaf.layout is not torch.strided:
                return leaf.detach().cpu().clone()
            signs = leaf.is_conj(), leaf.is_neg()  # of views with other numbers at the same address
            address = leaf.data_ptr()
            key = leaf.device, address, leaf.shape, leaf.stride(), leaf.dtype, signs
            if address and key in copies:  # 0: it has no elements, or its device tells no addresses, as XLA
                return copies[key]
            kind = find_kind(leaf.device.type)
            pins = kind is not None and kind.pins_memory
            buffer = copies[key] = self._buffer_for(leaf, pins)
            buffer.copy_(leaf.detach(), non_blocking=pins)
            if pins:
                copying.add(leaf.device)
            return buffer

        found: list[Any] = tree_map(copied, states)
        for device in copying:
            torch.accelerator.synchronize(device)
        del self._buffers[self._num_used :]
        return found

    def _buffer_for(self, tensor: Tensor, pins: bool) -> Tensor:
        """Return the next buffer: the one of the last copy if it fits, else a new one."""
        index, self._num_used = self._num_used, self._num_used + 1
        if index < len(self._buffers):
            buffer = self._buffers[index]
            if buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
                return buffer
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
        self._buffers[index : index + 1] = [buffer]
        return buffer


def deep_copy(thing: Any) -> Any:
    """Return a copy that does not change with its owner, or the thing itself if it is of a kind that has none."""
    try:
        return copy.deepcopy(thing)
    except Exception:  # the user's, which may be anything
        return thing
