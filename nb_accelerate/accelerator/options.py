"""What an `Accelerator` was asked for, as scripts read it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.accelerator.core import Slice

if TYPE_CHECKING:
    import torch

    from nb_accelerate.config.kwargs import (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )
    from nb_accelerate.config.loader import DataLoaderConfiguration
    from nb_accelerate.config.profiling import ProfileKwargs
    from nb_accelerate.process.rng import RNGType


class OptionsSlice(Slice):
    """Options, with their defaults filled in."""

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to the device."""
        return self.core.device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers wait for optimizer steps."""
        return self.core.step_scheduler_with_optimizer

    @property
    def rng_types(self) -> list[RNGType]:
        """Which random numbers get the state of process 0 at each epoch."""
        return list(self.core.rng_types)

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders share out data."""
        return self.core.loader

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a loader is that of all processes together."""
        return self.core.loader.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get equal batches at the end of the data."""
        return self.core.loader.even_batches

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
        """What multiplies losses with ``mixed_precision="fp16"``; None with others."""
        return self.core.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether models compute in a mixed precision of torch."""
        return self.core.precision.name != "no"

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs:
        """Arguments of DistributedDataParallel."""
        return self.core.handlers.ddp

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
