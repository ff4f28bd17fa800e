"""Open a checkpoint, read and check all of it, compare its files with what they were; only then change something."""

from __future__ import annotations

import contextlib
import logging
import re
import stat
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.checksums import Verification
from nb_accelerate.training.checkpoint.files import load_or_explain, load_state_dict
from nb_accelerate.training.checkpoint.fitting import check_class, check_random_numbers, check_shapes, position_here
from nb_accelerate.training.checkpoint.manifest import examine
from nb_accelerate.training.checkpoint.model import fit
from nb_accelerate.training.checkpoint.names import (
    FSDP_MODEL_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    OF_A_STATE,
    OF_SHARDS,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    shards_of,
)
from nb_accelerate.training.checkpoint.registry import deep_copy
from nb_accelerate.training.checkpoint.shared_staging import gather_from_all_ranks, run_on_all_ranks
from nb_accelerate.training.checkpoint.state import RANDOM_NUMBERS, SAVED_BY, name_of
from nb_accelerate.training.data.resuming.orders import Order
from nb_accelerate.training.process import rng
from nb_accelerate.training.process.notes import note

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from nb_accelerate.training.checkpoint.manifest import Manifest
    from nb_accelerate.training.checkpoint.shared_staging import ThisRank
    from nb_accelerate.training.checkpoint.state import Part
    from nb_accelerate.training.comm import Collectives

T = TypeVar("T")

IF_TRUSTED = "write load_state(..., load_kwargs={'weights_only': False})."
"""What to write to allow files of a checkpoint to run any code."""

_RANDOM_NUMBERS = re.compile(RANDOM_NUMBERS.format(r"\d+"))

# Files without which training does not go on as it was.
_TO_TRAIN_WITH = re.compile(
    r"(optimizer|scheduler)(_\d+)?\.bin|(model(_\d+)?\.safetensors|pytorch_model(_fsdp)?(_\d+)?\.bin)"
)

logger = logging.getLogger("nb_accelerate")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that can be read. Made by `open_checkpoint`."""

    folder: Path
    asked_for: Path  # the folder that was given, for messages
    files: frozenset[str]  # without a manifest, the names of folders too
    manifest: Manifest | None

    def load_file(self, name: str, **kwargs: Any) -> Any:
        """Return what `torch.save` has written to a file of it, on the CPU. ``kwargs`` are those of `torch.load`."""
        path = self.folder / name
        # Copied from the mapped file by all threads of torch: it takes twice as long to read it into memory by one.
        return deep_copy(load_or_explain(path, "cpu", if_trusted=IF_TRUSTED, mmap=zipfile.is_zipfile(path), **kwargs))

    def has_shards(self, folder: str) -> bool:
        """Return whether a folder of it holds parts that each rank has written."""
        return f"{folder}/{METADATA_NAME}" in self.files

    def all_files(self) -> list[str]:
        """Return the names of all files, those in folders below too, as ``part/file``."""
        if self.manifest is not None:
            return list(self.manifest.files)
        return [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]


def open_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the files of a checkpoint, without reading more than its manifest.

    Return the checkpoint, or a sentence for each file of it that is obviously damaged.
    """
    where, manifest, damage = examine(folder)
    if manifest is None and not damage:
        try:
            damage = _damage_without_manifest(where)
        except CheckpointError as error:
            damage = [str(error)]
    if damage:
        return None, damage
    # What is there besides is not part of it, and is not read.
    entries = (*where.iterdir(), *where.glob(f"*/{METADATA_NAME}"))
    files = [entry.relative_to(where).as_posix() for entry in entries] if manifest is None else manifest.files
    return Checkpoint(folder=where, asked_for=folder, files=frozenset(files), manifest=manifest), []


def read_checkpoint(
    folder: Path, read_content: Callable[[Checkpoint], T], *, collectives: Collectives, this_rank: ThisRank
) -> tuple[T | None, list[str]]:
    """Read a checkpoint, by ``read_content``, which changes nothing, and compare its checksums meanwhile.

    All ranks call it together; those of one machine share the comparing. Return what ``read_content`` returned, or a
    sentence for each file of the checkpoint that is not as it was written, on this rank or another.
    """
    checkpoint: Checkpoint | None

    def open_here() -> list[str]:
        nonlocal checkpoint
        checkpoint, damage = open_checkpoint(folder)
        return damage

    damage = _damage_on_all(gather_from_all_ranks(collectives, open_here), folder)
    if checkpoint is None or damage:
        return None, damage
    files = {} if checkpoint.manifest is None else checkpoint.manifest.files
    content: T | None = None
    error: Exception | None = None
    with Verification(
        checkpoint.folder, files, rank=this_rank.local_rank, num_ranks=this_rank.local_world_size
    ) as verification:
        try:
            content = read_content(checkpoint)
        except Exception as caught:  # it may be the damage that is about to be found
            error = caught
        damage = _damage_on_all(gather_from_all_ranks(collectives, verification.result), folder)
    if damage:
        return None, damage

    def raise_error() -> None:
        if error is not None:
            raise error

    run_on_all_ranks(collectives, raise_error)
    return content, []


def _damage_on_all(damage: list[list[str]], folder: Path) -> list[str]:
    """Return the sentences of all ranks, each once, with a hint if there are several."""
    sentences = list(dict.fromkeys(sentence for of_rank in damage for sentence in of_rank))
    hint = f"Or {folder / MANIFEST_NAME}, which says how they were, is that of another checkpoint."
    return [*sentences, hint] if len(sentences) > 1 else sentences


def _damage_without_manifest(folder: Path) -> list[str]:
    """Return a sentence if a folder without a manifest cannot be a checkpoint of accelerate; else none."""
    files = sorted(entry.name for entry in folder.iterdir() if OF_A_STATE.fullmatch(entry.name))
    if not files and not any(OF_SHARDS.fullmatch(entry.name) for entry in folder.iterdir()):
        return [f"{folder} holds no checkpoint."]
    irregular = [name for name in files if not stat.S_ISREG((folder / name).lstat().st_mode)]
    if irregular:
        return [f"{folder / irregular[0]} is a link, or no regular file. Put the file itself there."]
    for name in files:
        if _RANDOM_NUMBERS.fullmatch(name):
            states = load_or_explain(folder / name, "cpu", if_trusted=IF_TRUSTED)
            if isinstance(states, dict) and SAVED_BY in states:
                return [f"{folder / MANIFEST_NAME} is missing, which says what belongs to this checkpoint."]
    return []


@dataclass(frozen=True, kw_only=True)
class LoadedStates:
    """What was read, the weights of models apart. Made by `read_states`."""

    of_parts: list[tuple[Part, Path, Any]]
    rng_state: dict[str, Any] | None  # of this rank; None if it has none
    step: int | None  # batches in the accumulation window when it was saved; None if that is not known
    orders: list[Order | None]  # of each loader, what draws the order of its rows; None where nothing does


def read_states(checkpoint: Checkpoint, *, parts: Sequence[Part], this_rank: ThisRank, **kwargs: Any) -> LoadedStates:
    """Read everything but the weights of models, and look whether it fits."""
    manifest, rank = checkpoint.manifest, this_rank.rank
    if manifest is not None and rank not in manifest.ranks:
        rank = min(manifest.ranks, default=0)  # one that took part in the save
    layout = this_rank.world_size, this_rank.num_data_ranks
    on_other_ranks = manifest is not None and layout != (manifest.num_processes, manifest.num_data_ranks)
    states = []
    for part in parts:
        name = part.name_on(rank)
        if part.loader is not None and name not in checkpoint.files:
            name = part.file  # of accelerate's, which has one for all
            if name not in checkpoint.files:
                continue
        path = checkpoint.folder / name
        if part.loader is not None and manifest is not None and on_other_ranks:
            states.append((part, path, _position_by_rows(manifest, part, part.loader, path, this_rank)))
            continue
        # Load to the CPU. Optimizers move their state to the device, but never move CPU-only entries (step counters, a
        # sampler's random state) back.
        state = _read_named_optimizer(checkpoint, part) or checkpoint.load_file(name, **kwargs)
        if part.check is not None:
            check_class(str(path), None if manifest is None else manifest.kinds.get(part.file), part.thing)
            part.check(str(path), state, part.thing)
        states.append((part, path, state))
    # A rank that had no part in the save draws other random numbers; the orders of loaders are those of all ranks.
    rng_state, orders = None, []
    file = RANDOM_NUMBERS.format(rank)
    if file in checkpoint.files:
        saved = checkpoint.load_file(file)
        check_random_numbers(str(checkpoint.folder / file), saved)
        orders = [order and Order.decoded(order) for order in saved.get("orders", ())]
        rng_state = saved if rank == this_rank.rank else None
    # What the manifest says is the same on all ranks, those without random numbers of their own too.
    step = manifest.step if manifest is not None else rng_state.get("step") if rng_state is not None else None
    return LoadedStates(of_parts=states, rng_state=rng_state, step=step, orders=orders)


def _position_by_rows(manifest: Manifest, part: Part, loader: int, path: Path, this_rank: ThisRank) -> dict[str, Any]:
    """Return the position of a loader after as many rows: on other ranks it cannot go on from its own state."""
    position = position_here(manifest, loader, part.thing, this_rank.num_data_ranks)
    if isinstance(part.thing.dataset, IterableDataset) and position:
        raise CheckpointError(
            f"{path} is the position of {manifest.num_data_ranks} processes in a stream, in the middle of an epoch, "
            f"and this run has {this_rank.num_data_ranks}. Start {manifest.num_data_ranks} processes, or load a "
            "checkpoint that was saved between epochs."
        )
    return {"nb_accelerate": {"epoch": manifest.epochs[loader], "position": position}}


def _read_named_optimizer(checkpoint: Checkpoint, part: Part) -> Any:
    """Return the state of an optimizer that is saved by the names of parameters; None for any other."""
    is_sharded = part.file not in checkpoint.files
    # A whole file of this package has the parameters by number. One of accelerate may have them by name.
    if not part.is_optimizer or not (is_sharded or checkpoint.manifest is None):
        return None
    # Here, because it takes torch a second to import what reads shards.
    from nb_accelerate.training.checkpoint.sharded import NamedOptimizer, by_number, read_optimizer

    if not isinstance(part.thing, NamedOptimizer):
        return None
    optimizer, names = part.thing, part.thing.names
    if is_sharded:
        parameters = [group["params"] for group in optimizer.param_groups]
        return read_optimizer(checkpoint.folder / part.folder, parameters, names)
    state = checkpoint.load_file(part.file)
    groups = state.get("param_groups") if isinstance(state, dict) else None
    is_named = groups and all(isinstance(name, str) for group in groups for name in group.get("params", (0,)))
    return by_number(state, names, str(checkpoint.folder / part.file)) if is_named else None


def check_names(checkpoint: Checkpoint, *, parts: Sequence[Part], num_models: int, strict: bool) -> None:
    """Look whether all is there that is needed, and all is needed that is there.

    What nobody takes is an error if ``strict``, where training goes on.
    """
    folder, files = checkpoint.asked_for, checkpoint.files
    has_weights = not files.isdisjoint(_weight_names(0)) or checkpoint.has_shards(f"{FSDP_MODEL_NAME}_0")
    if not num_models and not parts and has_weights:
        raise CheckpointError(
            f"There is nothing that {folder} could be loaded into. Call load_state after prepare(model, ...)."
        )
    missing = [
        part.file
        for part in parts
        if part.file not in files
        and part.loader is None
        and not (part.is_optimizer and checkpoint.has_shards(part.folder))
    ]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(sorted(missing))}. A state is loaded after the same models, optimizers, "
            "schedulers and objects were prepared or registered as when it was saved, in the same order."
        )
    saved = [name for name in files if re.fullmatch(r"custom_checkpoint_\d+\.pkl", name)]
    registered = [part for part in parts if part.file.startswith("custom_checkpoint_")]
    if len(saved) != len(registered):
        raise CheckpointError(
            f"{folder} has the states of {len(saved)} registered objects, and {len(registered)} are registered now. "
            "Call register_for_checkpointing with the same objects before load_state."
        )
    # What the checkpoint has for models, optimizers and schedulers that nothing here takes.
    used = {part.file for part in parts} | {part.folder for part in parts if part.is_optimizer}
    for number in range(num_models):
        used |= {*_weight_names(number), shards_of(name_of(SAFE_WEIGHTS_NAME, number))}
    sharded = {name.partition("/")[0] for name in files if checkpoint.has_shards(name.partition("/")[0])}
    needed = {name for name in files | sharded if _TO_TRAIN_WITH.fullmatch(name)}
    unused = sorted((needed | {name for name in sharded if OF_SHARDS.fullmatch(name)}) - used)
    trains = any(part.is_optimizer for part in parts)
    if unused and trains and strict:
        raise CheckpointError(
            f"{folder} has {', '.join(unused)}, which nothing here takes: training would go on without. Prepare what "
            "was prepared when it was saved, or leave it behind with load_state(..., strict=False)."
        )
    if unused:
        logger.warning("Of %s, %s was not used: nothing that was prepared takes it.", folder, ", ".join(unused))


def check_no_engine(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint in which DeepSpeed has saved a model, where models are trained without it."""
    folder = checkpoint.asked_for
    if any(name.endswith("_model_states.pt") for name in checkpoint.all_files()):
        raise CheckpointError(
            f"{folder} was saved with DeepSpeed, and models are trained without it here. Write "
            "Accelerator(deepspeed_plugin=...) as when it was saved; or, for the weights alone, "
            f"`python {folder / 'zero_to_fp32.py'} {folder} WEIGHTS` (ZeRO stages 1 to 3), and "
            "load_checkpoint_in_model(model, 'WEIGHTS') before prepare."
        )


def read_weights(
    checkpoint: Checkpoint, models: Sequence[nn.Module], *, map_location: str | torch.device, strict: bool
) -> list[dict[str, Any]]:
    """Read the weights of models, under the names that these have for them, and look whether they fit."""
    weights = []
    for number, model in enumerate(models):
        names = _weight_names(number)
        name = next((name for name in names if name in checkpoint.files), None)
        shards = shards_of(names[0])
        if name is None and checkpoint.has_shards(shards):
            from nb_accelerate.training.checkpoint.sharded import read_model  # as above

            weights.append(read_model(checkpoint.folder / shards, model, strict=strict))
            continue
        if name is None:
            raise CheckpointError(
                f"{checkpoint.folder} lacks {names[0]}. A state is loaded after the same models were prepared as when "
                "it was saved, in the same order."
            )
        file = checkpoint.folder / name
        saved = load_state_dict(file, {"": map_location})
        tensors = fit(saved, model, str(file), strict=strict)
        check_shapes(
            str(file), {name: value.shape for name, value in tensors.items() if hasattr(value, "shape")}, model
        )
        weights.append(tensors)
    return weights


def _weight_names(number: int) -> list[str]:
    """Return the names that a file with the weights of a model may have; the last one only of accelerate's."""
    return [name_of(name, number) for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, f"{FSDP_MODEL_NAME}.bin")]


def apply(
    checkpoint: Checkpoint,
    states: LoadedStates,
    models: Sequence[nn.Module],
    weights: Sequence[Mapping[str, Any]],
    *,
    loaders: Sequence[Any],
    collectives: Collectives,
    this_rank: ThisRank,
    load_weights: Callable[..., None],
    **kwargs: Any,
) -> None:
    """Put what was read into its places. All ranks call it together."""
    # What only its owner can check goes first: objects of the user's, loaders, schedulers. If one refuses, on any rank,
    # the objects loaded before it get back the state that they had.
    before: list[tuple[Any, Any]] = []

    def load_others() -> None:
        for part, file, state in states.of_parts:
            if not part.is_optimizer:
                before.append((part.thing, _copied(part.thing.state_dict())))
                _load(part, file, state)

    def load_checked() -> None:
        for part, file, state in states.of_parts:
            if part.is_optimizer:
                _load(part, file, state)
        for model, tensors in zip(models, weights, strict=True):
            load_weights(model, tensors, strict=False, **kwargs)
        _restore_rng_and_loaders(checkpoint, states, loaders, this_rank)

    try:
        run_on_all_ranks(collectives, load_others)
    except Exception:
        for thing, state in reversed(before):
            with contextlib.suppress(Exception):  # one that takes back nothing must not hide the cause
                thing.load_state_dict(state)
        raise
    run_on_all_ranks(collectives, load_checked)


def _load(part: Part, file: Path, state: Any) -> None:
    try:
        part.thing.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"{file} was refused by {type(part.thing).__name__}.load_state_dict: {type(error).__name__}: {error}"
        ) from error


def _copied(state: Any) -> Any:
    """Return a copy that does not change with its owner. Tensors go to host memory: a device may be nearly full."""
    return tree_map(
        lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else deep_copy(leaf), state
    )


def _restore_rng_and_loaders(
    checkpoint: Checkpoint, states: LoadedStates, loaders: Sequence[Any], this_rank: ThisRank
) -> None:
    """Restore random numbers, and the epochs, seeds and orders of loaders."""
    manifest = checkpoint.manifest
    if manifest is not None:
        for loader, epoch in zip(loaders, manifest.epochs, strict=False):
            loader.set_epoch(epoch)
        for loader, seed in zip(loaders, manifest.seeds, strict=False):
            if seed is not None and hasattr(loader.get_sampler(), "initial_seed"):
                loader.get_sampler().initial_seed = seed
    for loader, order in zip(loaders, states.orders, strict=False):
        if order is not None:
            loader.draw_again(order)
    if states.rng_state is not None:
        rng.restore(states.rng_state, this_rank.kind)
        return
    num_before = this_rank.world_size if manifest is None else manifest.num_processes
    file = checkpoint.folder / RANDOM_NUMBERS.format(this_rank.rank)
    message = f"{file} is not there: rank {this_rank.rank} goes on with other random numbers than it had."
    if num_before != this_rank.world_size:
        note(f"{message} It was saved by {num_before} processes, and this run has {this_rank.world_size}.")
    else:
        logger.warning("%s Was save_state called on the main process only?", message)
