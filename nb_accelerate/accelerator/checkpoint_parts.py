"""What belongs to a checkpoint: prepared objects, those that users register, and hooks of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from nb_accelerate.accelerator.core import Slice
from nb_accelerate.checkpoint import state
from nb_accelerate.checkpoint.sharing import RankIdentity
from nb_accelerate.errors import ConfigError
from nb_accelerate.strategies.parts import OptimizerPart
from nb_accelerate.strategies.unwrapping import innermost

if TYPE_CHECKING:
    from nb_accelerate.checkpoint.registry import Hook


class CheckpointPartsSlice(Slice):
    """The parts of a checkpoint, and the folder that numbered ones are in."""

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what `save_state` saves.

        Example::

            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            average = torch.optim.swa_utils.AveragedModel(model)
            accelerator.register_for_checkpointing(average)
            accelerator.save_state("checkpoint")

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

    def _identity(self) -> RankIdentity:
        topology = self.core.process.topology
        return RankIdentity(
            rank=topology.rank,
            world_size=topology.world_size,
            node_rank=topology.node_rank,
            local_rank=topology.local_rank,
            local_world_size=topology.local_world_size,
            kind=self.core.process.kind,
        )

    def _parts(self) -> list[state.Part]:
        prepared, strategy = self.core.prepared, self.core.strategy
        models = [innermost(model) for model in prepared.models]
        return state.parts_of(
            optimizers=[
                OptimizerPart(one.optimizer, strategy, models)
                for one in prepared.optimizers
                if strategy.owner_of(one.optimizer) is None
            ],
            schedulers=[one for one in prepared.schedulers if one.repeats],  # the others are an engine's
            loaders=prepared.loaders,
            scaler=self.core.precision.scaler,
            custom=self.core.registry.objects,
        )

    def _numbered_folders(self) -> Path:
        project_dir = self.core.recording.project.project_dir
        if project_dir is None:
            raise ConfigError("Numbered checkpoints need a folder: Accelerator(project_dir=...).")
        return Path(project_dir).expanduser() / "checkpoints"


def _added(hooks: Any, hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
