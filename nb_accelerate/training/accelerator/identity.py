"""`IdentityMixin`: ranks, the device, and work for the main process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.state import AcceleratorState, GradientState
from nb_accelerate.training.state.identity import Identity

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.base.config.parallelism import ParallelismConfig
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.process.context import ProcessContext


class IdentityMixin(CoreMixin, Identity):
    """Ranks, the device, and work for the main process."""

    @override
    def _process(self) -> ProcessContext:
        return self.core.process

    @override
    def _collectives(self) -> Collectives:
        return self.core.collectives

    @override
    def _place_in_data(self) -> tuple[int, int]:
        return self.core.data_collectives.rank, self.core.data_collectives.world_size

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return self.core.strategy.distributed_type

    @property
    def state(self) -> AcceleratorState:
        """The `AcceleratorState` of this `Accelerator`, for scripts written for accelerate."""
        return AcceleratorState.of(self.core.process, self.core.choices)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin of DeepSpeed that counts for what is prepared now; None where DeepSpeed does not train."""
        return self.state.deepspeed_plugin

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How ranks are laid out; None if nobody has said."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The `torch.distributed.device_mesh.DeviceMesh` that models are sharded over; None if they are not."""
        return self.core.strategy.mesh

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of each layer this process computes, from 0; 0 without tensor parallelism."""
        return self._rank_in("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Which part of each sequence this process computes: 0, because sequences are not split."""
        return 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """Which stage of a model this process computes: 0, because models are not split into stages."""
        return 0

    @property
    def data_parallel_rank(self) -> int:
        """Which copy of a sharded model this process holds a part of, from 0."""
        return self._rank_in("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which part of a sharded model this process holds, from 0; 0 if models are not sharded."""
        return self._rank_in("dp_shard")

    def _rank_in(self, dimension: str) -> int:
        mesh = self.torch_device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        return 0 if mesh is None or dimension not in names else mesh.get_local_rank(dimension)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with FSDP2; its first version is not supported."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether models are sharded with FSDP2, under accelerate's other name."""
        return self.is_fsdp2

    @property
    def fp8_backend(self) -> str | None:
        """What trains layers in 8-bit numbers: ``"AO"``, which is torchao; None if nothing does."""
        return "AO" if self.core.precision.name == "fp8" else None

    @property
    def gradient_state(self) -> GradientState:
        """The `GradientState` of this `Accelerator`, for scripts written for accelerate."""
        return GradientState.of(self.core.choices)
