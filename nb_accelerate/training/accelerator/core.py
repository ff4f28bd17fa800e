"""`Core`: the parts of an `Accelerator`, chosen when it is made.

::

    arguments, environment -> options -> process -> strategy, precision -> Core
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.accumulation import resolve_accumulation
from nb_accelerate.base.config.checks import check_flag
from nb_accelerate.base.config.dynamo import resolve_dynamo
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.fp8 import resolve_fp8
from nb_accelerate.base.config.handlers import Handlers
from nb_accelerate.base.config.loader import resolve_loader
from nb_accelerate.base.config.options import note_use
from nb_accelerate.base.config.precision import resolve_precision
from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.training.accelerator.equal_losses import EqualLosses
from nb_accelerate.training.accelerator.losses import LossReport
from nb_accelerate.training.accelerator.memory_report import MemoryReport
from nb_accelerate.training.accelerator.prepared import Prepared
from nb_accelerate.training.accelerator.replicas import Replicas
from nb_accelerate.training.accelerator.steering import Steering
from nb_accelerate.training.checkpoint.registry import Registry
from nb_accelerate.training.comm import Trigger
from nb_accelerate.training.precision import select_precision
from nb_accelerate.training.process.rng import resolve_rng_types
from nb_accelerate.training.process.setup import setup_process
from nb_accelerate.training.state.choices import Choices, inherited, remember
from nb_accelerate.training.state.shared import shared_training
from nb_accelerate.training.strategies import select_strategy
from nb_accelerate.training.strategies.select import resolve_engines
from nb_accelerate.training.tracking import Recording, resolve_recording

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
    from nb_accelerate.base.config.distributed import PrecisionType
    from nb_accelerate.base.config.dynamo import DynamoBackend, TorchDynamoPlugin
    from nb_accelerate.base.config.kwargs import KwargsHandler
    from nb_accelerate.base.config.loader import DataLoaderConfiguration
    from nb_accelerate.base.config.project import ProjectConfiguration
    from nb_accelerate.base.progress_page import ProgressPage
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data import LoaderTracker
    from nb_accelerate.training.optim import AccumulationState
    from nb_accelerate.training.precision import Precision
    from nb_accelerate.training.process.context import ProcessContext
    from nb_accelerate.training.process.rng import RNGType
    from nb_accelerate.training.state.shared import SharedTraining
    from nb_accelerate.training.strategies import Strategy
    from nb_accelerate.training.strategies.select import EngineOptions

logger = logging.getLogger("nb_accelerate")


@dataclass(frozen=True, kw_only=True)
class Core:
    """The parts of an `Accelerator`. A setter of an option replaces the `Core`; state changes inside its parts.

    Attributes:
        shared: state that all `Accelerator` objects of this process share.
        rng_types: which random generators get the state of rank 0 at each epoch.
        step_scheduler_with_optimizer: whether schedulers wait for optimizer steps.
        scheduler_steps_per_process: whether schedules advance once for each process at an optimizer step.
        engines: options of the engines by which the strategy was chosen.
        trigger: whether this rank called `set_trigger`.
    """

    process: ProcessContext
    collectives: Collectives
    strategy: Strategy
    precision: Precision
    accumulation: AccumulationState
    shared: SharedTraining
    loader: DataLoaderConfiguration
    rng_types: tuple[RNGType, ...]
    handlers: Handlers
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_steps_per_process: bool
    dynamo: TorchDynamoPlugin
    engines: EngineOptions
    trigger: Trigger = field(default_factory=Trigger)
    recording: Recording = field(default_factory=Recording)
    registry: Registry = field(default_factory=Registry)
    page: ProgressPage
    losses: LossReport
    equal_losses: EqualLosses
    steering: Steering
    replicas: Replicas
    memory: MemoryReport
    prepared: Prepared = field(default_factory=Prepared)

    @property
    def choices(self) -> Choices:
        """The choices that `AcceleratorState` and `GradientState` show."""
        return Choices(
            mixed_precision=self.precision.name,
            distributed_type=self.strategy.distributed_type,
            dynamo=self.dynamo,
            engines=self.engines,
            accumulation=self.accumulation,
            tracker=self.tracker,
        )

    @property
    def data_collectives(self) -> Collectives:
        """How ranks that read rows of their own exchange data; those that share rows count as one."""
        return self.strategy.data_collectives

    @property
    def scheduler_steps(self) -> int:
        """How often a scheduler that is prepared now advances for one optimizer step."""
        is_repeated = self.scheduler_steps_per_process and not self.loader.split_batches
        return self.data_collectives.world_size if is_repeated else 1

    @property
    def tracker(self) -> LoaderTracker:
        """The loaders that are being iterated in this process."""
        return self.shared.tracker

    @property
    def device(self) -> torch.device:
        """The device of models and batches."""
        return self.process.device

    @contextlib.contextmanager
    def shown_as_saving(self) -> Iterator[None]:
        """Show on the progress page that this process saves while a block runs."""
        self.page.enter(Phase.SAVING)
        try:
            yield
        finally:
            self.page.enter(Phase.RUNNING)


def build_core(
    *,
    device_placement: bool,
    split_batches: bool | None,
    mixed_precision: PrecisionType | str | None,
    gradient_accumulation_steps: int | None,
    cpu: bool | None,
    dataloader_config: DataLoaderConfiguration | None,
    rng_types: Sequence[str | RNGType] | None,
    log_with: Any,
    project_dir: str | os.PathLike[str] | None,
    project_config: ProjectConfiguration | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    step_scheduler_with_optimizer: bool,
    scheduler_steps_per_process: bool,
    kwargs_handlers: Iterable[KwargsHandler] | None,
    dynamo_backend: DynamoBackend | str | None = None,
    dynamo_plugin: TorchDynamoPlugin | None = None,
    plugins: Mapping[str, Any],
) -> Core:
    """Check all options, then connect the process, then choose the parts.

    Precision, compilation and sharding that are not asked for are those of the newest `Accelerator` of this process, if
    there is one: libraries make a second `Accelerator` where they want the one of the script.

    Raises:
        ConfigError: an option has a wrong value. The process was not connected to others then.
    """
    # What was not given is inherited, or read from the environment.
    environment = Environment()
    before = inherited(environment)
    if mixed_precision is None and before is not None:
        mixed_precision = before.mixed_precision
    if dynamo_backend is None and dynamo_plugin is None and before is not None:
        dynamo_plugin = before.dynamo
    chosen_precision = resolve_precision(mixed_precision, environment)
    accumulation = resolve_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin, environment)
    loader = resolve_loader(split_batches, dataloader_config)
    handlers = Handlers.collect(kwargs_handlers)
    fp8 = resolve_fp8(chosen_precision, handlers.fp8, environment)
    engines = resolve_engines(
        plugins, ddp=handlers.ddp, before=before.engines if before is not None else None, environment=environment
    )
    accumulation = engines.adapt_accumulation(
        accumulation,
        is_said=gradient_accumulation_steps is not None
        or environment.gradient_accumulation_steps is not None
        or (gradient_accumulation_plugin is not None and gradient_accumulation_plugin.num_steps is not None),
    )
    in_step = resolve_rng_types(rng_types)
    recording = resolve_recording(log_with, project_dir, project_config, handlers.profile)
    dynamo = resolve_dynamo(dynamo_backend, dynamo_plugin, environment)
    check_flag("device_placement", device_placement)
    check_flag("step_scheduler_with_optimizer", step_scheduler_with_optimizer)
    check_flag("scheduler_steps_per_process", scheduler_steps_per_process)
    if cpu is not None:
        check_flag("cpu", cpu)

    # All options are right: the process joins the others.
    process = setup_process(
        cpu=cpu, options=handlers.process_group, environment=environment, needs_group=engines.needs_group
    )
    strategy = select_strategy(process, engines)
    for feature, is_used in (("sync_each_batch", accumulation.sync_each_batch), ("torch.compile", dynamo.is_on)):
        if is_used:
            strategy.check_supports(feature)
    shared = shared_training()
    shared.window.join()
    precision = strategy.adapt_precision(
        select_precision(
            chosen_precision,
            process.kind,
            autocast=handlers.autocast,
            scaler=handlers.scaler,
            fp8=fp8,
            scaler_before=shared.scaler,
        )
    )
    shared.scaler = precision.scaler or shared.scaler
    prepared = Prepared()
    memory = MemoryReport(here(), process.kind, strategy, prepared, ranks=process.topology.local_world_size)
    core = Core(
        process=process,
        collectives=strategy.collectives,
        strategy=strategy,
        precision=precision,
        accumulation=shared.accumulation(accumulation),
        shared=shared,
        loader=loader,
        rng_types=in_step,
        handlers=handlers,
        device_placement=device_placement,
        step_scheduler_with_optimizer=step_scheduler_with_optimizer,
        scheduler_steps_per_process=scheduler_steps_per_process,
        recording=recording,
        page=here(),
        losses=LossReport(here(), process.kind, memory),
        equal_losses=EqualLosses(strategy, shared.tracker, reads_later=process.kind.reads_later),
        steering=Steering(here().commands, shared, prepared, recording.project),
        replicas=Replicas(strategy, prepared),
        memory=memory,
        prepared=prepared,
        dynamo=dynamo,
        engines=engines,
    )
    remember(process, core.choices)
    _note_uses(core, gradient_accumulation_plugin)
    given, counts = gradient_accumulation_steps, core.accumulation.num_steps
    if given not in {None, counts} and process.topology.is_main:
        logger.warning(
            "gradient_accumulation_steps=%s was given, but the environment variable "
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=%s counts more, as in accelerate. Unset it to use the argument.",
            given,
            counts,
        )
    return core


def _note_uses(core: Core, accumulation: GradientAccumulationPlugin | None) -> None:
    """Note the options of which later changes have no effect, so that such a change is a warning."""
    made = "the Accelerator that was made"
    if accumulation is not None:
        note_use(
            accumulation,
            made,
            advice="Set it before Accelerator(...); for num_steps, set accelerator.gradient_accumulation_steps.",
        )
    if core.precision.scaler is not None:
        note_use(core.handlers.scaler, made, advice="Set it before Accelerator(kwargs_handlers=[...]).")


class CoreMixin:
    """Base of the classes that make up `Accelerator`, each with the methods of one subject. They share a core."""

    core: Core
