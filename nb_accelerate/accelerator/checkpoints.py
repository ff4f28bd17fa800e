"""Save a model, or all that a run needs to go on, and load it again."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from nb_accelerate.accelerator.core import Slice
from nb_accelerate.board import Phase
from nb_accelerate.checkpoint import state
from nb_accelerate.checkpoint.folder import holds_something, numbered, settle, settle_all
from nb_accelerate.checkpoint.model import write_model
from nb_accelerate.checkpoint.together import together
from nb_accelerate.config.checks import check_choice
from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.strategies.unwrapping import extract_model_from_parallel

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from nb_accelerate.checkpoint.registry import Hook


class CheckpointSlice(Slice):
    """Checkpoints. Their files are those of Hugging Face accelerate."""

    @property
    def should_save_model(self) -> bool:
        """Whether this process is one that writes weights: the main one, or that of each machine."""
        return self._place().is_writer

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the weights of a model by name.

        Args:
            model: prepared or not.
            unwrap: under the names of the user's model; else under those that the prepared one has.
        """
        if unwrap:
            model = extract_model_from_parallel(model, keep_torch_compile=False)
        return model.state_dict()

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
        if self.should_save_model:
            with self._shown_as_saving():
                write_model(
                    self.get_state_dict(model),
                    save_directory,
                    max_shard_size=max_shard_size,
                    safe_serialization=safe_serialization,
                )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what `save_state` saves.

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

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save what the run needs to go on: models, optimizers, schedulers, the scaler, random numbers, loaders.

        A checkpoint that is there already is replaced when the new one is on the disk: a run that is killed while it
        saves has one or the other. Every process calls it, since each has random numbers of its own; where only the
        main one does, or was done when the others were killed, those of the others are not restored, and a line says
        so. Numbered folders need all processes: they wait for each other.

        Args:
            output_dir: a folder. Not used with ``ProjectConfiguration(automatic_checkpoint_naming=True)``, which
                makes ``checkpoints/checkpoint_<number>`` in the ``project_dir``, and removes the oldest if there are
                more than its ``total_limit``.
            safe_serialization: write weights as safetensors; else as `torch.save` does.
            **save_model_func_kwargs: for engines that save models themselves; none is supported yet.

        Returns:
            The folder.

        Raises:
            CheckpointError: a weight is nothing that safetensors can hold.
            ConfigError: there is no folder to write to, or one with this number is there already.
        """
        if save_model_func_kwargs:
            raise ConfigError(f"save_state got {', '.join(save_model_func_kwargs)}, which no engine here takes.")
        project = self.core.recording.project
        folder = self._next_folder() if project.automatic_checkpoint_naming else _given(output_dir, "output_dir")
        core, place = self.core, self._place()
        with self._shown_as_saving():
            state.save_state(
                folder,
                place=place,
                weights=self._weights,
                parts=self._parts(),
                loaders=core.prepared.loaders,
                step=core.accumulation.step,
                serial=project.iteration,
                safe_serialization=safe_serialization,
            )
            if project.automatic_checkpoint_naming:
                core.collectives.barrier()
                if project.total_limit is not None and place.is_writer:
                    for _, old in numbered(folder.parent)[: -project.total_limit]:
                        shutil.rmtree(old)
        project.iteration += 1
        return folder

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` saved. All processes call it together, after ``prepare``.

        Random shuffling is taken up in the middle of an epoch with ``use_seedable_sampler=True``; gradients that were
        being accumulated are not saved, so save where a window closes.

        Loaders begin with the epoch in which the checkpoint was made. Those of
        ``DataLoaderConfiguration(use_stateful_dataloader=True)`` go on where they were; for others there is
        `skip_first_batches`.

        Args:
            input_dir: the folder; with ``automatic_checkpoint_naming`` the newest by default.
            load_kwargs: arguments of `torch.load` for all but weights. ``{"weights_only": False}`` allows files to
                run code: for files that you wrote yourself.
            **load_model_func_kwargs: those of `torch.nn.Module.load_state_dict`, and ``map_location``, where
                weights are read to: ``"cpu"``, the default, or ``"on_device"``.

        Raises:
            CheckpointError: something is missing or damaged, or does not fit, on this process or another. What was
                missing was noticed before anything was changed.
            ConfigError: there is no such folder.
        """
        core, place = self.core, self._place()
        on_device = load_model_func_kwargs.pop("map_location", None) or "cpu"
        map_location = core.device if check_choice("map_location", on_device, ("cpu", "on_device")) != "cpu" else "cpu"
        strict = load_model_func_kwargs.pop("strict", True)
        project = core.recording.project
        automatic = input_dir is None and project.automatic_checkpoint_naming
        folder = together(core.collectives, self._newest if automatic else lambda: _there(input_dir))
        # One after the other: two ranks must not move the same files.
        together(core.collectives, lambda: settle(folder, place.rank))
        together(core.collectives, lambda: settle_all(folder) if place.is_writer else None)
        models = list(core.prepared.models)
        for hook in core.registry.before_load.values():
            hook(models, str(folder))
        parts = self._parts()

        def load() -> int | None:
            state.load_models(folder, models, map_location=map_location, strict=strict, **load_model_func_kwargs)
            state.load_parts(folder, parts, place=place, **(load_kwargs or {}))
            return state.load_numbers(folder, core.prepared.loaders, place=place)

        together(core.collectives, lambda: state.check_state(folder, models=models, parts=parts))
        step = together(core.collectives, load)
        if step is not None:
            core.accumulation.step = step
        if automatic:
            project.iteration = int(folder.name.rpartition("_")[2]) + 1

    @contextlib.contextmanager
    def _shown_as_saving(self) -> Iterator[None]:
        self.core.board.enter(Phase.SAVING)
        try:
            yield
        finally:
            self.core.board.enter(Phase.RUNNING)

    def _place(self) -> state.Place:
        topology, project = self.core.process.topology, self.core.recording.project
        return state.Place(
            rank=topology.rank,
            world_size=topology.world_size,
            is_writer=topology.is_local_main if project.save_on_each_node else topology.is_main,
            kind=self.core.process.kind,
        )

    def _parts(self) -> list[state.Part]:
        prepared = self.core.prepared
        return state.parts_of(
            optimizers=prepared.optimizers,
            schedulers=prepared.schedulers,
            loaders=prepared.loaders,
            scaler=self.core.precision.scaler,
            custom=self.core.registry.objects,
        )

    def _weights(self, folder: Path) -> Sequence[Mapping[str, Any]]:
        models = list(self.core.prepared.models)
        weights = [self.get_state_dict(model) for model in models]
        for hook in self.core.registry.before_save.values():
            hook(models, weights, str(folder))
        return weights

    def _next_folder(self) -> Path:
        number = self.core.recording.project.iteration

        def check() -> Path:
            folder = self._numbered_folders() / f"checkpoint_{number}"
            if holds_something(folder):
                raise ConfigError(
                    f"{folder} is there already. Call load_state() to go on from the newest checkpoint, or set "
                    f"accelerator.project_configuration.iteration to the number of the next one."
                )
            return folder

        return together(self.core.collectives, check)

    def _newest(self) -> Path:
        found = numbered(self._numbered_folders())
        if not found:
            raise ConfigError(f"There is no checkpoint in {self._numbered_folders()} yet.")
        return found[-1][1]

    def _numbered_folders(self) -> Path:
        project_dir = self.core.recording.project.project_dir
        if project_dir is None:
            raise ConfigError("automatic_checkpoint_naming needs a folder: Accelerator(project_dir=...).")
        return Path(project_dir).expanduser() / "checkpoints"


def _given(folder: str | os.PathLike[str] | None, argument: str) -> Path:
    if folder is None:
        raise ConfigError(
            f"There is no folder for the checkpoint. Write {argument}=..., or "
            "Accelerator(project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
        )
    return Path(folder).expanduser()


def _there(folder: str | os.PathLike[str] | None) -> Path:
    path = _given(folder, "input_dir")
    if not path.is_dir():
        raise ConfigError(f"There is no folder {path} to load a checkpoint from.")
    return path


def _added(hooks: Any, hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
