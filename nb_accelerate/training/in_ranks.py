"""The training half, as ranks of the notebook half use it: see `base.seam`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from typing_extensions import override

from nb_accelerate.base.config.kwargs import InitProcessGroupKwargs
from nb_accelerate.base.seam import TrainingHalf
from nb_accelerate.training.process import group, replaced_groups
from nb_accelerate.training.process.group_store import RendezvousHandler
from nb_accelerate.training.process.setup import setup_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from nb_accelerate.base.seam import StoreSpec
    from nb_accelerate.training.accelerator import Accelerator
    from nb_accelerate.training.convert.converted import Converted


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
        replaced_groups.note_models()
        group.abort()
        group.close()

    @override
    def join_group(self, timeout: timedelta) -> dict[str, Any]:
        context = setup_process(options=InitProcessGroupKwargs(timeout=timeout))
        topology, kind = context.topology, context.kind
        if topology.world_size == 1 and kind.start_runtime is None and not dist.is_initialized():
            group.create_alone(kind, context.device)  # so that a cell with a collective can be tried on one rank
        replaced_groups.move_models()
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
