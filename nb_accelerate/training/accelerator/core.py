"""`Core`: the parts of an `Accelerator`, chosen when it is made."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import described, shown
from nb_accelerate.base.config.kwargs import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from nb_accelerate.base.config.precision import AORecipeKwargs
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.checkpoint.registry import Registry
from nb_accelerate.training.state.choices import Choices, Prepared
from nb_accelerate.training.tracking import Recording

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from nb_accelerate.base.config.dynamo import TorchDynamoPlugin
    from nb_accelerate.base.config.kwargs import KwargsHandler
    from nb_accelerate.base.config.loader import DataLoaderConfiguration
    from nb_accelerate.base.progress_page import ProgressPage
    from nb_accelerate.training.accelerator.losses import LossReport, MemoryReport
    from nb_accelerate.training.accelerator.steering import Steering
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data import RunningLoops
    from nb_accelerate.training.optim import AccumulationState
    from nb_accelerate.training.precision import Precision
    from nb_accelerate.training.process.context import ProcessContext
    from nb_accelerate.training.process.rng import RNGType
    from nb_accelerate.training.state.choices import SharedTraining
    from nb_accelerate.training.strategies import Strategy
    from nb_accelerate.training.strategies.select import StrategyOptions

_FIELDS: dict[type[KwargsHandler], str] = {
    DistributedDataParallelKwargs: "ddp",
    GradScalerKwargs: "scaler",
    InitProcessGroupKwargs: "process_group",
    AutocastKwargs: "autocast",
    AORecipeKwargs: "fp8",
    ProfileKwargs: "profile",
}


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """One handler of each kind: the user's, or one with defaults."""

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    process_group: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    fp8: AORecipeKwargs | None = None
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)

    @classmethod
    def collect(cls, given: Iterable[KwargsHandler] | None) -> Handlers:
        """Sort a list of handlers by kind; there may be one of each kind."""
        names = ", ".join(kind.__name__ for kind in _FIELDS)
        if not isinstance(given, (list, tuple, set, NoneType)):
            raise ConfigError(
                f"kwargs_handlers={shown(given)} is {described(given)}, not a list of handlers. Write "
                f"kwargs_handlers=[...] with instances of: {names}."
            )
        handlers: dict[str, Any] = {}
        for handler in given or ():
            name = _FIELDS.get(type(handler))
            if name is None:
                raise ConfigError(
                    f"kwargs_handlers holds {handler!r} ({described(handler)}), which is not a handler this version "
                    f"knows. Write instances of: {names}, with `from nb_accelerate.utils import ...`."
                )
            if name in handlers:
                raise ConfigError(f"kwargs_handlers holds two {type(handler).__name__}. Write one with all fields.")
            handlers[name] = handler
        return cls(**handlers)


@dataclass(frozen=True, kw_only=True)
class Core:
    """The parts of an `Accelerator`. A setter of an option replaces the `Core`; state changes inside its parts."""

    process: ProcessContext
    collectives: Collectives
    strategy: Strategy
    precision: Precision
    accumulation: AccumulationState
    process_wide: SharedTraining  # what all `Accelerator` objects of this process share
    loader: DataLoaderConfiguration
    rng_types: tuple[RNGType, ...]  # which random generators get the state of rank 0 at each epoch
    handlers: Handlers
    device_placement: bool
    step_scheduler_with_optimizer: bool  # whether schedulers wait for optimizer steps
    scheduler_steps_per_process: bool  # whether they advance once for each process at a step
    dynamo: TorchDynamoPlugin
    strategy_options: StrategyOptions  # options by which the strategy was chosen
    recording: Recording = field(default_factory=Recording)
    registry: Registry = field(default_factory=Registry)
    page: ProgressPage
    losses: LossReport
    steering: Steering
    memory: MemoryReport
    prepared: Prepared = field(default_factory=Prepared)  # by this `Accelerator` alone

    @property
    def choices(self) -> Choices:
        """The choices that `AcceleratorState` and `GradientState` show."""
        return Choices(
            mixed_precision=self.precision.name,
            distributed_type=self.strategy.distributed_type,
            dynamo=self.dynamo,
            strategy_options=self.strategy_options,
            accumulation=self.accumulation,
            loops=self.loops,
        )

    @property
    def data_collectives(self) -> Collectives:
        """Collectives between ranks that read rows of their own; ranks that share rows count as one."""
        return self.strategy.data_collectives

    @property
    def scheduler_steps(self) -> int:
        """How often a scheduler that is prepared now advances for one optimizer step."""
        is_repeated = self.scheduler_steps_per_process and not self.loader.split_batches
        return self.data_collectives.world_size if is_repeated else 1

    @property
    def loops(self) -> RunningLoops:
        """The loaders that are being iterated in this process."""
        return self.process_wide.loops

    @property
    def device(self) -> torch.device:
        return self.process.device

    @contextlib.contextmanager
    def shown_as_saving(self) -> Iterator[None]:
        """Show on the progress page that this process saves while a block runs."""
        self.page.enter(Phase.SAVING)
        try:
            yield
        finally:
            self.page.enter(Phase.RUNNING)


class CoreMixin:
    """Base of the classes that make up `Accelerator`, each with the methods of one subject. They share a core."""

    core: Core
