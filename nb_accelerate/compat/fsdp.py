"""What scripts written for accelerate call by hand about FSDP: files of shards, and steps in which it prepares a model.

Files and their names are those of accelerate 1.15, in the folder that is given::

                        "SHARDED_STATE_DICT"        "FULL_STATE_DICT"            use_dcp=False
    save_fsdp_model      pytorch_model_fsdp_0/      pytorch_model_fsdp.bin       pytorch_model_fsdp_0_rank1.bin
    save_fsdp_optimizer  optimizer_0/               optimizer.bin                optimizer_0_rank1.bin

They are written in place. ``accelerator.save_state`` publishes a checkpoint as a whole.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.modules.module import _IncompatibleKeys

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.base.config.env import Environment
from nb_accelerate.compat.models import is_peft_model
from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.accelerator.checkpoint_parts import OptimizerPart
from nb_accelerate.training.bigmodel.ties import find_tied_parameters
from nb_accelerate.training.checkpoint.names import FSDP_MODEL_NAME, METADATA_NAME, OPTIMIZER_NAME
from nb_accelerate.training.checkpoint.sharded import by_name, by_number, merge_weights, read_model, read_optimizer
from nb_accelerate.training.checkpoint.shared_staging import run_on_all_ranks
from nb_accelerate.training.process.devices import device_kind
from nb_accelerate.training.state import PartialState
from nb_accelerate.training.state.choices import current_process
from nb_accelerate.training.strategies.blocks import find_blocks
from nb_accelerate.training.strategies.sharding import CheckpointedForward
from nb_accelerate.training.strategies.unwrapping import innermost

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.training.accelerator import Accelerator


def enable_fsdp_ram_efficient_loading() -> None:
    """Let only rank 0 load pretrained models of transformers, in this process and those it starts."""
    Environment.set_rank_0_loading()


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every rank load pretrained models of transformers, in this process and those it starts."""
    Environment.set_rank_0_loading(False)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights in a folder of shards into one file. The main process writes, and others wait for it.

    Args:
        checkpoint_dir: a folder such as ``checkpoint/pytorch_model_fsdp_0``.
        output_path: the folder to write to; made if it is not there.
        safe_serialization: write ``model.safetensors``; else ``pytorch_model.bin``.
        remove_checkpoint_dir: remove ``checkpoint_dir`` when the weights have been written.

    Raises:
        CheckpointError: there are no shards, or they are damaged.
    """
    state = PartialState()
    if state.is_main_process:
        merge_weights(checkpoint_dir, output_path, safe_serialization=safe_serialization)
        if remove_checkpoint_dir:
            shutil.rmtree(Path(checkpoint_dir).expanduser())
    state.wait_for_everyone()


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save the weights of a prepared model. All processes call it together.

    Args:
        fsdp_plugin: whose ``state_dict_type`` decides whether shards or whole weights are written.
        accelerator: has prepared the model.
        model: what ``prepare`` returned.
        output_dir: made if it is not there.
        model_index: number of the model in the folder, for the name of its file.
        adapter_only: of a model of peft, save the trained weights only.
        use_dcp: write shards with `torch.distributed.checkpoint`, to be loaded on any number of ranks; else a file of
            each rank, to be loaded on as many.

    Raises:
        CheckpointError: something could not be written, on this process or another.
    """
    strategy = accelerator.core.strategy
    inner = strategy.unwrap(model, keep_torch_compile=False)
    is_main = accelerator.is_main_process
    state = inner.state_dict() if fsdp_plugin.saves_shards else strategy.model_state(inner, keep=is_main)
    if adapter_only and is_peft_model(inner):
        named_parameters = inner.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in named_parameters if parameter.requires_grad}
        state = {name: value for name, value in state.items() if name in trained}
    files = _StateFiles(fsdp_plugin, accelerator, FSDP_MODEL_NAME, model_index, use_dcp)
    files.save(output_dir, "model", state)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> _IncompatibleKeys:
    """Load what `save_fsdp_model` saved, here or in accelerate. All processes call it together.

    Args:
        fsdp_plugin: as it was saved with.
        accelerator: has prepared the model.
        model: what ``prepare`` returned.
        input_dir: the folder, or the folder of shards in it.
        model_index: as it was saved with.
        adapter_only: as it was saved with.
        use_dcp: as it was saved with.

    Returns:
        The names of weights that were missing in the file, and of weights that the model does not have, as
        `torch.nn.Module.load_state_dict` does.

    Raises:
        CheckpointError: something is missing or damaged, or does not fit, on this process or another.
    """
    core = accelerator.core
    inner = core.strategy.unwrap(model, keep_torch_compile=False)
    strict = not (adapter_only and is_peft_model(inner))
    files = _StateFiles(fsdp_plugin, accelerator, FSDP_MODEL_NAME, model_index, use_dcp)

    def read() -> Any:
        path = files.find(input_dir)
        return read_model(path, inner, strict=strict) if files.is_folder else _read_file(path)

    state = run_on_all_ranks(core.collectives, read)
    core.strategy.load_model_state(inner, state, strict=strict)
    accelerator.wait_for_everyone()
    current = inner.state_dict()
    return _IncompatibleKeys(
        [name for name in current if name not in state], [name for name in state if name not in current]
    )


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the state of a prepared optimizer, by the names of the model's parameters. All processes call it together.

    Args:
        fsdp_plugin: see `save_fsdp_model`.
        accelerator: has prepared model and optimizer.
        optimizer: what ``prepare`` returned.
        model: what ``prepare`` returned.
        output_dir: made if it is not there.
        optimizer_index: number of the optimizer in the folder, for the name of its file.
        use_dcp: see `save_fsdp_model`.

    Raises:
        CheckpointError: something could not be written, on this process or another.
    """
    part = _optimizer_part(accelerator, optimizer, model)
    keep = accelerator.is_main_process
    if not fsdp_plugin.saves_shards:
        part.collect(keep=keep)
    state = by_name(part.state_dict(), part.names) if fsdp_plugin.saves_shards or keep else {}
    files = _StateFiles(fsdp_plugin, accelerator, OPTIMIZER_NAME, optimizer_index, use_dcp)
    files.save(output_dir, "optimizer", state)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` saved, here or in accelerate. All processes call it together.

    Args:
        fsdp_plugin: as it was saved with.
        accelerator: has prepared model and optimizer.
        optimizer: what ``prepare`` returned.
        model: what ``prepare`` returned.
        input_dir: the folder, or the folder of shards in it.
        optimizer_index: as it was saved with.
        adapter_only: without effect: an optimizer has states of the parameters that it trains, and of no others.
        use_dcp: as it was saved with.

    Raises:
        CheckpointError: something is missing or damaged, or does not fit, on this process or another.
    """
    del adapter_only
    part = _optimizer_part(accelerator, optimizer, model)
    files = _StateFiles(fsdp_plugin, accelerator, OPTIMIZER_NAME, optimizer_index, use_dcp)

    def read() -> Any:
        path = files.find(input_dir)
        if files.is_folder:
            return read_optimizer(path, [group["params"] for group in part.param_groups], part.names)
        return by_number(_read_file(path), part.names, str(path))

    part.load_state_dict(run_on_all_ranks(accelerator.core.collectives, read))
    accelerator.wait_for_everyone()


class _StateFiles:
    """The file or folder of one state: shards, a file of each rank, or one file that the main process writes."""

    def __init__(
        self, plugin: FullyShardedDataParallelPlugin, accelerator: Accelerator, stem: str, index: int, use_dcp: bool
    ) -> None:
        self._collectives = accelerator.core.collectives
        self._stem = stem
        self.is_folder = plugin.saves_shards and use_dcp
        self._is_written_here = plugin.saves_shards or accelerator.is_main_process
        if self.is_folder:
            self._name = f"{stem}_{index}"
        elif plugin.saves_shards:
            self._name = f"{stem}_{index}_rank{accelerator.process_index}.bin"
        else:
            self._name = f"{stem}_{index}.bin" if index else f"{stem}.bin"

    def save(self, folder: str | os.PathLike[str], key: str, state: Mapping[str, Any]) -> None:
        """Write a state; `key` is what accelerate calls it in a folder of shards. Collective."""
        path = Path(folder).expanduser() / self._name

        def write() -> None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if self._is_written_here and not self.is_folder:
                    torch.save(state, path)
            except OSError as error:
                raise CheckpointError(f"Nothing can be saved as {path}: {error}") from error

        run_on_all_ranks(self._collectives, write)
        if self.is_folder:
            # A rank that cannot write says so to the others: torch exchanges results after writing.
            save({key: state}, checkpoint_id=path, no_dist=not dist.is_initialized())

    def find(self, folder: str | os.PathLike[str]) -> Path:
        """Return where the state is, in a folder that may be the folder of shards itself.

        Raises:
            CheckpointError: it is not there.
        """
        folder = Path(folder).expanduser()
        path = folder if self.is_folder and folder.name == self._name else folder / self._name
        if not (path / METADATA_NAME if self.is_folder else path).is_file():
            others = ", ".join(sorted(other.name for other in folder.glob(f"{self._stem}*")))
            raise CheckpointError(
                f"{path} is not there, or not complete. {folder} has {others or 'nothing of this kind'}. Give "
                "state_dict_type and use_dcp as when it was saved."
            )
        return path


def _read_file(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _optimizer_part(accelerator: Accelerator, optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerPart:
    """Return an optimizer with the names that its parameters have in a model."""
    strategy = accelerator.core.strategy
    inner = strategy.unwrap(model, keep_torch_compile=False)
    return OptimizerPart(getattr(optimizer, "optimizer", optimizer), strategy, [inner])


# Parts of a parameter's name that wrappers of `torch.compile` and of activation checkpointing add.
_ADDED = re.compile(r"^(_orig_mod\.)+|\._orig_mod|\._checkpoint_wrapped_module")


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
    modules = [*_bottom_up("", model)]
    return modules if return_fqns else [module for _, module in modules]


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
