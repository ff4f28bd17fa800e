"""``prepare``: wrap models, optimizers, loaders and schedulers for the run."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nb_accelerate.accelerator.compiling import compiled
from nb_accelerate.accelerator.core import Slice
from nb_accelerate.accelerator.ownership import check_owned, verify_device_map
from nb_accelerate.config.env import Environment
from nb_accelerate.config.options import note_use
from nb_accelerate.data import DataLoaderShard, check_alike, prepare_data_loader
from nb_accelerate.errors import ConfigError
from nb_accelerate.optim import AcceleratedOptimizer, AcceleratedScheduler, OptimizerTraining
from nb_accelerate.state import GradientState
from nb_accelerate.strategies.unwrapping import extract_model_from_parallel, innermost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.data.dispatcher import SliceFunction

logger = logging.getLogger("nb_accelerate")


class PreparingSlice(Slice):
    """What wraps and unwraps the user's objects."""

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Make objects ready for the run. Any number, in any order; they come back in that order.

        Models are moved to the device and wrapped, optimizers and schedulers respect accumulation windows,
        loaders yield this process's part. What this `Accelerator` prepared before is returned as it is, and so is None;
        what another one prepared belongs to this one from then on.

        Args:
            *args: models, optimizers, loaders and learning rate schedulers.
            device_placement: for each object, whether to move it to the device; by default as the `Accelerator`
                says.

        Returns:
            The one object, or a tuple of all.

        Raises:
            ConfigError: an object is of none of these kinds, or ``device_placement`` has another length.
            CollectiveMismatchError: ranks prepare loaders of different lengths together with a model.
        """
        if device_placement is None:
            places = [self.core.device_placement] * len(args)
        elif len(device_placement) == len(args):
            places = list(device_placement)
        else:
            raise ConfigError(
                f"device_placement has {len(device_placement)} entries for {len(args)} objects. "
                "Write one for each object."
            )
        results: list[Any] = [None] * len(args)
        for number in sorted(range(len(args)), key=lambda number: self._turn_of(args[number])):
            results[number] = self._prepare_one(args[number], places[number])
        has_model = any(isinstance(item, nn.Module) for item in args)
        # All ranks are here for the sake of a model. One that prepares a loader by itself must not wait for others.
        if has_model or Environment().debug_mode:
            check_alike(self.core.collectives, [item for item in results if isinstance(item, DataLoaderShard)])
        return results[0] if len(results) == 1 else tuple(results)

    def _prepare_one(self, item: Any, place: bool) -> Any:
        if self._is_scheduler(item):
            return self.prepare_scheduler(item)
        if isinstance(item, AcceleratedScheduler):
            return self.prepare_scheduler(item)  # type: ignore[arg-type]  # one that another Accelerator prepared
        if isinstance(item, nn.Module):
            return self.prepare_model(item, device_placement=place)
        if isinstance(item, torch.optim.Optimizer):
            return self.prepare_optimizer(item)
        if isinstance(item, DataLoader):
            return self.prepare_data_loader(item, device_placement=place)
        if item is None:
            return item
        raise ConfigError(
            f"prepare was given a {type(item).__name__}, which is not a model (torch.nn.Module), an optimizer "
            "(torch.optim.Optimizer), a loader (torch.utils.data.DataLoader) or a scheduler "
            "(torch.optim.lr_scheduler.LRScheduler). Leave it out; what needs no preparation works as it is."
        )

    def _turn_of(self, item: Any) -> int:
        """Models first: an optimizer's state follows them to the device. Schedulers look for prepared optimizers."""
        return 0 if isinstance(item, nn.Module) else 2 if self._is_scheduler(item) else 1

    @staticmethod
    def _is_scheduler(item: Any) -> bool:
        return isinstance(item, LRScheduler)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Make a model ready for the run.

        Args:
            model: on any device.
            device_placement: move it to the device; by default as the `Accelerator` says.
            evaluation_mode: it will not be trained, so its gradients need not travel.

        Raises:
            ConfigError: the model is spread over several devices, and there are several ranks.
        """
        core = self.core
        if any(known is model for known in core.prepared.models):
            return model
        spread = verify_device_map(model)
        if spread and core.collectives.world_size > 1:
            raise ConfigError(
                f"This {type(model).__name__} has its layers on several devices (device_map), and there are "
                f"{core.collectives.world_size} ranks that would each want all of it. Load it without device_map to "
                "train it on all ranks, or start one process."
            )
        place = core.device_placement if device_placement is None else device_placement
        core.precision.prepare_model(innermost(model))
        prepared = core.strategy.prepare_model(model, place=place and not spread, training=not evaluation_mode)
        prepared = compiled(prepared, core.dynamo)
        note_use(core.dynamo, "the model that was prepared", advice="Set it before accelerator.prepare(model).")
        core.prepared.models.append(prepared)
        core.shared.models.add(prepared)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Make an optimizer ready for the run.

        Args:
            optimizer: over the parameters of a model, which may be prepared before or after.
            device_placement: move the state it may have to where its parameters are; by default as the
                `Accelerator` says.
        """
        core = self.core
        if any(known is optimizer for known in core.prepared.optimizers):
            return optimizer  # type: ignore[return-value]  # so it is a prepared one
        inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if isinstance(optimizer, AcceleratedOptimizer) and optimizer.is_lent_scaler:
            prepared = optimizer
        else:
            training = OptimizerTraining(
                accumulation=core.accumulation,
                step=core.precision.bind(inner),
                scaler=core.precision.scaler,
                before_first_step=partial(check_owned, models=core.shared.models),
                complete_gradients=core.strategy.complete_gradients(inner, core.shared.models),
            )
            if isinstance(optimizer, AcceleratedOptimizer):
                prepared = optimizer
                prepared.join(training)
            else:
                place = core.device_placement if device_placement is None else device_placement
                prepared = AcceleratedOptimizer(optimizer, place, training=training)
        core.prepared.optimizers.append(prepared)
        core.shared.add_optimizer(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: SliceFunction | None = None,
    ) -> DataLoaderShard:
        """Make a loader yield this process's part of its data.

        Args:
            data_loader: the same on all processes.
            device_placement: move batches to the device; by default as the `Accelerator` says.
            slice_fn_for_dispatch: cuts a batch into parts, with ``dispatch_batches=True``: called as
                ``slice_fn(batch, slice(first, end), process_index=..., num_processes=...)``.

        Raises:
            ConfigError: the loader cannot be shared out.
            MissingDependencyError: a stateful loader is asked for, and torchdata is not installed.
        """
        core = self.core
        place = core.device_placement if device_placement is None else device_placement
        prepared = prepare_data_loader(
            data_loader,
            collectives=core.collectives,
            config=core.loader,
            device=core.device if place else None,
            gradient_state=GradientState.of(core.choices),
            rng_types=core.rng_types,
            slice_fn=slice_fn_for_dispatch,
        )
        if prepared is not data_loader:
            note_use(core.loader, "the loader that was prepared", advice="Set it before accelerator.prepare(loader).")
        prepared.track(core.tracker)
        if not any(known is prepared for known in core.prepared.loaders):
            core.prepared.loaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Make a scheduler step when its optimizer does.

        Args:
            scheduler: of an optimizer, prepared or not.
        """
        core = self.core
        if isinstance(scheduler, AcceleratedScheduler):
            if not any(known is scheduler for known in core.prepared.schedulers):
                scheduler.join(core.accumulation)
                core.prepared.schedulers.append(scheduler)
            return scheduler
        own = scheduler.optimizer
        matching = [one for one in core.shared.optimizers if one is own or one.optimizer is own]
        prepared = AcceleratedScheduler(
            scheduler,
            matching or core.prepared.optimizers,
            core.step_scheduler_with_optimizer,
            core.loader.split_batches,
            accumulation=core.accumulation,
            repeats=core.scheduler_steps,
        )
        core.prepared.schedulers.append(prepared)
        if prepared.repeats > 1 and prepared.step_with_optimizer and core.process.topology.is_main:
            logger.warning(
                "%s advances %d times for each optimizer step, once for each of %d processes, as schedules written for "
                "one process need; Accelerator(scheduler_steps_per_process=False) makes it advance once.",
                type(scheduler).__name__,
                prepared.repeats,
                prepared.repeats,
            )
        return prepared

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

        Args:
            model: what ``prepare`` returned, or any other model.
            keep_fp32_wrapper: False also undoes what mixed precision did to its forward.
            keep_torch_compile: False also takes it out of `torch.compile`.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared, and give memory back to the device.

        Args:
            *objects: to be replaced: ``model, optimizer = accelerator.free_memory(model, optimizer)``.

        Returns:
            As many None as objects were given.
        """
        count = len(objects)
        del objects
        self.core.tracker.forget(self.core.prepared.loaders)
        self.core.prepared.clear()
        self.core.accumulation.step = 0
        gc.collect()
        self.core.process.kind.empty_cache()
        return [None] * count

    def clear(self, *objects: Any) -> list[None]:
        """Do what `free_memory` does; both names are in use."""
        return self.free_memory(*objects)
