"""`Accelerator`: the one object a training script talks to.

::

    arguments, environment -> options -> process -> strategy, precision -> Core
"""

from __future__ import annotations

import logging
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin, resolve_accumulation
from nb_accelerate.base.config.checks import check_flag, suggest
from nb_accelerate.base.config.distributed import PrecisionType
from nb_accelerate.base.config.dynamo import resolve_dynamo
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.kwargs import (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from nb_accelerate.base.config.loader import DataLoaderConfiguration, resolve_loader
from nb_accelerate.base.config.precision import resolve_fp8, resolve_precision
from nb_accelerate.base.config.project import ProjectConfiguration
from nb_accelerate.base.progress_page import here
from nb_accelerate.errors import ConfigError, ShippingError, UnknownArgumentError
from nb_accelerate.training.accelerator.communication import CommunicationMixin
from nb_accelerate.training.accelerator.core import Core, Handlers
from nb_accelerate.training.accelerator.losses import LossReport, MemoryReport
from nb_accelerate.training.accelerator.options import IdentityMixin, OptionsMixin
from nb_accelerate.training.accelerator.preparing import PreparingMixin
from nb_accelerate.training.accelerator.recording import RecordingMixin
from nb_accelerate.training.accelerator.resuming import ResumingMixin
from nb_accelerate.training.accelerator.steering import Steering
from nb_accelerate.training.accelerator.training import MAKE_IT_INSIDE, TrainingMixin
from nb_accelerate.training.precision import select_precision
from nb_accelerate.training.precision.fp16 import FP16Precision
from nb_accelerate.training.process.rng import resolve_rng_types
from nb_accelerate.training.process.setup import setup_process
from nb_accelerate.training.state.choices import Prepared, inherited, remember, shared_training
from nb_accelerate.training.strategies import select_strategy
from nb_accelerate.training.strategies.select import resolve_strategy_options
from nb_accelerate.training.tracking import resolve_recording

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
    from nb_accelerate.base.config.dynamo import DynamoBackend, TorchDynamoPlugin
    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.base.config.kwargs import KwargsHandler
    from nb_accelerate.base.config.options import Options
    from nb_accelerate.base.config.parallelism import ParallelismConfig, TorchTensorParallelPlugin
    from nb_accelerate.base.config.project import LoggerType
    from nb_accelerate.training.process.rng import RNGType
    from nb_accelerate.training.tracking import GeneralTracker

logger = logging.getLogger("nb_accelerate")

_NOT_YET = {"megatron_lm_plugin": "Megatron-LM"}

# Options that are not arguments themselves: the object they are fields of, and where that is given.
_GIVEN_IN: dict[type[Options], str] = {
    DataLoaderConfiguration: "dataloader_config={}",
    ProjectConfiguration: "project_config={}",
    GradientAccumulationPlugin: "gradient_accumulation_plugin={}",
    **dict.fromkeys(
        (DistributedDataParallelKwargs, InitProcessGroupKwargs, GradScalerKwargs, ProfileKwargs), "kwargs_handlers=[{}]"
    ),
}


class Accelerator(
    IdentityMixin,
    OptionsMixin,
    TrainingMixin,
    CommunicationMixin,
    PreparingMixin,
    ResumingMixin,
    RecordingMixin,
):
    """Run a plain PyTorch training loop on one CPU, on one GPU, or on one rank of many.

    Examples:
        ```python
        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ```

    Values come from the arguments, then from the environment, then from defaults. Option objects may be changed until
    they are used.

    Args:
        device_placement: move models and batches to the device.
        split_batches: the batch size of a loader is the total over all processes.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"`` (linear layers in 8 bits, by torchao); else
            ``ACCELERATE_MIXED_PRECISION``.
        gradient_accumulation_steps: number of batches for one optimizer step, 1 by default. The environment variable
            ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` takes precedence. Use `accumulate` in the loop.
        cpu: train on the CPU; else ``ACCELERATE_USE_CPU``.
        dataloader_config: how loaders divide data among processes.
        rng_types: which random states are set to those of process 0 at each epoch; by default the generators of
            samplers, so that all processes shuffle alike.
        log_with: experiment trackers: a name such as ``"tensorboard"`` or ``"jsonl"``, an object of your own class,
            a list of those, or ``"all"`` for every one that is installed. `init_trackers` opens them.
        project_dir: folder of checkpoints and of trackers that write files.
        project_config: options of folders and checkpoints, instead of ``project_dir``.
        gradient_accumulation_plugin: options of accumulation, instead of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: False advances prepared schedulers at every call, whether or not the
            optimizer stepped.
        kwargs_handlers: arguments for torch: `DistributedDataParallelKwargs`, `GradScalerKwargs`,
            `InitProcessGroupKwargs`, `AutocastKwargs`, `AORecipeKwargs`, `ProfileKwargs`.
        dynamo_backend: compile models with this backend of `torch.compile`, ``"inductor"`` say; else
            ``ACCELERATE_DYNAMO_BACKEND``.
        dynamo_plugin: how models are compiled, in detail.
        fsdp_plugin: shard models over ranks; else ``ACCELERATE_USE_FSDP``. A single process is not sharded.
        parallelism_config: how ranks are laid out: how many copies of a model there are, over how many ranks each is
            sharded, and how many compute each layer together; else ``PARALLELISM_CONFIG_*`` variables. A single process
            has no layout.
        torch_tp_plugin: all ranks compute each layer together, as ``ParallelismConfig(tp_size=...)`` says too.
        deepspeed_plugin: train models with DeepSpeed, on a single process too; else ``ACCELERATE_USE_DEEPSPEED``. Needs
            ``pip install deepspeed``.
        deepspeed_plugins: several of them by name, for models that are trained in different ways. The first is
            selected; ``accelerator.state.select_deepspeed_plugin(name)`` selects another one for what is prepared next.
        scheduler_steps_per_process: prepared schedulers advance once per process at each optimizer step, unless
            batches are split or they are stepped once an epoch. False: once.
        **others: arguments of Hugging Face accelerate that are not supported yet are refused by name.

    Raises:
        ConfigError: a value is wrong, or an argument is not supported yet.
        TypeError: an argument does not exist.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: str | LoggerType | GeneralTracker | Sequence[str | LoggerType | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        deepspeed_plugins: dict[str, DeepSpeedPlugin] | None = None,
        scheduler_steps_per_process: bool = True,
        **others: Any,
    ) -> None:
        _refuse(others)
        # Precision, compilation and sharding that are not given are taken from the newest `Accelerator` of this
        # process: libraries make a second one where they want the script's.
        environment = Environment()
        before = inherited(environment)
        if is_inherited := mixed_precision is None and before is not None:
            mixed_precision = before.mixed_precision
        if dynamo_backend is None and dynamo_plugin is None and before is not None:
            dynamo_plugin = before.dynamo
        chosen_precision = resolve_precision(mixed_precision, environment)
        accumulation = resolve_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin, environment)
        loader = resolve_loader(split_batches, dataloader_config)
        handlers = Handlers.collect(kwargs_handlers)
        fp8 = resolve_fp8(chosen_precision, handlers.fp8, environment)
        plugins = {
            "fsdp_plugin": fsdp_plugin,
            "parallelism_config": parallelism_config,
            "torch_tp_plugin": torch_tp_plugin,
            "deepspeed_plugin": deepspeed_plugin,
            "deepspeed_plugins": deepspeed_plugins,
        }
        strategy_options = resolve_strategy_options(
            plugins,
            ddp=handlers.ddp,
            before=before.strategy_options if before is not None else None,
            environment=environment,
        )
        accumulation = strategy_options.adapt_accumulation(
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
            cpu=cpu, options=handlers.process_group, environment=environment, needs_group=strategy_options.needs_group
        )
        strategy = select_strategy(process, strategy_options)
        for feature, is_used in (("sync_each_batch", accumulation.sync_each_batch), ("torch.compile", dynamo.is_on)):
            if is_used:
                strategy.check_supports(feature)
        process_wide = shared_training()
        process_wide.window.join()
        precision = strategy.adapt_precision(
            select_precision(
                chosen_precision,
                process.kind,
                autocast=handlers.autocast,
                scaler=handlers.scaler,
                fp8=fp8,
                scaler_before=process_wide.scaler,
            )
        )
        if isinstance(precision, FP16Precision):
            process_wide.scaler = precision.scaler
        # The parts; all `Accelerator` objects of the process share some.
        prepared = Prepared()
        memory = MemoryReport(here(), process.kind, strategy, prepared, ranks=process.topology.local_world_size)
        self.core = core = Core(
            process=process,
            collectives=strategy.collectives,
            strategy=strategy,
            precision=precision,
            accumulation=process_wide.accumulation(accumulation),
            process_wide=process_wide,
            loader=loader,
            rng_types=in_step,
            handlers=handlers,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scheduler_steps_per_process=scheduler_steps_per_process,
            recording=recording,
            page=here(),
            losses=LossReport(here(), process.kind, memory),
            steering=Steering(strategy.collectives, prepared),
            memory=memory,
            prepared=prepared,
            dynamo=dynamo,
            strategy_options=strategy_options,
        )
        remember(process, core.choices)
        core.page.note_choices(precision=precision.name, accumulation=core.accumulation.num_steps)
        usual = str(resolve_precision(None, environment))
        if is_inherited and str(chosen_precision) != usual and process.topology.is_main:
            logger.warning(
                "mixed_precision=%r holds for this Accelerator too: it was chosen for the one before it in this "
                "process. Write mixed_precision=%r for another.",
                str(chosen_precision),
                usual,
            )
        steps, counts = gradient_accumulation_steps, core.accumulation.num_steps
        if steps not in {None, counts} and process.topology.is_main:
            logger.warning(
                "gradient_accumulation_steps=%s was given, but the environment variable ACCELERATE_GRADIENT_"
                "ACCUMULATION_STEPS=%s counts more, as in accelerate. Unset it to use the argument.",
                steps,
                counts,
            )

    def __reduce__(self) -> NoReturn:
        raise ShippingError(
            f"An Accelerator cannot be sent to another process or copied. {MAKE_IT_INSIDE}", is_final=True
        )

    def __repr__(self) -> str:
        process = f"process {self.process_index} of {self.num_processes} on {self.device}"
        return f"Accelerator({process}, mixed_precision={self.mixed_precision!r})"


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in _NOT_YET:
            *names, _others = signature(Accelerator).parameters
            instead = _instead(name, value) or suggest(name, (*names, *_NOT_YET))
            raise UnknownArgumentError(f"Accelerator has no argument {name!r}.{instead}")
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} was given, but {_NOT_YET[name]} is not supported in this version. Leave it out."
            )


def _instead(name: str, value: object) -> str:
    """Return what to write for an argument that older versions of accelerate had, or that belongs elsewhere."""
    if name in PrecisionType.list():  # fp16=True
        return f" Write mixed_precision={name!r}." if value else " Leave it out: that is the default."
    for kind, argument in _GIVEN_IN.items():
        if name in signature(kind).parameters:
            also = ", or project_dir for checkpoints and logs together" if name == "logging_dir" else ""
            return f" Write {argument.format(f'{kind.__name__}({name}={value!r})')}{also}."
    return ""
