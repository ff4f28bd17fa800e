"""What users add to checkpoints: objects with a state, and functions that are called before weights move."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nb_accelerate.errors import ConfigError

Hook = Callable[..., None]


@dataclass(kw_only=True)
class Registry:
    """What was added so far.

    Attributes:
        objects: in the order in which they were registered.
        before_save: called with models, their weights, and the folder.
        before_load: called with models and the folder.
    """

    objects: list[Any] = field(default_factory=list)
    before_save: OrderedDict[int, Hook] = field(default_factory=OrderedDict)
    before_load: OrderedDict[int, Hook] = field(default_factory=OrderedDict)

    def add(self, *objects: Any) -> None:
        """Add objects.

        Raises:
            ConfigError: one has no ``state_dict`` and ``load_state_dict``. None was added.
        """
        for one in objects:
            if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
                raise ConfigError(
                    f"register_for_checkpointing was given a {type(one).__name__}. What is to be in a checkpoint needs "
                    "the methods state_dict() and load_state_dict(state)."
                )
        self.objects += objects
