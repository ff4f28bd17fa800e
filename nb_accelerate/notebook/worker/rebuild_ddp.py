"""Keep DistributedDataParallel models working when their process group is replaced by a new one.

Such a model refers to the group it was made with. Unpickled, it takes the default group there is, and makes a reducer
for it. That is done here in place, so that optimizers and others who hold the model or its parameters need not know.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

_OF_A_GROUP = ("process_group", "reducer", "logger")
"""Attributes of a model that belong to one process group."""


def ddp_models() -> list[Any]:
    """Return all models of this process that use the default process group. Call it before the group is destroyed."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    distributed: Any = sys.modules.get("torch.distributed")
    if parallel is None or distributed is None or not distributed.is_initialized():
        return []
    group = distributed.group.WORLD
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), parallel.DistributedDataParallel) and one.__dict__.get("process_group") is group
    ]


def rebuild_ddp(models: list[Any]) -> None:
    """Move models to the default process group there is now. Exchanges nothing with other ranks."""
    for model in models:
        state = {name: value for name, value in vars(model).items() if name not in _OF_A_GROUP}
        hooks, state["_comm_hooks"] = state.get("_comm_hooks", []), []
        # The old reducer takes its hooks off the parameters when it goes, which has to be before the new one is made.
        for name in _OF_A_GROUP:
            vars(model).pop(name, None)
        model.__setstate__(state)
        for hook, hook_state in hooks:
            model.register_comm_hook(hook_state, hook)


def restart_accumulation() -> None:
    """Begin new accumulation windows, and drop gradients, because ranks may have failed at different batches."""
    accumulation: Any = sys.modules.get("nb_accelerate.training.optim.accumulation")
    if accumulation is None:
        return
    for one in gc.get_objects():
        if type(one) is accumulation.AccumulationState:
            one.step = 0
            one.window.join()
    shared = sys.modules["nb_accelerate.training.process.context"].training.value
    if shared is not None:
        shared.drop_gradients()
