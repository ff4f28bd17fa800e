"""`RankMemory`: what a rank holds in memory, and how it lies on a progress page."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.progress_page.code_line import text_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LAYOUT = struct.Struct("=8q96s")
SIZE = _LAYOUT.size
"""Bytes."""


@dataclass(frozen=True)
class RankMemory:
    """What a rank held in memory when it was measured last. All numbers are bytes; 0 also means not known."""

    parameters: int = 0  # of prepared models: its shards, where they are sharded
    gradients: int = 0
    optimizer: int = 0  # states, with weights that an engine keeps for them in float32
    pending: int = 0  # what gradients and states will take that come with the first backward and the first step
    base: int = 0  # what else it held when models had been prepared: libraries and data, on a device next to nothing
    used: int = 0  # all that it held
    limit: int = 0  # the most that it could hold
    peak: int = 0  # the most that it held
    sharding: str = ""  # how models are spread over ranks, in a few words; "" if they are not

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer states together: what does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def activations(self) -> int:
        """What else was used, above all activations; 0 if the whole is not known."""
        return max(0, self.used - self.base - self.states)

    def write(self, memory: memoryview, at: int) -> None:
        """Write it to a progress page, from byte ``at`` on."""
        *numbers, sharding = dataclasses.astuple(self)
        _LAYOUT.pack_into(memory, at, *numbers, sharding.encode(errors="replace")[:95])

    @classmethod
    def read(cls, memory: Buffer, at: int) -> RankMemory:
        """Read what `write` wrote; values that make no sense are 0."""
        *numbers, sharding = _LAYOUT.unpack_from(memory, at)
        values: list[Any] = [*(max(0, number) for number in numbers), text_of(sharding)]
        return cls(*values)
