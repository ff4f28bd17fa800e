"""Write the state of an engine into a checkpoint, in DeepSpeed's own files, and read it again.

::

    folder/latest                                             the name of the folder below
    folder/zero_to_fp32.py                                    DeepSpeed's converter, for `python zero_to_fp32.py`
    folder/pytorch_model/mp_rank_00_model_states.pt           weights, and the optimizer where nothing is sharded
    folder/pytorch_model/*zero_pp_rank_R_*_optim_states.pt    the share of rank R
"""

from __future__ import annotations

import re
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch

from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

_SHARE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_WHOLE = "mp_rank_00_model_states.pt"
_WHOLE_OF_STAGE_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def save_engine(engine: Any, folder: Path, tag: str, **kwargs: Any) -> None:
    """Write what this rank holds of an engine's state into a folder that is there, perhaps of its own. Collective.

    It takes arguments of ``engine.save_checkpoint``. An error is raised when all ranks have written: they wait for each
    other in barriers of DeepSpeed's, until the time limit of the process group is over.
    """
    says_latest = kwargs.pop("save_latest", True)
    checkpoint_engine = engine.checkpoint_engine
    writer = engine.checkpoint_engine = LateErrors(checkpoint_engine)
    engine._copy_recovery_script = writer.late(engine._copy_recovery_script)  # noqa: SLF001 - there is no public way
    try:
        writer.late((folder / tag).mkdir)(exist_ok=True)  # DeepSpeed makes it on rank 0 only
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False, **kwargs)
    finally:
        engine.checkpoint_engine = checkpoint_engine
        del engine._copy_recovery_script  # noqa: SLF001 - as above
    if says_latest and engine.global_rank == 0:
        writer.late((folder / "latest").write_text)(tag)
    if writer.error is not None:
        raise CheckpointError(f"DeepSpeed could not write to {folder}: {writer.error}") from writer.error


def check_engine(
    engine: Any, folder: Path, tag: str, files: Collection[str], *, weights_only: bool = True, strict: bool = True
) -> None:
    """Raise `CheckpointError` unless the ``files`` of a checkpoint fit an engine. Of tensors, only shapes are read.

    With ``weights_only``, files that would run code are refused, and else none is opened. With ``strict``, all weights
    of the model must be there, and no others.
    """
    names = {name.partition("/")[2] for name in files if name.startswith(f"{tag}/")}
    if not names & {_WHOLE, _WHOLE_OF_STAGE_3}:
        raise CheckpointError(
            f"{folder} has no {tag}/{_WHOLE}: it was not saved by DeepSpeed. Load its weights before prepare, with "
            "load_checkpoint_in_model(model, folder), or go on without DeepSpeed. (Shards of FSDP become such weights "
            "with `nb-accelerate merge-weights`.)"
        )
    weights_alone = (
        f"for the weights alone, of stages 1 to 3: `python {folder / 'zero_to_fp32.py'} {folder} WEIGHTS`, and "
        "load_checkpoint_in_model(model, 'WEIGHTS') before prepare."
    )
    stage = int(engine.zero_optimization_stage())
    shares = {int(match[2]) for name in names if (match := _SHARE.fullmatch(name))}
    if (_WHOLE_OF_STAGE_3 in names, bool(shares)) != (stage == 3, stage > 0):
        was = "3" if _WHOLE_OF_STAGE_3 in names else "1 or 2" if shares else "0"
        raise CheckpointError(
            f"{folder} was saved with ZeRO stage {was}, and this engine has stage {stage}. Write zero_stage as when it "
            f"was saved; or, {weights_alone}"
        )
    ranks = engine.seq_dp_world_size if hasattr(engine, "seq_dp_world_size") else engine.dp_world_size
    if shares and shares != set(range(ranks)):
        # DeepSpeed reads its states of stages 1 and 2 on other ranks after a conversion.
        converted = (
            f"for weights and optimizer: `python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state "
            f"--input_folder {folder / tag} --output_folder {folder / tag}_universal`, "
            f'"checkpoint": {{"load_universal": true}} in the DeepSpeed configuration, and after prepare '
            f"model.load_checkpoint({str(folder)!r}, tag='{tag}_universal'); or, "
        )
        raise CheckpointError(
            f"{folder} was saved by {max(shares) + 1} ranks, and this run has {ranks}. DeepSpeed does not share out "
            f"states anew. Start {max(shares) + 1} ranks; or, {'' if stage == 3 else converted}{weights_alone}"
        )
    if weights_only:
        # This rank opens its own share, and what is the same for all.
        prefix = f"zero_pp_rank_{engine.global_rank}_"
        for name in sorted(names):
            if name.endswith(".pt") and (prefix in name or not name.partition("zero_pp_rank_")[1]):
                state = read(str(folder / tag / name), mmap=True)
                if name.endswith("_model_states.pt"):
                    _check_shapes(engine, folder / tag / name, state, strict=strict)


def _check_shapes(engine: Any, file: Path, state: Any, *, strict: bool) -> None:
    """Raise `CheckpointError` where weights in a file have other shapes than those of the model."""
    weights = state.get("module") or {}
    was = {name: tuple(value.shape) for name, value in weights.items() if isinstance(value, torch.Tensor)}
    # Of stage 3 the file has no weights, and their shapes apart.
    was |= {name: tuple(shape) for group in state.get("param_shapes") or () for name, shape in group.items()}
    now = {
        name: tuple(getattr(value, "ds_shape", value.shape))
        for name, value in engine.module.state_dict(keep_vars=True).items()
    }
    name = next((name for name in now if was.get(name, now[name]) != now[name]), None)
    if name is not None:
        raise CheckpointError(
            f"{file} does not fit this {type(engine.module).__name__}: {name} is of shape {was[name]} in the "
            f"checkpoint and {now[name]} here. Make the model as it was when it was saved."
        )
    unknown = sorted(was.keys() - now.keys())
    if unknown and strict:
        raise CheckpointError(
            f"{file} has {', '.join(unknown[:3])}, which this {type(engine.module).__name__} has not. Make the model "
            "as it was when it was saved."
        )


def load_engine(
    engine: Any, folder: Path, tag: str, *, weights_only: bool = True, strict: bool = True, **kwargs: Any
) -> None:
    """Read an engine's state, with arguments of ``engine.load_checkpoint``. Collective."""
    checkpoint_engine = engine.checkpoint_engine
    if weights_only:
        engine.checkpoint_engine = WeightsOnly(checkpoint_engine)
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=strict, **kwargs)
    finally:
        engine.checkpoint_engine = checkpoint_engine
    if path is None:
        raise CheckpointError(f"DeepSpeed found nothing to load in {folder / tag}.")


class LateErrors:
    """Write files for DeepSpeed, and keep the first error instead of raising it; all else is left to its own writer."""

    def __init__(self, inner: Any) -> None:
        self.error: Exception | None = None
        self.save = self.late(inner.save)
        self.makedirs = self.late(inner.makedirs)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def late(self, write: Callable[..., object]) -> Callable[..., None]:
        """Return a function that writes, does nothing any more after an error, and raises none."""

        def written(*args: Any, **kwargs: Any) -> None:
            if self.error is None:
                try:
                    write(*args, **kwargs)
                except Exception as error:  # of any kind: torch's writer raises RuntimeError where a disk is full
                    self.error = error

        return written


class WeightsOnly:
    """Read files for DeepSpeed without running code that is in them; all else is left to its own reader."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        return read(path, map_location)


def read(path: str, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """Read one file of DeepSpeed's without running code that is in it.

    Args:
        mmap: leave tensors on the disk until they are used.
    """
    with torch.serialization.safe_globals(_classes_of_deepspeed()):
        try:
            # Files of the format before, which a configuration may ask for, have no mmap.
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap and is_zipfile(path))
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read without running code that is in it: {error}. If you wrote it yourself, write "
                "load_state(..., load_kwargs={'weights_only': False})."
            ) from error


def _classes_of_deepspeed() -> list[Any]:
    """Return the classes of DeepSpeed whose instances are in its files."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(cls: Any, name: str) -> Any:
        """Stand for `getattr`, by which Python 3.11.0 to 3.11.3 pickle members of enums."""
        if cls is not ZeroStageEnum:
            raise UnpicklingError(f"it would read {name} of {cls!r}")
        return ZeroStageEnum[name]

    classes = [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, ZeroStageEnum, fragment_address]
    return [*classes, (stage, "builtins.getattr")]
