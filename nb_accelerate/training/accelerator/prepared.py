"""`PreparedSlice`: find, unwrap and release what ``prepare`` has wrapped."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from nb_accelerate.training.accelerator.core import Slice
from nb_accelerate.training.accelerator.ownership import verify_device_map

if TYPE_CHECKING:
    from torch import nn

    from nb_accelerate.training.data import DataLoaderShard
    from nb_accelerate.training.optim import AcceleratedOptimizer, AcceleratedScheduler


class PreparedSlice(Slice):
    """Find, unwrap and release prepared objects."""

    # Lists under the names that scripts and libraries look for, to find what was prepared.

    @property
    def _models(self) -> list[nn.Module]:
        return self.core.prepared.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self.core.prepared.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self.core.prepared.schedulers

    @property
    def _dataloaders(self) -> list[DataLoaderShard]:
        return self.core.prepared.loaders

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether the layers of a model were spread over several devices (``device_map="auto"``)."""
        return verify_device_map(model)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model inside a prepared one.

        Example::

            model = accelerator.prepare(model)
            torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")

        Args:
            model: what ``prepare`` returned, or any other model.
            keep_fp32_wrapper: False also undoes what mixed precision did to its forward.
            keep_torch_compile: False also takes it out of `torch.compile`.
        """
        return self.core.strategy.unwrap(
            model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile
        )

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop all references to prepared objects, and release the cached memory of the device.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)

        Args:
            *objects: to be replaced: ``model, optimizer = accelerator.free_memory(model, optimizer)``.

        Returns:
            As many None as objects were given.
        """
        count = len(objects)
        del objects
        self.core.tracker.forget(self.core.prepared.loaders)
        self.core.prepared.clear()
        self.core.registry.copies.clear()
        self.core.accumulation.step = 0
        gc.collect()
        self.core.process.kind.empty_cache()
        self.core.memory.prepared()
        return [None] * count

    def clear(self, *objects: Any) -> list[None]:
        """Do what `free_memory` does; both names are in use."""
        return self.free_memory(*objects)
