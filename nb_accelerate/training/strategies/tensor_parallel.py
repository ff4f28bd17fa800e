"""Train one model on all ranks together, each of which computes a part of every layer of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.training.comm.data_parallel import share_random_numbers
from nb_accelerate.training.strategies.averaging import AveragesGradients, GradientAverage
from nb_accelerate.training.strategies.dtensors import DTensorStrategy, use_shards
from nb_accelerate.training.strategies.layer_plan import TensorParallelizer
from nb_accelerate.training.strategies.sharding import Filler, check_weights, note_replaced
from nb_accelerate.training.strategies.unwrapping import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import nn

    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.strategies.dtensors import MeshLayout


class TensorParallelStrategy(DTensorStrategy):
    """Train one model on all ranks together, each of which computes a part of every layer of a plan."""

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        distributed_type: DistributedType,
        *,
        layout: MeshLayout,
        plan: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(device, collectives, distributed_type, layout=layout)
        self._plan = plan

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        inner = innermost(model)
        check_weights(inner, self.collectives)
        fill = Filler(self.collectives, self.device)
        with note_replaced(inner):
            TensorParallelizer(self.mesh, self._plan).parallelize(inner, fill)
            fill(inner)
        share_random_numbers(self.data_collectives)
        return model

    @override
    def complete_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[bool], None] | None:
        def equal() -> list[AveragesGradients]:  # ranks read the same rows, so that their gradients are equal
            return [AveragesGradients(model.parameters()) for model in models]

        return GradientAverage(optimizer, self.collectives, equal, renew=use_shards)
