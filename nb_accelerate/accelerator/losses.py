"""The loss on the board, without making a device wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nb_accelerate.board import Board
    from nb_accelerate.process.devices import DeviceKind

_EVERY = 0.1
"""Seconds between two looks. People cannot read faster, and a copy from a device costs some microseconds."""


class LossReport:
    """Puts the loss of some steps on the board, and the memory of the device with it.

    A loss on a device is copied without waiting, into memory that stays; what is read there is the newest one that
    has arrived, usually that of the look before.

    Args:
        board: of this process.
        kind: of its device.
    """

    def __init__(self, board: Board, kind: DeviceKind) -> None:
        self._board = board
        self._kind = kind
        self._due = 0.0
        self._arrived: Tensor | None = None

    def report(self, loss: Tensor) -> None:
        """A step has this loss, without dimensions."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EVERY
        if loss.numel() == 1:
            if self._arrived is None:
                pins = self._kind.pins_memory
                self._arrived = torch.full((), float("nan"), dtype=torch.float32, pin_memory=pins)
                self._arrived.copy_(loss.detach().reshape(()))  # the first one may wait
            else:
                self._arrived.copy_(loss.detach().reshape(()), non_blocking=True)
            self._board.loss(self._arrived.item())
        self._board.memory(self._kind.memory_allocated())
