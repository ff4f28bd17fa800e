"""The steps in which accelerate prepares a model for FSDP2, for scripts that take one of them by hand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.ties import find_tied_parameters
from nb_accelerate.training.process.devices import device_kind
from nb_accelerate.training.state.choices import current_process
from nb_accelerate.training.strategies.blocks import find_blocks
from nb_accelerate.training.strategies.sharding import CheckpointedForward
from nb_accelerate.training.strategies.unwrapping import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.training.accelerator import Accelerator

_ADDED = re.compile(r"^(_orig_mod\.)+|\._orig_mod|\._checkpoint_wrapped_module")
"""Parts of a parameter's name that wrappers of `torch.compile` and of activation checkpointing add."""


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model in place and return it, as ``accelerator.prepare(model)`` does. All processes call it together.

    Optimizers of its parameters are not told; ``accelerator.prepare(model, optimizer)`` tells them.

    Raises:
        ConfigError: the `Accelerator` does not train with FSDP, or the plugin asks for what the model has not.
    """
    _plugin(accelerator, "fsdp2_prepare_model", "accelerator.prepare(model)")
    return accelerator.core.strategy.wrap(model)


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Make the blocks of a model keep their inputs alone, and compute the rest again in backward; return the model.

    Preparing a model does so where ``FullyShardedDataParallelPlugin(activation_checkpointing=True)`` says it.

    Raises:
        ConfigError: the `Accelerator` does not train with FSDP, or the plugin asks for what the model has not.
    """
    plugin = _plugin(accelerator, "fsdp2_apply_ac", "torch.utils.checkpoint.checkpoint in the model's forward")
    offload, kind = bool(plugin.activation_checkpointing_offload), device_kind(accelerator.device.type)
    for block in find_blocks(model, plugin):
        block.forward = CheckpointedForward(block.forward, offload=offload, kind=kind)
    return model


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Load whole weights into a sharded model, and return it. All processes call it together.

    Args:
        accelerator: trains with FSDP.
        model: was sharded.
        full_sd: the weights, which rank 0 alone needs to have.
        cpu_offload: keep shards of a model that was on ``meta`` in host memory. Others stay where they are.

    Raises:
        ConfigError: the `Accelerator` does not train with FSDP.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    _plugin(accelerator, "fsdp2_load_full_state_dict", "model.load_state_dict(full_sd)")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(innermost(model), full_sd, options=options)
    return model.to("cpu") if cpu_offload else model


def _plugin(accelerator: Accelerator, name: str, instead: str) -> FullyShardedDataParallelPlugin:
    plugin = accelerator.state.fsdp_plugin
    if plugin is None or accelerator.distributed_type is not DistributedType.FSDP:
        raise ConfigError(
            f"{name} needs several processes that train with FSDP, and this is {accelerator.distributed_type}. Write "
            f"{instead}, or Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) first."
        )
    return plugin


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters under the names that they have in a model that is neither compiled nor checkpointed."""
    return {_ADDED.sub("", name): parameter for name, parameter in named_params.items()}


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this process's device.

    Args:
        **kwargs: those of `torch.amp.GradScaler`.
    """
    return torch.amp.GradScaler(**{"device": current_process().device.type, **kwargs})


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], nn.Module],
    model: nn.Module,
    device: torch.device | None = None,
) -> Callable[[nn.Module], nn.Module]:
    """Return a function that initializes a module as another does, and ties again what the model had tied.

    Args:
        param_init_fn: gives a module new parameters, one on ``meta`` say, and returns it.
        model: the model that all modules are of. Nothing in it is changed.
        device: without effect.
    """
    del device
    first = (model.get_parameter(names[0]) for names in find_tied_parameters(model))
    tied = {id(parameter): parameter for parameter in first}  # kept, so that no other one gets its id
    new: dict[int, Any] = {}

    def init(module: nn.Module) -> nn.Module:
        before = {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}
        module = param_init_fn(module)
        for name, key in before.items():
            if key in tied:
                setattr(module, name, new.setdefault(key, getattr(module, name)))
        return module

    return init if tied else param_init_fn


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the modules of a model, each after its parts, the model itself last.

    Args:
        model: the model.
        return_fqns: return pairs of a name, ``""`` for the model, and a module.
    """
    found = [*_bottom_up("", model)]
    return found if return_fqns else [module for _, module in found]


def _bottom_up(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _bottom_up(f"{name}.{child_name}" if name else child_name, child)
    yield name, module


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Return the parameters of some modules, as ``ignored_modules`` of the plugin names them.

    Args:
        modules: modules of the model, or a regular expression for their whole names, which moves them to the device.
        model: the model.
        device: where they are moved to.
    """
    if isinstance(modules, str):
        modules = [part.to(device) for name, part in model.named_modules() if re.fullmatch(modules, name)]
    return {parameter for module in modules or () for parameter in module.parameters()}
