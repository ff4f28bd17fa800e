"""Errors and warnings for what was not prepared, does not belong together, or is trained with the same rows."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import math
import sys
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.errors import NotPreparedError
from nb_accelerate.errors.traceback_lines import calling_line
from nb_accelerate.training.accelerator.losses import only_reports
from nb_accelerate.training.state.choices import shared_training

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor, nn
    from torch.optim.optimizer import Optimizer

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data import RunningLoops
    from nb_accelerate.training.state.choices import SharedTraining
    from nb_accelerate.training.strategies import Strategy

logger = logging.getLogger("nb_accelerate")

# By name: the modules that they are in take long to import.
_SHARDED = "DTensor"
_AVERAGING = ("DistributedDataParallel", "FullyShardedDataParallel")

MAKE_IT_INSIDE = (
    "It knows only the process it was made in. Make it, and what it prepares, inside of the function that you launch: "
    "def train(): accelerator = Accelerator(); model, optimizer, loader = accelerator.prepare(...)."
)


def watch_for_unprepared_training(collectives: Collectives, shared: SharedTraining) -> None:
    """Warn of optimizers that take steps though they were not prepared. Called by each `Accelerator`.

    On several ranks the first step of any optimizer is checked. If nothing was prepared, there is no warning where
    something else may average the gradients: `DistributedDataParallel`, FSDP or DeepSpeed. With fp16, the first step of
    each optimizer is checked.
    """
    if shared.before_step is not None or collectives.rank or (collectives.world_size == 1 and shared.scaler is None):
        return
    is_first = collectives.world_size > 1
    told: WeakSet[Optimizer] = WeakSet()

    def look_at(optimizer: Optimizer) -> None:
        nonlocal is_first
        if shared.scaler is not None and here().phase != Phase.STEP and optimizer not in told:
            told.add(optimizer)
            if _trains(optimizer, shared.scaler.models):
                logger.warning(
                    "%s.step was called on an optimizer that prepare() did not return. With mixed_precision='fp16', "
                    "gradients of accelerator.backward are multiplied with the loss scale, and only prepared "
                    "optimizers divide them. Write optimizer = accelerator.prepare(optimizer), and call its step.",
                    type(optimizer).__name__,
                )
        if is_first:
            is_first = False
            _warn_of_first_step(optimizer, collectives.world_size, shared)

    shared.before_step = look_at
    _register()


@functools.cache
def _register() -> None:
    """Register a hook, once in a process. It stays: torch iterates over its hooks while it calls them."""

    def hook(optimizer: Optimizer, _arguments: object, _named: object) -> None:
        look_at = shared_training().before_step
        if look_at is not None:
            look_at(optimizer)

    register_optimizer_step_pre_hook(hook)


def _warn_of_first_step(optimizer: Optimizer, world_size: int, shared: SharedTraining) -> None:
    if optimizer in shared.given_optimizers and here().phase != Phase.STEP:
        logger.warning(
            "The optimizer that prepare() returned is not used: the one it was given takes this step. If its "
            "model is not used either, each of the %d processes trains one of its own. Keep what it returns: "
            "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            world_size,
        )
    elif not shared.window.closes and optimizer not in shared.given_optimizers and _trains(optimizer, shared.models):
        logger.warning(
            "The optimizer was not prepared, so it does not wait for the last of the batches whose gradients "
            "are accumulated, and the models of the %d processes drift apart. Prepare it too: model, "
            "optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            world_size,
        )
    elif not (shared.models or shared.optimizers or _is_averaged(optimizer)):
        logger.warning(
            "Nothing was prepared, so each of the %d processes trains a model of its own, unless your code "
            "averages gradients. To train one: model, optimizer, loader = accelerator.prepare(model, "
            "optimizer, loader), and accelerator.backward(loss)",
            world_size,
        )


def _trains(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Return whether an optimizer has a parameter of one of these models."""
    prepared = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(parameter) in prepared for group in optimizer.param_groups for parameter in group["params"])


def _is_averaged(optimizer: Optimizer) -> bool:
    """Return whether a library may average the gradients of an optimizer."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if "deepspeed" in sys.modules or any(type(parameter).__name__ == _SHARDED for parameter in parameters):
        return True
    return any(type(item).__name__ in _AVERAGING for item in gc.get_objects())


def check_owned(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
    """Warn of an optimizer that trains nothing. Called before its first step.

    Parameters need not belong to a model (a temperature, a soft prompt, an image); they have gradients by then.
    """
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not mine or any(parameter.grad is not None for parameter in mine):
        return
    prepared = list(models)
    owned = {id(parameter) for model in prepared for parameter in model.parameters()}
    if not prepared or any(id(parameter) in owned for parameter in mine):
        return
    names = ", ".join(type(model).__name__ for model in prepared)
    logger.warning(
        "None of the %d parameters of this %s belongs to a prepared model (%s), and none has a gradient, so it trains "
        "nothing. Make it from the parameters of the model that you prepare: optimizer = Optimizer(model.parameters()) "
        "after the last change that replaces them (a new model, resized embeddings), then model, optimizer = "
        "accelerator.prepare(model, optimizer).",
        len(mine),
        type(optimizer).__name__,
        names,
    )


def forgotten_model(world_size: int) -> NotPreparedError:
    """Return the error for training on several ranks when nothing was prepared."""
    return NotPreparedError(
        f"accelerator.backward was called on {world_size} ranks, but no model and no optimizer went through prepare. "
        "Each rank would train a copy of its own, on its part of the data. Write model, optimizer, loader = "
        "accelerator.prepare(model, optimizer, loader). A model that you wrapped yourself may be handed to prepare "
        "too; it stays as it is."
    )


def foreign_accelerator() -> NotPreparedError:
    """Return the error for an `Accelerator` that this process inherited from the one that started it."""
    return NotPreparedError(
        "accelerator.backward was called on an Accelerator that was made in another process, before this one was "
        f"started from it. {MAKE_IT_INSIDE}"
    )


_COMPARED = 3
"""Losses that are compared. Those of different rows differ in the first one already."""

_COMPARED_AFTER = 6
"""Steps after which rank 0 compares: the others are one step behind it at most, since ranks wait for one another when
gradients are averaged."""

_counter = itertools.count()


class EqualLosses:
    """Compares the first losses of the ranks, which should have rows of their own, while `is_on`.

    So a loop draws its batches by hand, or goes over a loader that was not prepared: over a prepared one (``loops``)
    rows are shared out. With ``reads_later``, reading a loss would have a program compiled.
    """

    def __init__(self, strategy: Strategy, loops: RunningLoops, *, reads_later: bool) -> None:
        world_size = strategy.data_collectives.world_size
        self.is_on = False
        self._is_of_use = 1 < world_size == strategy.collectives.world_size and not reads_later
        self._rank = strategy.collectives.rank
        self._world_size = world_size
        self._loops = loops
        self._key = ""
        self._losses: list[float] = []

    def begin(self) -> None:
        """Compare the losses that follow: another model was prepared."""
        self.is_on = self._is_of_use
        self._key = f"nb_accelerate/losses {next(_counter)} of rank"
        self._losses = []

    @only_reports("the comparison of losses")
    def add(self, loss: Tensor) -> None:
        """Take the loss of a step. Waits for the device in the first few steps."""
        self.is_on = self._loops.active is None and loss.numel() == 1 and dist.is_initialized()
        if not self.is_on:
            return
        self._losses.append(float(loss.detach()) if len(self._losses) < _COMPARED else math.nan)
        own = self._losses[:_COMPARED]
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only one that all ranks are sure to share
        if len(self._losses) == _COMPARED:
            # Where nothing is learnt, rows say nothing.
            self.is_on = all(map(math.isfinite, own)) and len(set(own)) > 1
            if self.is_on:
                store.set(f"{self._key} {self._rank}", repr(own))
                self.is_on = self._rank == 0
        elif len(self._losses) == _COMPARED_AFTER:
            self.is_on = False
            keys = [f"{self._key} {rank}" for rank in range(self._world_size)]
            if store.check(keys) and len({bytes(store.get(key)) for key in keys}) == 1:
                self._is_of_use = False
                logger.warning(
                    "%s: the first losses are equal to the last bit on all %d processes, so each of them trains with "
                    "the same rows, and no work is shared. Prepare a DataLoader, and loop over it; or give each "
                    "process rows of its own: set_seed(seed, device_specific=True) before batches are drawn, or "
                    "rows[accelerator.process_index :: accelerator.num_processes]",
                    calling_line() or "accelerator.backward",
                    self._world_size,
                )
