"""The training half, as ranks of the notebook half use it: see `base.seam`."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from nb_accelerate.base.config.kwargs import InitProcessGroupKwargs
from nb_accelerate.base.imported import imported
from nb_accelerate.base.seam import TrainingHalf
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import group
from nb_accelerate.training.process.context import default_group
from nb_accelerate.training.process.group_store import RendezvousHandler
from nb_accelerate.training.process.setup import setup_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from nb_accelerate.base.seam import StoreSpec
    from nb_accelerate.training.accelerator import Accelerator
    from nb_accelerate.training.convert.converted import Converted

_OF_A_GROUP = ("process_group", "reducer", "logger")  # attributes of a model that belong to one process group

_waiting: WeakSet[DistributedDataParallel] = WeakSet()  # models whose group is gone, and that have no new one yet


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
    # A `DistributedDataParallel` model refers to the group it was made with. Unpickled, it takes the default group, and
    # makes a reducer for it. That is done here in place, so that optimizers and other holders of the model need not
    # know. Shards of a rank that was replaced are lost, and other ranks may have been stopped with a block half
    # gathered. So the next forward of a sharded model (FSDP2) says what to do.
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


class InRanks(TrainingHalf):
    """The training half, in a process that has imported torch."""

    @override
    def reach_store(
        self, store: StoreSpec, fd: int, is_given_up: Callable[[], bool] = lambda: False
    ) -> RendezvousHandler:
        handler = RendezvousHandler(store, fd, is_given_up)
        handler.install()
        return handler

    @override
    def leave_group(self) -> None:
        # In this order: models are known by the group that they use, and destroying waits for what was not aborted.
        note_models()
        group.abort()
        group.close()

    @override
    def join_group(self, timeout: timedelta) -> dict[str, Any]:
        context = setup_process(options=InitProcessGroupKwargs(timeout=timeout))
        topology, kind = context.topology, context.kind
        if topology.world_size == 1 and kind.start_runtime is None and not dist.is_initialized():
            group.create_alone(kind, context.device)  # so that a cell with a collective can be tried on one rank
        move_models()
        return {
            "rank": topology.rank,
            "local_rank": topology.local_rank,
            "world_size": topology.world_size,
            "device": context.device,
        }

    @override
    def make_accelerator(self) -> Accelerator:
        from nb_accelerate.training.accelerator import Accelerator  # which a plain launch does without

        return Accelerator()

    @override
    def converted(self, names: dict[str, Any]) -> Converted:
        from nb_accelerate.training.convert.converted import Converted

        return Converted(names)

    @override
    def abort_groups(self) -> None:
        group.abort()

    @override
    def close_groups(self) -> None:
        group.close()

    @override
    def forget_groups(self) -> None:
        group.forget()


training_half = InRanks()
