"""`PreparingMixin`: wrap models, optimizers, loaders and schedulers, and release them."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator.compiling import compiled
from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.accelerator.losses import time_forward
from nb_accelerate.training.data import check_lengths, prepare_data_loader
from nb_accelerate.training.optim import AcceleratedOptimizer, AcceleratedScheduler, OptimizerTraining
from nb_accelerate.training.process import context
from nb_accelerate.training.process.notes import note_once
from nb_accelerate.training.state import GradientState
from nb_accelerate.training.strategies import ModelRequest
from nb_accelerate.training.strategies.unwrapping import innermost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.training.data import DataLoaderShard
    from nb_accelerate.training.data.dispatching.dispatcher import SliceFunction


_SCHEDULERS = (LRScheduler, AcceleratedScheduler)  # the second: one that another Accelerator prepared
_KINDS = (nn.Module, torch.optim.Optimizer, DataLoader, *_SCHEDULERS, type(None))


class PreparingMixin(CoreMixin):
    """Wrap the user's objects, unwrap and release them."""

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the run. They are returned in the order of arguments.

        Models are moved to the device and wrapped, optimizers and schedulers respect accumulation windows, loaders
        yield this process's part of the data. None, and objects that this `Accelerator` prepared before, are returned
        as they are, but such a model gets the weights of rank 0 on all ranks; objects that another `Accelerator`
        prepared belong to this one afterwards.

        Examples:
            ```python
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            ```

        Args:
            *args: models, optimizers, loaders and learning rate schedulers.
            device_placement: for each object, whether to move it to the device; by default as the `Accelerator`
                says.

        Returns:
            The one object, or a tuple of all.

        Raises:
            ConfigError: an object is none of these, or ``device_placement`` has another length than ``args``.
            CollectiveMismatchError: ranks prepare loaders of different lengths together with a model.
        """
        if device_placement is None:
            places: Sequence[bool] = [self.core.device_placement] * len(args)
        elif len(device_placement) == len(args):
            places = device_placement
        else:
            raise ConfigError(
                f"device_placement has {len(device_placement)} entries for {len(args)} objects. "
                "Write one for each object."
            )
        for item in args:
            if not isinstance(item, _KINDS):
                raise ConfigError(
                    f"prepare was given a {type(item).__name__}, which is not a model (torch.nn.Module), an optimizer "
                    "(torch.optim.Optimizer), a loader (torch.utils.data.DataLoader) or a scheduler "
                    "(torch.optim.lr_scheduler.LRScheduler). Leave it out; what needs no preparation works as it is."
                )
        models = [index for index, item in enumerate(args) if isinstance(item, nn.Module)]
        optimizers = [index for index, item in enumerate(args) if isinstance(item, torch.optim.Optimizer)]
        loaders = [index for index, item in enumerate(args) if isinstance(item, DataLoader)]
        if again := [args[index] for index in models if _contains(self.core.prepared.models, args[index])]:
            self.core.strategy.copy_rank_0(again)
        # Models and optimizers together, since an engine may replace the parameters that an optimizer holds.
        results: dict[int, Any] = dict.fromkeys(range(len(args)))
        trained = self._prepare_training(
            [self._request(args[index], places[index], args) for index in models],
            [(args[index], self.core.device_placement) for index in optimizers],
        )
        results |= zip([*models, *optimizers], [*trained[0], *trained[1]], strict=True)
        results |= {index: self.prepare_data_loader(args[index], places[index]) for index in loaders}
        # Last, because they look for their prepared optimizers.
        results |= {
            index: self.prepare_scheduler(item) for index, item in enumerate(args) if isinstance(item, _SCHEDULERS)
        }
        # A model is prepared on all ranks together, so its loaders can be compared. A rank that prepares
        # a loader alone must not wait for others.
        if models or Environment().debug_mode:
            check_lengths(self.core.collectives, [results[index] for index in loaders])
        return results[0] if len(results) == 1 else tuple(results.values())

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model. `prepare` takes it together with its optimizer, which some strategies need.

        Args:
            device_placement: move it to the device; by default as the `Accelerator` says.
            evaluation_mode: it will not be trained, so its gradients are not exchanged.

        Raises:
            ConfigError: the layers of the model are on several devices, and there are several ranks.
        """
        place = self.core.device_placement if device_placement is None else device_placement
        request = replace(self._request(model, place, ()), training=not evaluation_mode)
        return self._prepare_training([request], [])[0][0]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer.

        Args:
            optimizer: over the parameters of a model, which may be prepared before or after.
            device_placement: move the state it may already have to the devices of its parameters; by default as the
                `Accelerator` says.
        """
        place = self.core.device_placement if device_placement is None else device_placement
        return self._prepare_training([], [(optimizer, place)])[1][0]

    def _prepare_training(
        self, models: Sequence[ModelRequest], optimizers: Sequence[tuple[torch.optim.Optimizer, bool]]
    ) -> tuple[list[nn.Module], list[AcceleratedOptimizer]]:
        """Prepare models and optimizers together, and return what takes the place of each."""
        core = self.core
        # What this `Accelerator` has prepared before is returned as it is.
        requests = {
            id(request.model): self._checked(request)
            for request in models
            if not _contains(core.prepared.models, request.model)
        }
        by_id = {id(pair[0]): pair for pair in optimizers if not _contains(core.prepared.optimizers, pair[0])}
        for request in requests.values():
            core.precision.prepare_model(innermost(request.model))
        page = here()
        page.enter(Phase.PREPARING)  # which takes seconds where it imports more of torch, or waits for other ranks
        rehearsal = context.rehearsal()
        with contextlib.nullcontext() if rehearsal is None else rehearsal.phase("prepare"):
            wrapped, engines = core.strategy.prepare(
                list(requests.values()),
                # The user's optimizer, also inside one that another `Accelerator` prepared.
                [one.optimizer if isinstance(one, AcceleratedOptimizer) else one for one, _ in by_id.values()],
                earlier=[each.optimizer for each in core.process_wide.optimizers],
            )
        page.enter(Phase.RUNNING)
        made: dict[int, Any] = {}
        for key, model in zip(requests, wrapped, strict=True):
            made[key] = self._finish_model(model)
        for (key, (optimizer, place)), engine in zip(by_id.items(), engines, strict=True):
            made[key] = self._finish_optimizer(optimizer, engine, place)
        core.memory.prepared()
        return (
            [made.get(id(request.model), request.model) for request in models],
            [made.get(id(optimizer), optimizer) for optimizer, _ in optimizers],
        )

    def _request(self, model: nn.Module, place: bool, together: Sequence[Any]) -> ModelRequest:
        """Return the request for a model. ``together`` are all arguments of the call of ``prepare``."""
        core = self.core
        world_size = core.data_collectives.world_size if core.loader.split_batches else 1
        sizes = [item.batch_size for item in together if isinstance(item, DataLoader)]
        return ModelRequest(
            model=model,
            place=place,
            schedulers=tuple(item for item in together if isinstance(item, LRScheduler)),
            batch_sizes=tuple(size // world_size for size in sizes if size),
            accumulation_steps=core.accumulation.num_steps,
            scheduler_steps=core.scheduler_steps,
        )

    def _checked(self, request: ModelRequest) -> ModelRequest:
        """Return a request without ``place`` for a model whose layers are on several devices; refuse it on ranks."""
        if not _has_device_map(request.model):
            return request
        world_size = self.core.collectives.world_size
        if world_size > 1:
            raise ConfigError(
                f"This {type(request.model).__name__} has its layers on several devices (device_map), and there are "
                f"{world_size} ranks, each of which needs a copy of its own. Load it without device_map to train it on "
                "all ranks, or start one process."
            )
        return replace(request, place=False)

    def _finish_model(self, model: nn.Module) -> nn.Module:
        """Compile a model that the strategy has prepared, and remember it."""
        core = self.core
        prepared = compiled(model, core.dynamo, core.process.kind)
        time_forward(prepared)
        if (rehearsal := context.rehearsal()) is not None:
            is_sharded = not core.strategy.is_replicated
            rehearsal.watch_model(prepared, is_sharded=is_sharded, precision=core.precision.name)
        core.prepared.models.append(prepared)
        core.process_wide.models.add(prepared)
        return prepared

    def _finish_optimizer(
        self, optimizer: torch.optim.Optimizer, engine: torch.optim.Optimizer, place: bool
    ) -> AcceleratedOptimizer:
        """Wrap ``engine``, which the strategy has made of the user's optimizer, and remember it."""
        core = self.core
        if isinstance(optimizer, AcceleratedOptimizer) and optimizer.is_lent_scaler:
            prepared = optimizer
        else:
            step, rehearsal = core.precision.bind(engine), context.rehearsal()
            training = OptimizerTraining(
                accumulation=core.accumulation,
                step=step if rehearsal is None else rehearsal.watched(step),
                scaler=core.precision.scaler,
                average_gradients=core.strategy.average_gradients(engine, core.process_wide.models),
                drop_gradients=core.strategy.drop_gradients(engine, core.process_wide.models),
                owns_gradients=core.strategy.owns_gradients,
            )
            if isinstance(optimizer, AcceleratedOptimizer):
                prepared = optimizer
                prepared.optimizer = engine
                prepared.join(training)
            else:
                prepared = AcceleratedOptimizer(engine, place, training=training)
        core.prepared.optimizers.append(prepared)
        core.process_wide.add_optimizer(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: SliceFunction | None = None,
    ) -> DataLoaderShard:
        """Return a loader that yields this process's part of the data.

        Args:
            device_placement: move batches to the device; by default as the `Accelerator` says.
            slice_fn_for_dispatch: splits a batch, with ``dispatch_batches=True``: called as
                ``slice_fn(batch, slice(first, end), process_index=..., num_processes=...)``.

        Raises:
            ConfigError: the loader cannot be divided among processes.
            MissingDependencyError: a stateful loader is asked for, and torchdata is not installed.
        """
        core = self.core
        place = core.device_placement if device_placement is None else device_placement
        prepared = prepare_data_loader(
            data_loader,
            collectives=core.data_collectives,
            config=core.loader,
            device=core.device if place else None,
            gradient_state=GradientState.of(core.choices),
            rng_types=core.rng_types,
            slice_fn=slice_fn_for_dispatch,
        )
        prepared.track(core.loops)
        if not _contains(core.prepared.loaders, prepared):
            core.prepared.loaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> AcceleratedScheduler:
        """Return a scheduler that steps when its optimizer does.

        Args:
            scheduler: a scheduler of torch; its optimizer may be prepared or not.
        """
        core = self.core
        if isinstance(scheduler, AcceleratedScheduler):
            if not _contains(core.prepared.schedulers, scheduler):
                scheduler.join(core.accumulation)
                core.prepared.schedulers.append(scheduler)
            return scheduler
        by_engine = core.strategy.engine_scheduler(scheduler)
        if by_engine is not None:
            # Advanced by its engine, and saved with it.
            prepared = AcceleratedScheduler(
                by_engine, core.prepared.optimizers, accumulation=core.accumulation, repeats=0
            )
            core.prepared.schedulers.append(prepared)
            return prepared
        optimizer = scheduler.optimizer
        matching = [each for each in core.process_wide.optimizers if each is optimizer or each.optimizer is optimizer]
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
            note_once(
                f"{type(scheduler).__name__} advances {prepared.repeats} times at each optimizer step, once for each "
                "process, as schedules for one process need (once, if it is stepped once an epoch). To have it advance "
                "once: Accelerator(scheduler_steps_per_process=False)."
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
        return _has_device_map(model)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model inside a prepared one.

        Examples:
            ```python
            model = accelerator.prepare(model)
            torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
            ```

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

        Examples:
            ```python
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
            ```

        Args:
            *objects: to be replaced: ``model, optimizer = accelerator.free_memory(model, optimizer)``.

        Returns:
            As many None as objects were given.
        """
        count = len(objects)
        del objects
        self.core.loops.forget(self.core.prepared.loaders)
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


def _has_device_map(model: nn.Module) -> bool:
    # As in accelerate: a map of several entries, of ``device_map="auto"``.
    return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())


def _contains(known: Sequence[Any], item: Any) -> bool:
    return any(other is item for other in known)
