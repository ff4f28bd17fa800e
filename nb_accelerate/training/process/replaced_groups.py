"""Take models over to a new process group, which replaces one that has lost a rank.

A `DistributedDataParallel` model refers to the group it was made with. Unpickled, it takes the default group there is,
and makes a reducer for it. That is done here in place, so that optimizers and others who hold the model or its
parameters need not know.

Shards of a rank that was replaced are lost, and the other ranks may have been stopped with a block half gathered. So
the next forward of a sharded model (FSDP2) says what to do, and does not fail in words that say nothing of that.
"""

from __future__ import annotations

import gc
from typing import Any, NoReturn
from weakref import WeakSet

from torch.nn.parallel import DistributedDataParallel

from nb_accelerate.base.imported import imported
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process.context import default_group

_OF_A_GROUP = ("process_group", "reducer", "logger")
"""Attributes of a model that belong to one process group."""

_waiting: WeakSet[DistributedDataParallel] = WeakSet()
"""Models whose group is gone, and that have no new one yet."""


def note_models() -> None:
    """Note the models that use the default process group, which is about to be destroyed. Exchange nothing."""
    group = default_group()
    if group is None:
        return
    sharded = getattr(imported("torch.distributed.fsdp"), "FSDPModule", ())
    for thing in gc.get_objects():  # torch keeps no list of its models, and users wrap models themselves
        kind = type(thing)  # not isinstance(), which runs code of users
        if issubclass(kind, DistributedDataParallel) and vars(thing).get("process_group") is group:
            _waiting.add(thing)
        elif issubclass(kind, sharded):
            thing.register_forward_pre_hook(_refuse, prepend=True)


def move_models() -> None:
    """Move the models that were noted to the default process group there is now. Exchange nothing."""
    while _waiting:
        _move(_waiting.pop())


def _move(model: DistributedDataParallel) -> None:
    state = {name: value for name, value in vars(model).items() if name not in _OF_A_GROUP}
    hooks, state["_comm_hooks"] = state.get("_comm_hooks", []), []
    # The old reducer takes its hooks off the parameters when it goes, which has to be before the new one is made.
    for name in _OF_A_GROUP:
        vars(model).pop(name, None)
    model.__setstate__(state)  # type: ignore[no-untyped-call]
    for hook, hook_state in hooks:
        model.register_comm_hook(hook_state, hook)


def _refuse(model: Any, _: object) -> NoReturn:
    raise ConfigError(
        f"This {type(model).__name__} was sharded before a rank failed. The ranks have met again since, and its shards "
        "may not fit each other. Make it again and load a checkpoint: model = accelerator.prepare(Model()), "
        "accelerator.load_state(...)."
    )
