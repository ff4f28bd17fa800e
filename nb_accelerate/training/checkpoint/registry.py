"""What is in checkpoints besides what was prepared: objects and functions of users, and how far a run is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nb_accelerate.base.config.env import Environment
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.checkpoint.host_copies import HostCopies

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nb_accelerate.training.checkpoint.manifest import Manifest

Hook = Callable[..., None]


@dataclass(kw_only=True)
class Progress:
    """How far a run is."""

    global_step: int | None = None  # batches that `Accelerator.resumable` has handed out; None if it does not run
    # numbers that were logged last, by name; as tensors where they are on a device
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    # ids of the launch of this process; after `Accelerator.resumable`, of all processes
    launches: list[str] = field(default_factory=lambda: list(filter(None, [Environment().launch])))

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
