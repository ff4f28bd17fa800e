"""`IdentityMixin`, ranks and device of an `Accelerator`; and `OptionsMixin`, its options, to read and to set."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_flag, check_options
from nb_accelerate.base.config.kwargs import DistributedDataParallelKwargs, ProfileKwargs
from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.process.rng import resolve_rng_types
from nb_accelerate.training.state import AcceleratorState, GradientState
from nb_accelerate.training.state.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.base.config.kwargs import AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs
    from nb_accelerate.base.config.parallelism import ParallelismConfig
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.process.context import ProcessContext
    from nb_accelerate.training.process.rng import RNGType


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


T = TypeVar("T")


class OptionsMixin(CoreMixin):
    """Options, with their defaults filled in. Setting one affects objects that are prepared afterwards."""

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to the device."""
        return self.core.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._change(device_placement=check_flag("device_placement", value))

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers wait for optimizer steps."""
        return self.core.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self._change(step_scheduler_with_optimizer=check_flag("step_scheduler_with_optimizer", value))

    @property
    def rng_types(self) -> list[RNGType]:
        """Which random generators get the state of process 0 at each epoch."""
        return list(self.core.rng_types)

    @rng_types.setter
    def rng_types(self, value: Sequence[str | RNGType]) -> None:
        self._change(rng_types=resolve_rng_types(value))

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders divide data among processes."""
        return self.core.loader

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._change(loader=_given("dataloader_config", value, DataLoaderConfiguration))

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a loader is the total over all processes."""
        return self.core.loader.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get equal batches at the end of the data."""
        return self.core.loader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.core.loader.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether loaders shuffle by a seed and the epoch."""
        return self.core.loader.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.core.loader.non_blocking

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads the data of all processes."""
        return self.core.loader.dispatch_batches

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are those of torchdata."""
        return self.core.loader.use_stateful_dataloader

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of ``mixed_precision="fp16"``; None with other precisions."""
        return self.core.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether models compute in a mixed precision of torch. May be assigned, which changes nothing."""
        # Scripts do so for devices without autocast; here the device table knows what a device computes in.
        return self.core.precision.name != "no"

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        pass

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs:
        """Arguments of DistributedDataParallel."""
        return self.core.handlers.ddp

    @ddp_handler.setter
    def ddp_handler(self, value: DistributedDataParallelKwargs) -> None:
        options = _given("ddp_handler", value, DistributedDataParallelKwargs)
        self._change(handlers=replace(self.core.handlers, ddp=options))
        self.core.strategy.use_ddp_options(options)

    @property
    def scaler_handler(self) -> GradScalerKwargs:
        """Arguments of the scaler."""
        return self.core.handlers.scaler

    @property
    def init_handler(self) -> InitProcessGroupKwargs:
        """Arguments of the process group."""
        return self.core.process.options

    @property
    def autocast_handler(self) -> AutocastKwargs:
        """Arguments of autocast."""
        return self.core.handlers.autocast

    @property
    def profile_handler(self) -> ProfileKwargs:
        """How blocks are profiled."""
        return self.core.handlers.profile

    @profile_handler.setter
    def profile_handler(self, value: ProfileKwargs) -> None:
        options = _given("profile_handler", value, ProfileKwargs)
        self._change(handlers=replace(self.core.handlers, profile=options))
        self.core.recording.profile = options

    def _change(self, **changes: Any) -> None:
        self.core = replace(self.core, **changes)


def _given(name: str, value: T, kind: type[T]) -> T:
    """Check an options object that must not be None, and return it."""
    options = check_options(name, value, kind)
    if options is None:
        raise ConfigError(f"{name}=None is not a {kind.__name__}. Write {name} = {kind.__name__}() for the defaults.")
    return options
