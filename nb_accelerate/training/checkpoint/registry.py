"""What is in checkpoints besides what was prepared: objects and functions of users, and how far a run is."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nb_accelerate.base.config.env import LAUNCH, Environment
from nb_accelerate.base.devices import find_kind
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nb_accelerate.training.checkpoint.manifest import Manifest


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

        copied_states: list[Any] = tree_map(copied, states)
        for device in copying:
            torch.accelerator.synchronize(device)
        del self._buffers[self._num_used :]
        return copied_states

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


Hook = Callable[..., None]


@dataclass(kw_only=True)
class Progress:
    """How far a run is."""

    global_step: int | None = None  # batches that `Accelerator.resumable` has handed out; None if it does not run
    # numbers that were logged last, by name; as tensors where they are on a device
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    # Ids of the launch of this process: ranks that are started again have the same, and each machine may have one of
    # its own. After `Accelerator.resumable` those of all processes.
    launches: list[str] = field(
        default_factory=lambda: [*filter(None, map(Environment().text, (LAUNCH, "TORCHELASTIC_RUN_ID")))][:1]
    )

    def note(self, values: Mapping[str, Any]) -> None:
        """Keep the numbers among values that are logged."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() == 1 and not (value.is_complex() or value.is_meta):
                    # Reading it would wait for its device. A copy, because sums are often set to zero afterwards.
                    is_here = value.device.type == "cpu"
                    self.metrics[name] = float(value.detach()) if is_here else value.detach().clone()
            elif isinstance(value, Real) and not isinstance(value, bool):  # those of NumPy too
                self.metrics[name] = float(value)

    def read_metrics(self) -> dict[str, float]:
        """Return the numbers that were logged last, by name. Waits for numbers on a device."""
        return {name: float(value) for name, value in self.metrics.items()}


@dataclass(kw_only=True)
class Registry:
    """Objects and hooks that users have registered, and the state of saving and loading."""

    objects: list[Any] = field(default_factory=list)
    # called with models, their weights, and the folder
    before_save: OrderedDict[int, Hook] = field(default_factory=OrderedDict)
    before_load: OrderedDict[int, Hook] = field(default_factory=OrderedDict)  # called with models and the folder
    progress: Progress = field(default_factory=Progress)
    copies: HostCopies = field(default_factory=HostCopies)
    loaded: Manifest | None = None
    loaded_from: Path | None = None
    first_of_run: int = 0  # number of the first checkpoint of this run; earlier ones are always kept

    def add(self, *objects: Any) -> None:
        """Add objects, or none if one has no ``state_dict`` and ``load_state_dict``."""
        for thing in objects:
            if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
                raise ConfigError(
                    f"register_for_checkpointing was given a {type(thing).__name__}. What is to be in a checkpoint "
                    "needs the methods state_dict() and load_state_dict(state)."
                )
        self.objects += objects
