"""What belongs to a checkpoint: prepared objects, and objects and hooks that users register."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.checkpoint.files import clean_state_dict_for_safetensors, write
from nb_accelerate.training.checkpoint.fitting import check_optimizer, check_scheduler
from nb_accelerate.training.checkpoint.model import write_model
from nb_accelerate.training.checkpoint.names import (
    FSDP_MODEL_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from nb_accelerate.training.checkpoint.shared_staging import ThisRank
from nb_accelerate.training.checkpoint.state import Part, name_of
from nb_accelerate.training.process import context
from nb_accelerate.training.process.notes import note
from nb_accelerate.training.pytree import send_to_device
from nb_accelerate.training.state.choices import current_process
from nb_accelerate.training.strategies.unwrapping import innermost, parameter_names

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from nb_accelerate.training.checkpoint.registry import Hook
    from nb_accelerate.training.checkpoint.sharded import ShardedFolder
    from nb_accelerate.training.strategies.strategy import Strategy


class OptimizerPart:
    """An optimizer, the one inside of the prepared one, whose state is saved and loaded through its strategy.

    `names` are those of its parameters, by group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, strategy: Strategy, models: Sequence[nn.Module] = ()) -> None:
        self.optimizer = optimizer
        self.names = parameter_names(optimizer, models)
        self._strategy = strategy
        self._whole: dict[str, Any] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def collect(self, *, keep: bool) -> None:
        """Read the whole state, for `state_dict`. Collective where it is sharded, so it comes before any writing."""
        self._whole = self._strategy.optimizer_state(self.optimizer, keep=keep)

    def state_dict(self) -> dict[str, Any]:
        """Return what `collect` read; without it, what this rank has of the state."""
        return self.optimizer.state_dict() if self._whole is None else self._whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state, the same on all ranks."""
        self._strategy.load_optimizer_state(self.optimizer, state)


class CheckpointPartsMixin(CoreMixin):
    """The parts of a checkpoint, and the folder that numbered ones are in."""

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what `save_state` saves.

        Examples:
            ```python
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            average = torch.optim.swa_utils.AveragedModel(model)
            accelerator.register_for_checkpointing(average)
            accelerator.save_state("checkpoint")
            ```

        Args:
            *objects: with methods ``state_dict()`` and ``load_state_dict(state)``.

        Raises:
            ConfigError: one has none.
        """
        self.core.registry.add(*objects)

    def register_save_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call a function before `save_state` writes weights.

        Args:
            hook: takes the prepared models, their weights (what it removes from this list is not written), and the
                folder to which it may write.

        Returns:
            What ends this: ``handle.remove()``.
        """
        return _added(self.core.registry.before_save, hook)

    def register_load_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call a function before `load_state` reads weights.

        Args:
            hook: takes the prepared models (what it removes from this list is not loaded), and the folder.

        Returns:
            What ends this: ``handle.remove()``.
        """
        return _added(self.core.registry.before_load, hook)

    def _this_rank(self) -> ThisRank:
        process = self.core.process
        return ThisRank(
            **asdict(process.topology), kind=process.kind, num_sharing=self.core.data_collectives.num_sharing
        )

    def _parts(self) -> list[Part]:
        """Return the parts of the run, models and random numbers apart."""
        core, strategy = self.core, self.core.strategy
        models = [innermost(model) for model in core.prepared.models]
        inner = [optimizer.optimizer for optimizer in core.prepared.optimizers]
        optimizers = [OptimizerPart(own, strategy, models) for own in inner if strategy.owner_of(own) is None]
        schedulers = [
            scheduler for scheduler in core.prepared.schedulers if scheduler.repeats
        ]  # others are an engine's
        parts: list[Part] = []
        for number, thing in enumerate(optimizers):
            parts.append(Part(file=name_of(f"{OPTIMIZER_NAME}.bin", number), thing=thing, check=check_optimizer))
        for number, scheduler in enumerate(schedulers):
            parts.append(Part(file=name_of(f"{SCHEDULER_NAME}.bin", number), thing=scheduler, check=check_scheduler))
        for number, loader in enumerate(core.prepared.loaders):
            if loader.use_stateful_dataloader:
                parts.append(Part(file=name_of("dl_state_dict.bin", number), thing=loader, loader=number))
        if core.precision.scaler is not None:
            parts.append(Part(file=SCALER_NAME, thing=core.precision.scaler))
        custom = enumerate(core.registry.objects)
        return [*parts, *(Part(file=f"custom_checkpoint_{number}.pkl", thing=thing) for number, thing in custom)]

    def _collect(self, parts: list[Part]) -> tuple[list[Any], list[ShardedFolder]]:
        """Collect the states that may be sharded; return those of models, and what is saved as shards."""
        # Comes before anything is written: a rank that cannot write would leave the others waiting in an exchange.
        strategy = self.core.strategy
        models = [model for model in self.core.prepared.models if not strategy.saves_itself(model)]
        inner = [strategy.unwrap(model, keep_torch_compile=False) for model in models]
        if strategy.saves_shards:
            return self._plan_shards(inner, parts)
        keep = self.core.process.topology.is_local_main  # of these, some publish: see `share`
        weights = [strategy.model_state(model, keep=keep) for model in inner]
        for part in parts:
            if isinstance(part.thing, OptimizerPart):
                part.thing.collect(keep=keep)
        return weights, []

    def _plan_shards(self, models: list[nn.Module], parts: list[Part]) -> tuple[list[Any], list[ShardedFolder]]:
        if self.core.recording.project.save_on_each_node:
            raise ConfigError(
                "save_on_each_node=True makes a checkpoint on each machine, and with FSDP each holds a part only. "
                "Save to a disk that machines share, or whole weights: "
                "FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')."
            )
        # Here, because it takes torch a second to import what writes shards.
        from nb_accelerate.training.checkpoint.sharded import ShardedFolder, by_name

        folders = [
            ShardedFolder(f"{FSDP_MODEL_NAME}_{number}", "model", model.state_dict())
            for number, model in enumerate(models)
        ]
        weights = [folder.state for folder in folders]
        for part in parts:
            if isinstance(part.thing, OptimizerPart):
                state = by_name(part.thing.state_dict(), part.thing.names)
                folders.append(ShardedFolder(part.folder, "optimizer", state))
        for folder in folders:
            folder.plan(self.core.collectives)
        return weights, folders

    def _engines(self) -> dict[str, nn.Module]:
        """Return the models that their engines save, by the names of their folders in a checkpoint."""
        strategy = self.core.strategy
        models = [model for model in self.core.prepared.models if strategy.saves_itself(model)]
        return {f"{MODEL_NAME}_{number}" if number else MODEL_NAME: model for number, model in enumerate(models)}

    def _numbered_folders(self) -> Path:
        project_dir = self.core.recording.project.project_dir
        if project_dir is None:
            raise ConfigError("Numbered checkpoints need a folder: Accelerator(project_dir=...).")
        return Path(project_dir).expanduser() / "checkpoints"


def _added(hooks: Any, hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class ModelFilesMixin(CoreMixin):
    """Files with the weights of models, as Hugging Face accelerate and transformers write them."""

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes weights: the main process, or the main process of each machine."""
        topology = self.core.process.topology
        return topology.is_local_main if self.core.recording.project.save_on_each_node else topology.is_main

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the weights of a model by name.

        All processes call it together where models are sharded. There, only processes that write weights (see
        `should_save_model`) get them, in host memory; others get an empty dict.

        Examples:
            ```python
            model = accelerator.prepare(model)
            weights = accelerator.get_state_dict(model)  # on all processes
            if accelerator.is_main_process:
                torch.save(weights, "weights.pt")
            ```

        Args:
            model: prepared or not.
            unwrap: by the names of the user's model; else by the names of the prepared one.
        """
        strategy = self.core.strategy
        if unwrap:
            model = strategy.unwrap(model, keep_torch_compile=False)
        return strategy.model_state(model, keep=self.should_save_model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model, for `load_checkpoint_in_model` or the model's own ``load_state_dict``.

        The main process writes; others return at once. Weights that are there already are replaced when all new ones
        are on the disk.

        Examples:
            ```python
            model = accelerator.prepare(model)
            accelerator.save_model(model, "weights")  # weights/model.safetensors
            ```

        Args:
            model: prepared or not.
            save_directory: made if it is not there; what else is in it stays.
            max_shard_size: bytes of a file, or text such as ``"5GB"``; a larger model is split, and an index written.
            safe_serialization: safetensors; else what `torch.save` writes.

        Raises:
            CheckpointError: a weight is on the device ``meta``, or is nothing that safetensors can hold.
            ConfigError: there is a file of that name, or ``max_shard_size`` is not a size.
        """
        lacking = [name for name, value in model.state_dict().items() if getattr(value, "is_meta", False)]
        if lacking:
            raise CheckpointError(f"{lacking[0]} is on the device meta: it has no numbers that could be saved.")
        weights = self.get_state_dict(model)
        if self.should_save_model:
            rehearsal = context.rehearsal()
            with self.core.shown_as_saving():
                write_model(
                    weights,
                    save_directory if rehearsal is None else rehearsal.files.written(save_directory),
                    max_shard_size=max_shard_size,
                    safe_serialization=safe_serialization,
                )


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Save an object on the main process; on others, do nothing.

    Args:
        obj: what to save; with ``safe_serialization`` a dict of tensors.
        f: the file.
        save_on_each_node: on the first process of each machine instead, for disks that machines do not share.
        safe_serialization: write safetensors, with tensors that share memory written once.
    """
    process = current_process()
    topology = process.topology
    if process.kind.reads_later:
        obj = send_to_device(obj, "cpu")  # tensors of this device have no memory that can be read
    if topology.is_local_main if save_on_each_node else topology.is_main:
        state, rehearsal = obj, context.rehearsal()
        if safe_serialization:
            obj = clean_state_dict_for_safetensors(state)
            tied = [name for name in state if name not in obj]
            if tied:
                note(f"{f} has no {', '.join(tied)}: other names of tensors that are in it.")
        write(obj, f if rehearsal is None else rehearsal.files.written(f), safe_serialization=safe_serialization)
