"""Save all that a run needs to go on, and load it again."""

from __future__ import annotations

import ast
import linecache
import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from nb_accelerate.base.config.checks import check_choice, check_flag
from nb_accelerate.base.progress_page import here
from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.errors.traceback_lines import is_ours, is_users
from nb_accelerate.training.accelerator.checkpoint_parts import CheckpointPartsMixin, ModelFilesMixin
from nb_accelerate.training.checkpoint import loading, state
from nb_accelerate.training.checkpoint.background import CheckpointHandle, saves
from nb_accelerate.training.checkpoint.numbered import is_taken, read_newest, remove_old
from nb_accelerate.training.checkpoint.shared_staging import gather_from_all_ranks, run_on_all_ranks, share
from nb_accelerate.training.comm import SingleCollectives
from nb_accelerate.training.process import context, main_process

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import FrameType

    from nb_accelerate.training.comm import Collectives
_MAGIC = re.compile(r"^([ \t]*)[%!].*$", re.MULTILINE)

# Kinds of training in which all processes save; scripts ask `is_main_process or distributed_type == DEEPSPEED`.
_ENGINES = ("DEEPSPEED", "FSDP")


def is_under_main_process() -> bool:
    """Return whether a caller is in the body of an ``if accelerator.is_main_process``, or ``@on_main_process``.

    Nothing is asked of the other processes. What cannot be read in the source (an ``else``, a variable) says nothing:
    the others are then waited for, as in any collective.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the standard library does the same
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == main_process.__file__:
            return True
        if not is_ours(filename) and is_users(filename) and _in_branch(filename, frame.f_lineno):
            return True
        frame = frame.f_back
    return False


def _in_branch(filename: str, line: int) -> bool:
    try:
        tree = ast.parse(_MAGIC.sub(r"\1pass", "".join(linecache.getlines(filename))))
    except (SyntaxError, ValueError):  # it has been changed since, or is no file of Python's
        return False
    return any(
        isinstance(node, ast.If)
        and not node.orelse
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or line)
        and _is_main_only(node.test)
        for node in ast.walk(tree)
    )


def _is_main_only(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_main_only, test.values))
    if isinstance(test, ast.BoolOp):
        others = [ast.unparse(value) for value in test.values if not _is_main_only(value)]
        return len(others) < len(test.values) and all(any(name in other for name in _ENGINES) for other in others)
    return isinstance(test, ast.Attribute | ast.Name) and ast.unparse(test).split(".")[-1] == "is_main_process"


logger = logging.getLogger("nb_accelerate")


class CheckpointMixin(ModelFilesMixin, CheckpointPartsMixin):
    """Checkpoints. Their files are those of Hugging Face accelerate."""

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: Literal[False] = False,
        **save_model_func_kwargs: Any,
    ) -> Path: ...

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: Literal[True],
        **save_model_func_kwargs: Any,
    ) -> CheckpointHandle: ...

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path | CheckpointHandle:
        """Save what the run needs to go on: models, optimizers, schedulers, the scaler, random numbers, loaders.

        The checkpoint is published as a whole, when all processes have written their part: a run that is killed while
        it saves, or fails to, leaves the one that was there before. What else is in the folder stays.

        In the loops of `resumable` it notes the step: all batches so far, with the one of the loop's body. A run that
        goes on from there begins with the batch after it. No other loop is counted: its checkpoints have no step, which
        a list of checkpoints shows as a dash.

        Every process calls it, since each has random numbers of its own. Under `if accelerator.is_main_process`, as
        in some scripts, the main process saves alone, and says so. Numbered folders, `async_save`, and models that
        are sharded need all processes.

        Examples:
            ```python
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.save_state("checkpoint")
            ```

        Args:
            output_dir: a folder. Not used with ``ProjectConfiguration(automatic_checkpoint_naming=True)``, which
                makes ``checkpoints/checkpoint_<number>`` in the ``project_dir``, and removes the oldest if there are
                more complete ones than its ``total_limit``.
            safe_serialization: write weights as safetensors; else as `torch.save` does.
            async_save: return when everything has been copied to host memory, which is kept for the next time, and
                write while training goes on. All processes call it. One checkpoint at a time: the next save, and the
                end of the process, wait for it. If it fails, on any process, an error is logged at once, and the next
                save raises it on all processes.
            **save_model_func_kwargs: for an engine that saves models itself: those of DeepSpeed's ``save_checkpoint``.

        Returns:
            The folder; with ``async_save`` a handle with ``wait()`` and ``done()``.

        Raises:
            CheckpointError: a weight is nothing that safetensors can hold, or something could not be written, on this
                process or another; or the save before, in the background, has failed. What was there is there still.
            ConfigError: there is no folder to write to, or one with this number is there already.
        """
        if save_model_func_kwargs and not self._engines():
            raise ConfigError(f"save_state got {', '.join(save_model_func_kwargs)}, which no engine here takes.")
        if check_flag("async_save", async_save):
            self.core.strategy.check_supports("async_save")
        if self.core.recording.project.automatic_checkpoint_naming:
            return self._save_numbered(
                safe_serialization=safe_serialization, async_save=async_save, engine_kwargs=save_model_func_kwargs
            )
        folder = _given(output_dir, "output_dir")
        saved = self._save(
            folder,
            self.core.collectives if async_save else self._who_saves(folder),
            safe_serialization=safe_serialization,
            async_save=async_save,
            engine_kwargs=save_model_func_kwargs,
        )
        self.core.recording.project.iteration += 1
        return saved

    def _save_numbered(
        self,
        *,
        safe_serialization: bool = True,
        async_save: bool = False,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> Path | CheckpointHandle:
        """Save to the next numbered folder of the project, and remove those over its ``total_limit``. Collective."""
        project = self.core.recording.project
        saved = self._save(
            self._next_folder(),
            self.core.collectives,
            safe_serialization=safe_serialization,
            async_save=async_save,
            limit=project.total_limit,
            engine_kwargs=engine_kwargs,
        )
        project.iteration += 1
        return saved

    def wait_for_checkpoint(self) -> Path | None:
        """Wait until the checkpoint of ``save_state(..., async_save=True)`` has been written.

        Returns:
            Its folder; None if nothing is being written.

        Raises:
            CheckpointError: it could not be written. It is raised once, by this method or by the next save, whichever
                comes first. `CheckpointHandle.wait` raises it each time.
        """
        return saves.join()

    def _save(
        self,
        folder: Path,
        collectives: Collectives,
        *,
        safe_serialization: bool = True,
        async_save: bool = False,
        limit: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> Path | CheckpointHandle:
        """Save to a folder, when the save before is over. All ranks of the collectives call it together."""
        self.wait_for_checkpoint()
        if (rehearsal := context.rehearsal()) is not None:
            rehearsal.saves(folder, collectives)
            return CheckpointHandle.of_ended(folder) if async_save else folder
        core, project, this_rank = self.core, self.core.recording.project, self._this_rank()
        parts, first = self._parts(), core.registry.first_of_run
        absolute = folder.absolute()  # the process may work elsewhere when a save in the background is over

        def remove_over_limit() -> None:
            if limit is not None:
                remove_old(absolute, limit, first=first, worth=project.worth)

        with core.shown_as_saving():
            weights, folders = run_on_all_ranks(collectives, lambda: self._collect(parts))
            shared = share(
                folder, collectives=collectives, this_rank=this_rank, on_each_machine=project.save_on_each_node
            )

            def collect() -> state.Content:
                for tag, engine in self._engines().items():
                    core.strategy.save_engine(engine, shared.own, tag, **(engine_kwargs or {}))
                for hook in core.registry.before_save.values():  # which leave the weights that are to be written
                    hook(list(core.prepared.models), weights, str(shared.own))
                return state.collect(
                    shared,
                    this_rank,
                    weights=weights,
                    folders=folders,
                    parts=parts,
                    loaders=core.prepared.loaders,
                    step=core.accumulation.step,
                    progress=core.registry.progress,
                    safe_serialization=safe_serialization,
                )

            if async_save:
                return state.save_state_in_background(
                    shared,
                    collect,
                    collectives,
                    when_published=remove_over_limit,
                    folder=folder,
                    copies=core.registry.copies,
                )
            state.save_state(shared, collect, collectives, when_published=remove_over_limit)
            return folder

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` saved. All processes call it together, after ``prepare``.

        Gradients that were being accumulated are not saved, so save where a window closes.

        Loaders begin with the epoch in which the checkpoint was made, and its rows come in the same order. Those of
        ``DataLoaderConfiguration(use_stateful_dataloader=True)`` go on where they were; for others there are
        `resumable` and `skip_first_batches`.

        Everything is read and checked on all processes before anything is changed. What somebody else has put into the
        folder is not looked at, and no code of it runs unless ``load_kwargs`` allows it.

        Examples:
            ```python
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.save_state("checkpoint")
            accelerator.load_state("checkpoint")
            ```

        Args:
            input_dir: the folder. ``"latest"``, and by default, the newest numbered one of the project in which
                nothing is missing or damaged; a line says which were passed over.
            load_kwargs: arguments of `torch.load` for all but weights. ``{"weights_only": False}`` allows files to
                run code: for files that you wrote yourself.
            **load_model_func_kwargs: those of `torch.nn.Module.load_state_dict`, and ``map_location``, where
                weights are read to: ``"cpu"``, the default, or ``"on_device"``. ``strict=False`` also leaves behind
                what nothing here takes, such as the state of a scheduler.

        Raises:
            CheckpointError: something is missing or damaged, or does not fit, on this process or another; the file is
                named, and nothing was changed.
            ConfigError: there is no such folder.
        """
        here().looked_for_state = True
        self.wait_for_checkpoint()
        if (rehearsal := context.rehearsal()) is not None and rehearsal.loads(input_dir):
            return
        core, this_rank = self.core, self._this_rank()
        on_device = load_model_func_kwargs.pop("map_location", None) or "cpu"
        map_location = core.device if check_choice("map_location", on_device, ("cpu", "on_device")) != "cpu" else "cpu"
        strict = load_model_func_kwargs.pop("strict", True)
        project, collectives = core.recording.project, core.collectives
        engines = self._engines()
        models = [model for model in core.prepared.models if not core.strategy.saves_itself(model)]
        parts, hooks = self._parts(), core.registry.before_load
        weights_only = bool((load_kwargs or {}).get("weights_only", True))
        engine_kwargs: dict[str, Any] = {"weights_only": weights_only, "strict": strict}
        if engines:
            engine_kwargs |= {name: load_model_func_kwargs.pop(name) for name in list(load_model_func_kwargs)}

        def read_weights(checkpoint: loading.Checkpoint) -> list[dict[str, Any]]:
            return loading.read_weights(checkpoint, models, map_location=map_location, strict=strict)

        def read_content(
            checkpoint: loading.Checkpoint,
        ) -> tuple[loading.Checkpoint, loading.LoadedStates, list[dict[str, Any]]]:
            for tag, engine in engines.items():
                core.strategy.check_engine(
                    engine, checkpoint.folder, tag, checkpoint.all_files(), weights_only=weights_only, strict=strict
                )
            if not engines:
                loading.check_no_engine(checkpoint)
            loading.check_names(checkpoint, parts=parts, num_models=len(models), strict=strict)
            weights = [] if hooks else read_weights(checkpoint)
            states = loading.read_states(checkpoint, parts=parts, this_rank=this_rank, **(load_kwargs or {}))
            return checkpoint, states, weights

        # All is read and checked on all ranks, from the newest folder that is whole or from the one that was given.
        # A folder that is called "latest" comes before the newest.
        means_newest = input_dir == "latest" and not Path("latest").is_dir()
        if input_dir is None:
            means_newest = project.automatic_checkpoint_naming or project.project_dir is not None
        if means_newest:
            parent = run_on_all_ranks(collectives, self._numbered_folders)
            content, next_number = read_newest(
                parent, read_content, collectives=collectives, this_rank=this_rank, first=core.registry.first_of_run
            )
        else:
            first = gather_from_all_ranks(collectives, lambda: _given(input_dir, "input_dir").absolute())[0]
            folder = run_on_all_ranks(collectives, lambda: _own_or(first, input_dir))
            next_number = project.iteration
            whole, damage = loading.read_checkpoint(folder, read_content, collectives=collectives, this_rank=this_rank)
            if damage or whole is None:
                raise CheckpointError("\n".join(damage))
            content = whole
        checkpoint, states, weights = content
        if hooks:  # which may load what they like, so they come when nothing else is left that might be refused
            offered = list(core.prepared.models)
            for hook in hooks.values():
                hook(offered, str(checkpoint.folder))
            models[:] = [model for model in offered if not core.strategy.saves_itself(model)]
            engines = {tag: engine for tag, engine in engines.items() if any(model is engine for model in offered)}
            weights = run_on_all_ranks(collectives, lambda: read_weights(checkpoint))
        # From here on nothing is refused: models, optimizers and all others are changed.
        loading.apply(
            checkpoint,
            states,
            models,
            weights,
            loaders=core.prepared.loaders,
            collectives=collectives,
            this_rank=this_rank,
            load_weights=core.strategy.load_model_state,
            **load_model_func_kwargs,
        )
        for tag, engine in engines.items():
            core.strategy.load_engine(engine, checkpoint.folder, tag, **engine_kwargs)
        if states.step is not None:
            core.accumulation.step = states.step
        core.registry.loaded, core.registry.loaded_from = checkpoint.manifest, checkpoint.folder
        here().note_resumed()
        if checkpoint.manifest is not None:
            # Only `resumable` counts batches, and not the user's own loop, which may go on from here.
            core.registry.progress.global_step = None
            core.registry.progress.metrics = dict(checkpoint.manifest.metrics)
        project.iteration = next_number

    def _who_saves(self, folder: Path) -> Collectives:
        """Return the collectives of the processes that save to a folder now: all, or the main process alone."""
        core = self.core
        is_main_of_many = core.process.topology.is_main and core.collectives.world_size > 1
        if not (is_main_of_many and core.strategy.is_replicated and is_under_main_process()):
            return core.collectives
        logger.warning(
            "%s is saved without the other processes: resumed there, these go on with other random numbers. All "
            "processes are to call save_state: not under `if accelerator.is_main_process`.",
            folder,
        )
        return SingleCollectives()

    def _next_folder(self) -> Path:
        number = self.core.recording.project.iteration

        def check() -> Path:
            folder = self._numbered_folders() / f"checkpoint_{number}"
            if is_taken(folder):
                raise ConfigError(
                    f"{folder} is there already. Call load_state() to go on from the newest checkpoint, or set "
                    f"accelerator.project_configuration.iteration to the number of the next one."
                )
            return folder

        return run_on_all_ranks(self.core.collectives, check)


def _given(folder: str | os.PathLike[str] | None, argument: str) -> Path:
    if folder is None:
        raise ConfigError(
            f"There is no folder for the checkpoint. Write {argument}=..., or "
            "Accelerator(project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
        )
    return Path(folder).expanduser()


def _own_or(first: Path, given: str | os.PathLike[str] | None) -> Path:
    """Return the folder given to this rank; if it is empty, the folder of rank 0, where all was saved."""
    own = _given(given, "input_dir")
    is_empty = not own.is_dir() or not any(own.iterdir())
    folder = first if is_empty and first.is_dir() else own
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder} to load a checkpoint from.")
    return folder
