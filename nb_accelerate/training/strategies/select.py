"""Choose how ranks exchange data, and which strategy trains models. Other code does not ask which one was chosen.

A strategy with options has a field of `StrategyOptions`, which `resolve_strategy_options` sets, and a branch of
`select_strategy`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nb_accelerate.base.config.deepspeed import resolve_deepspeed
from nb_accelerate.base.config.env import DEBUG_MODE, Environment
from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin, resolve_fsdp
from nb_accelerate.base.config.kwargs import DistributedDataParallelKwargs
from nb_accelerate.base.config.parallelism import resolve_parallelism
from nb_accelerate.base.devices import backend_named
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.comm import CheckedCollectives, SingleCollectives, TorchCollectives
from nb_accelerate.training.process import context
from nb_accelerate.training.strategies.ddp import DDPStrategy
from nb_accelerate.training.strategies.dtensors import layout_for_fsdp, layout_of
from nb_accelerate.training.strategies.fsdp import FSDPStrategy, check_averaging
from nb_accelerate.training.strategies.strategy import Strategy
from nb_accelerate.training.strategies.tensor_parallel import TensorParallelStrategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
    from nb_accelerate.base.config.parallelism import ParallelismConfig
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.process.context import ProcessContext

ENGINE_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "FSDP_",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "PARALLELISM_CONFIG_",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_DEEPSPEED_",
)
"""Beginnings of the names of environment variables that `resolve_strategy_options` reads."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of strategies, by which `select_strategy` chooses; None if nobody asks for one."""

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    fsdp: FullyShardedDataParallelPlugin | None = None
    parallelism: ParallelismConfig | None = None
    deepspeed: Mapping[str, DeepSpeedPlugin] | None = None

    @property
    def needs_group(self) -> bool:
        """Whether a single process needs a process group too."""
        return self.deepspeed is not None

    @property
    def selected_deepspeed(self) -> DeepSpeedPlugin | None:
        """The plugin that counts for what is prepared now; None where DeepSpeed does not train."""
        plugins = () if self.deepspeed is None else self.deepspeed.values()
        return next((plugin for plugin in plugins if plugin.selected), None)

    def adapt_accumulation(self, chosen: GradientAccumulationPlugin, *, is_said: bool) -> GradientAccumulationPlugin:
        """Return how gradients accumulate, where the configuration of an engine says a number too.

        ``is_said``: arguments or environment, by which it was ``chosen``, say a number.
        """
        plugin = self.selected_deepspeed
        configured = None if plugin is None else plugin.gradient_accumulation_steps
        if not isinstance(configured, int) or configured == chosen.num_steps:
            return chosen
        if is_said:
            raise ConfigError(
                f"gradient_accumulation_steps is {chosen.num_steps} for the Accelerator (argument or environment) and "
                f'{configured} for DeepSpeed. Write it in one place only, or "auto" in the DeepSpeed configuration.'
            )
        return replace(chosen, num_steps=configured)


def resolve_strategy_options(
    plugins: Mapping[str, Any],
    *,
    ddp: DistributedDataParallelKwargs,
    before: StrategyOptions | None,
    environment: Environment,
) -> StrategyOptions:
    """Choose the options of each strategy: the argument, else those of an earlier `Accelerator`, else the environment.

    ``plugins`` are arguments of the `Accelerator` by name. ``before`` has the options of the newest one of this
    process, if it is to be followed.
    """
    fsdp, deepspeed, layout = map(plugins.get, ("fsdp_plugin", "deepspeed_plugin", "parallelism_config"))
    if plugins.get("deepspeed_plugins") is not None:
        if deepspeed is not None:
            raise ConfigError(
                "deepspeed_plugin and deepspeed_plugins were given. Write all in deepspeed_plugins={...}."
            )
        deepspeed = plugins["deepspeed_plugins"]
    if fsdp is not None and deepspeed is not None:
        raise ConfigError(
            "fsdp_plugin and deepspeed_plugin were given, and a model is sharded by one of them. Leave one out."
        )
    if before is not None:
        # What was given now is no contradiction to an earlier choice: it replaces it.
        followed = before.deepspeed if layout is None else None
        layout = before.parallelism if layout is None and deepspeed is None else layout
        if fsdp is None and deepspeed is None:
            fsdp, deepspeed = before.fsdp, followed
    parallelism = resolve_parallelism(layout, plugins.get("torch_tp_plugin"), environment)
    # DeepSpeed lays ranks out by itself; everything else stands on a mesh.
    chosen = None if fsdp is not None else resolve_deepspeed(deepspeed, environment)
    if chosen is not None:
        if deepspeed is None and environment.flag("ACCELERATE_USE_FSDP"):
            raise ConfigError(
                "ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_FSDP are both set, one of them maybe by distributed_type "
                "in the configuration file, and a model is sharded by one engine. Set the other to false."
            )
        if parallelism is not None:
            raise ConfigError(
                "parallelism_config and DeepSpeed were both asked for, and DeepSpeed lays out ranks by itself. Leave "
                "one out."
            )
        return StrategyOptions(ddp=ddp, deepspeed=chosen)
    fsdp = resolve_fsdp(fsdp, environment)
    # Sizes of a layout ask for FSDP, where nothing says how.
    if fsdp is None and parallelism is not None:
        if parallelism.dp_shard_enabled:
            fsdp = FullyShardedDataParallelPlugin()
        elif parallelism.tp_enabled and parallelism.dp_replicate_enabled:
            fsdp = FullyShardedDataParallelPlugin(reshard_after_forward=False)  # there is one shard, which stays
    return StrategyOptions(ddp=ddp, fsdp=fsdp, parallelism=parallelism)


def select_collectives(process: ProcessContext) -> Collectives:
    """Return how this process exchanges data with the others; one without a process group exchanges none."""
    if process.kind.make_collectives is not None and process.topology.world_size > 1:
        own: Collectives = process.kind.make_collectives(process.device)
        return own
    if process.group is None:
        return SingleCollectives()
    if (rehearsal := context.rehearsal()) is not None:
        return rehearsal.collectives(process.device)  # type: ignore[no-any-return]
    checks = Environment().flag(DEBUG_MODE)
    # On CPU a check costs one small message, and what it prevents is an abort or endless waiting. On a GPU the host
    # would have to wait for the device, so there it has to be asked for.
    if checks or (checks is None and not backend_named(dist.get_backend()).returns_early):
        return CheckedCollectives(process.device, device_ids=_device_ids(process), thorough=bool(checks))
    return unchecked_collectives(process)


def unchecked_collectives(process: ProcessContext) -> Collectives:
    """Return how this process exchanges data where the caller has compared what ranks do."""
    if process.group is None:
        return SingleCollectives()
    if (rehearsal := context.rehearsal()) is not None:
        return rehearsal.collectives(process.device)  # type: ignore[no-any-return]
    return TorchCollectives(process.device, device_ids=_device_ids(process))


def select_strategy(process: ProcessContext, options: StrategyOptions) -> Strategy:
    """Return how models are trained in this process: by the strategy whose options are given."""
    collectives = select_collectives(process)
    if options.deepspeed is not None and (rehearsal := context.rehearsal()) is not None:
        rehearsal.uses_deepspeed(options.selected_deepspeed)
        options = replace(options, deepspeed=None)
    if process.kind.make_strategy is not None:
        _check_device_allows(process, options)
        strategy: Strategy = process.kind.make_strategy(process.device, collectives, process.distributed_type)
        return strategy
    if options.deepspeed is not None:
        from nb_accelerate.training.strategies.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(
            process.device, collectives, local_rank=process.topology.local_rank, plugins=options.deepspeed
        )
    if process.topology.world_size == 1:
        return Strategy(process.device, collectives, process.distributed_type)
    asked = options.parallelism
    layout = None if asked is None else layout_of(asked, process.topology)
    plan = None if asked is None or asked.tp_handler is None else asked.tp_handler.plan
    if layout is not None and layout.tp == process.topology.world_size:
        if options.fsdp is not None:
            raise ConfigError(
                f"fsdp_plugin (or ACCELERATE_USE_FSDP) and tp_size={layout.tp} were given, and all ranks compute "
                "layers together, so that none are left to shard over. Leave FSDP out, or lower tp_size and write "
                "dp_shard_size too."
            )
        return TensorParallelStrategy(process.device, collectives, process.distributed_type, layout=layout, plan=plan)
    if options.fsdp is not None:
        check_averaging(process.group, process.device)
        layout = layout or layout_for_fsdp(options.fsdp, process.topology)
        return FSDPStrategy(process.device, collectives, options=options.fsdp, layout=layout, plan=plan)
    return DDPStrategy(
        process.device,
        collectives,
        process.distributed_type,
        options=options.ddp,
        pass_device_ids=_device_ids(process) is not None,
    )


def _check_device_allows(process: ProcessContext, options: StrategyOptions) -> None:
    """Refuse strategies for devices that have a strategy of their own."""
    layout = options.parallelism
    several = process.topology.world_size > 1
    if options.deepspeed is not None:
        asked, variables = "deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED"
    elif several and options.fsdp is not None:
        asked, variables = "fsdp_plugin or parallelism_config", "ACCELERATE_USE_FSDP, ACCELERATE_USE_PARALLELISM_CONFIG"
    elif several and layout is not None and layout.tp_enabled:
        asked, variables = f"tp_size={layout.tp_size}", "PARALLELISM_CONFIG_TP_SIZE"
    else:
        if several and layout is not None:
            layout.check_ranks(process.topology.world_size)
        return
    raise ConfigError(
        f"{asked} was given, but models are not trained so on {process.kind.label}s. Leave it out, and the variables "
        f"{variables} too. To shard a model, start one process with all devices, num_processes=1, and call "
        "torch_xla.runtime.use_spmd() before Accelerator()."
    )


def _device_ids(process: ProcessContext) -> list[int] | None:
    """Return the index of the device in a list, for backends that take it; None for others."""
    is_numbered = process.kind.passes_device_ids and process.device.index is not None
    return [process.device.index] if is_numbered else None
