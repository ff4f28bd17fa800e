"""Find the context of this process, the state that its `Accelerator` objects share, and the choices of the newest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.base.config.dynamo import resolve_dynamo
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.precision import resolve_precision
from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.base.seam import asks_for_prepared, group_replaced
from nb_accelerate.training.comm.data_parallel import between_groups
from nb_accelerate.training.data.loops import RunningLoops
from nb_accelerate.training.optim.accumulation import AccumulationState, Window
from nb_accelerate.training.process import context
from nb_accelerate.training.process.setup import setup_process
from nb_accelerate.training.strategies import select_collectives
from nb_accelerate.training.strategies.select import ENGINE_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.base.config.dynamo import TorchDynamoPlugin
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data import DataLoaderShard
    from nb_accelerate.training.optim import AcceleratedOptimizer, AcceleratedScheduler
    from nb_accelerate.training.precision.fp16 import LossScaler
    from nb_accelerate.training.process.context import ProcessContext
    from nb_accelerate.training.strategies.select import StrategyOptions


@dataclass(kw_only=True)
class Prepared:
    """Objects that went through ``prepare``, in order."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    loaders: list[DataLoaderShard] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)

    def clear(self) -> None:
        for things in (self.models, self.optimizers, self.loaders, self.schedulers):
            things.clear()


@dataclass(kw_only=True)
class SharedTraining:
    """The prepared objects of this process that are still referred to, and the position of the training loop."""

    loops: RunningLoops = field(default_factory=RunningLoops)
    window: Window = field(default_factory=Window)
    scaler: LossScaler | None = None  # None until an `Accelerator` uses fp16
    accumulations: WeakSet[AccumulationState] = field(default_factory=WeakSet)  # positions in accumulation windows
    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    _optimizers: list[ref[AcceleratedOptimizer]] = field(default_factory=list)

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """Prepared optimizers that are still referred to, in the order of preparation, which all ranks share."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def add_optimizer(self, optimizer: AcceleratedOptimizer) -> None:
        """Add a prepared optimizer, unless it is in the list."""
        if not any(known is optimizer for known in self.optimizers):
            self._optimizers = [*map(ref, self.optimizers), ref(optimizer)]

    def accumulation(self, options: GradientAccumulationPlugin) -> AccumulationState:
        """Return the position of a new `Accelerator` in its accumulation window."""
        state = AccumulationState(options, self.loops, self.window)
        self.accumulations.add(state)
        return state

    def begin_anew(self) -> None:
        """Begin new accumulation windows, and drop the gradients of all prepared models and optimizers."""
        # Called when a pool of ranks goes on after a failure: some ranks have accumulated batches that others have not,
        # or gradients that are averaged on some ranks only.
        for state in self.accumulations:
            state.step = 0
        self.window.join()
        for model in self.models:
            model.zero_grad()
        for optimizer in self.optimizers:
            optimizer.drop_gradients()


def shared_training() -> SharedTraining:
    rank = context.this_rank()
    if rank.training is None:
        rank.training = SharedTraining()
    shared: SharedTraining = rank.training
    return shared


def _begin_anew() -> None:
    if context.this_rank().training is not None:
        shared_training().begin_anew()


group_replaced.subscribe(_begin_anew)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of an `Accelerator` that states show. It refers to no model, so it may outlive the `Accelerator`."""

    mixed_precision: str
    dynamo: TorchDynamoPlugin
    accumulation: AccumulationState
    loops: RunningLoops
    distributed_type: DistributedType | None = None  # None where no `Accelerator` has chosen one, as `strategy_options`
    strategy_options: StrategyOptions | None = None
    variables: Mapping[str, str] = field(default_factory=lambda: _variables(Environment()))

    @classmethod
    def make(cls, mixed_precision: str | None = None, plugin: GradientAccumulationPlugin | None = None) -> Choices:
        """Return choices from the environment and the arguments, where no `Accelerator` was made."""
        environment = Environment()
        shared = shared_training()
        return cls(
            mixed_precision=str(resolve_precision(mixed_precision, environment)),
            dynamo=resolve_dynamo(None, None, environment),
            accumulation=shared.accumulation(plugin or GradientAccumulationPlugin()),
            loops=shared.loops,
        )


def inherited(environment: Environment) -> Choices | None:
    """Return the choices that another `Accelerator` inherits for arguments that are not given, or None.

    Nothing is inherited after the environment variables about precision, compilation or engines were changed.
    """
    choices = newest_choices()
    return choices if choices is not None and choices.variables == _variables(environment) else None


def _variables(environment: Environment) -> dict[str, str]:
    names = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_", *ENGINE_VARIABLES)
    return {name: value for name, value in environment.variables.items() if name.startswith(names)}


def current_process() -> ProcessContext:
    """Return rank, device and group of this process; the first call in a process sets them up."""
    return context.current() or setup_process()


def current_collectives() -> Collectives:
    """Return the collectives of this process; sets it up like `current_process`."""
    return select_collectives(current_process())


def current_data_collectives() -> Collectives:
    """Return collectives between processes that read rows of their own; ranks that share rows count as one."""
    collectives, choices = current_collectives(), newest_choices()
    layout = None if choices is None or choices.strategy_options is None else choices.strategy_options.parallelism
    if layout is None or collectives.world_size == 1:
        return collectives
    return between_groups(collectives, layout.non_data_parallel_size)


def newest_choices() -> Choices | None:
    """Return the choices of the newest `Accelerator` of this process, or None. Sets nothing up."""
    process = context.current()
    return None if process is None else process.newest


def remember(process: ProcessContext, choices: Choices | None) -> None:
    """Make states show ``choices``. `Accelerator` calls it when it is made."""
    process.newest = choices


def _trains_prepared() -> bool:
    """Return whether a prepared optimizer takes a step now, or has taken one: then gradients are exchanged in time."""
    shared = context.this_rank().training
    if shared is None:
        return False
    return here().phase == Phase.STEP or any(optimizer.num_steps for optimizer in shared.optimizers)


asks_for_prepared.subscribe(_trains_prepared)
