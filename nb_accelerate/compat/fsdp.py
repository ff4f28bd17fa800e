"""What scripts written for accelerate call by hand about FSDP: files of shards, and the loading of pretrained models.

Files and their names are those of accelerate 1.15, in the folder that is given::

                        "SHARDED_STATE_DICT"        "FULL_STATE_DICT"            use_dcp=False
    save_fsdp_model      pytorch_model_fsdp_0/      pytorch_model_fsdp.bin       pytorch_model_fsdp_0_rank1.bin
    save_fsdp_optimizer  optimizer_0/               optimizer.bin                optimizer_0_rank1.bin

They are written in place. ``accelerator.save_state`` publishes a checkpoint as a whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.modules.module import _IncompatibleKeys

from nb_accelerate.base.config.env import Environment
from nb_accelerate.compat.models import is_peft_model
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.agreement import run_on_all_ranks
from nb_accelerate.training.checkpoint.merging import merge_weights
from nb_accelerate.training.checkpoint.names import FSDP_MODEL_NAME, METADATA_NAME, OPTIMIZER_NAME
from nb_accelerate.training.checkpoint.sharded import named, numbered, read_model, read_optimizer
from nb_accelerate.training.state import PartialState
from nb_accelerate.training.strategies.parts import OptimizerPart

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

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
    core = accelerator.core
    inner = core.strategy.unwrap(model, keep_torch_compile=False)
    only = _trained(inner) if adapter_only else None
    if fsdp_plugin.saves_shards:
        state: Any = inner.state_dict()
    else:
        state = core.strategy.model_state(inner, keep=accelerator.is_main_process)
    if only is not None:
        state = {name: value for name, value in state.items() if name in only}
    names = _Names(FSDP_MODEL_NAME, model_index)
    _save(accelerator, {"model": state}, Path(output_dir), names, shards=fsdp_plugin.saves_shards, use_dcp=use_dcp)


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
        The names of weights that were not in the file, and of those that the model has not, as
        `torch.nn.Module.load_state_dict` does.

    Raises:
        CheckpointError: something is missing or damaged, or does not fit, on this process or another.
    """
    core = accelerator.core
    inner = core.strategy.unwrap(model, keep_torch_compile=False)
    strict = not (adapter_only and is_peft_model(inner))
    place = _Place(Path(input_dir), _Names(FSDP_MODEL_NAME, model_index))

    def read() -> Any:
        if not fsdp_plugin.saves_shards:
            return _read_file(place.whole())
        if use_dcp:
            return read_model(place.shards(), inner, strict=strict)
        return _read_file(place.of_rank(accelerator.process_index))

    state = run_on_all_ranks(core.collectives, read)
    core.strategy.load_model_state(inner, state, strict=strict)
    accelerator.wait_for_everyone()
    known = inner.state_dict()
    return _IncompatibleKeys(
        [name for name in known if name not in state], [name for name in state if name not in known]
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
    part = _part(accelerator, optimizer, model)
    keep = accelerator.is_main_process
    if not fsdp_plugin.saves_shards:
        part.collect(keep=keep)
    state = named(part.state_dict(), part.names) if fsdp_plugin.saves_shards or keep else {}
    names = _Names(OPTIMIZER_NAME, optimizer_index)
    _save(accelerator, {"optimizer": state}, Path(output_dir), names, shards=fsdp_plugin.saves_shards, use_dcp=use_dcp)


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
    part = _part(accelerator, optimizer, model)
    place = _Place(Path(input_dir), _Names(OPTIMIZER_NAME, optimizer_index))

    def read() -> Any:
        if fsdp_plugin.saves_shards and use_dcp:
            parameters = [group["params"] for group in part.param_groups]
            return read_optimizer(place.shards(), parameters, part.names)
        file = place.of_rank(accelerator.process_index) if fsdp_plugin.saves_shards else place.whole()
        return numbered(_read_file(file), part.names, str(file))

    part.load_state_dict(run_on_all_ranks(accelerator.core.collectives, read))
    accelerator.wait_for_everyone()


class _Names:
    """What files and folders of a state are called."""

    def __init__(self, stem: str, index: int) -> None:
        self.folder = f"{stem}_{index}"
        self.whole = f"{stem}_{index}.bin" if index else f"{stem}.bin"

    def of_rank(self, rank: int) -> str:
        """Return the name of the file of one rank."""
        return f"{self.folder}_rank{rank}.bin"


class _Place:
    """Where a state is read from.

    The methods raise `CheckpointError` where nothing is there.
    """

    def __init__(self, folder: Path, names: _Names) -> None:
        self._folder = folder.expanduser()
        self._names = names

    def shards(self) -> Path:
        """Return the folder with the shards."""
        is_itself = self._folder.name == self._names.folder
        return self._there(self._folder if is_itself else self._folder / self._names.folder, METADATA_NAME)

    def whole(self) -> Path:
        """Return the file with all of it."""
        return self._there(self._folder / self._names.whole)

    def of_rank(self, rank: int) -> Path:
        """Return the file of one rank."""
        return self._there(self._folder / self._names.of_rank(rank))

    def _there(self, path: Path, inside: str = "") -> Path:
        if not (path / inside if inside else path).is_file():
            kinds = (self._names.folder, self._names.whole, self._names.of_rank(0))
            found = [kind for kind in kinds if (self._folder / kind).exists()]
            raise CheckpointError(
                f"{path} is not there, or not complete."
                + (f" {self._folder} has {', '.join(found)}:" if found else "")
                + " Give state_dict_type and use_dcp as when it was saved."
            )
        return path


def _save(
    accelerator: Accelerator, state: Mapping[str, Any], folder: Path, names: _Names, *, shards: bool, use_dcp: bool
) -> None:
    """Write a state, a dict with one key, as accelerate does. Collective."""
    folder = folder.expanduser()
    collectives = accelerator.core.collectives
    run_on_all_ranks(collectives, lambda: _make_folder(folder))
    if shards and use_dcp:
        # A rank that cannot write says so to the others: torch exchanges results after writing.
        save(dict(state), checkpoint_id=folder / names.folder, no_dist=not dist.is_initialized())
        return
    [content] = state.values()

    def write() -> None:
        if shards:
            torch.save(content, folder / names.of_rank(accelerator.process_index))
        elif accelerator.is_main_process:
            torch.save(content, folder / names.whole)

    run_on_all_ranks(collectives, write)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"Nothing can be saved as {folder}: {error}") from error


def _read_file(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _trained(model: nn.Module) -> set[str] | None:
    """Return the names of the trained parameters of a model of peft; None for other models, which are saved whole."""
    if not is_peft_model(model):
        return None
    return {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}


def _part(accelerator: Accelerator, optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerPart:
    """Return an optimizer with the names that its parameters have in a model."""
    core = accelerator.core
    inner = core.strategy.unwrap(model, keep_torch_compile=False)
    return OptimizerPart(getattr(optimizer, "optimizer", optimizer), core.strategy, [inner])
