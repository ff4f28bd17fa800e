"""Everything that a run needs to go on: a list of named parts, saved and loaded one by one."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.checkpoint.files import load_state_dict, read, write
from nb_accelerate.checkpoint.folder import replacing
from nb_accelerate.checkpoint.model import fit
from nb_accelerate.checkpoint.names import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
)
from nb_accelerate.errors import CheckpointError
from nb_accelerate.process import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from nb_accelerate.process.devices import DeviceKind

logger = logging.getLogger("nb_accelerate")

ABOUT = "checkpoint.json"
_RANDOM = f"{RNG_STATE_NAME}_{{}}.pkl"
_IF_TRUSTED = "write load_state(..., load_kwargs={'weights_only': False})."
# Exactly the names that are written, here or by accelerate: in the folder there may be files of the user's.
_OF_A_STATE = re.compile(
    r"model(_\d+)?\.safetensors|(pytorch_model|optimizer|scheduler|sampler)(_\d+)?\.bin|scaler\.pt|checkpoint\.json"
    r"|dl_state_dict(_\d+)?(_rank\d+)?\.bin|(random_states|custom_checkpoint)_\d+\.pkl"
)
_OF_A_RANK = re.compile(r"(?:random_states_|.*_rank)(\d+)\.\w+")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing with a state.

    Attributes:
        file: its name.
        save: returns the state.
        load: takes it up again.
        on_every_rank: whether ranks have states that differ; the first one's has the plain name.
    """

    file: str
    save: Callable[[], Any]
    load: Callable[[Any], object]
    on_every_rank: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank this is, and what it writes.

    Attributes:
        rank: of this process.
        world_size: how many there are.
        is_writer: whether it writes what is the same on all ranks.
        kind: its kind of device, which has random numbers of its own.
    """

    rank: int
    world_size: int
    is_writer: bool
    kind: DeviceKind


def parts_of(
    *, optimizers: Sequence[Any], schedulers: Sequence[Any], loaders: Sequence[Any], scaler: Any, custom: Sequence[Any]
) -> list[Part]:
    """Return the parts of a run, models and random numbers apart, in the order in which they are loaded."""
    parts = [
        *(_part(name_of(f"{OPTIMIZER_NAME}.bin", number), one) for number, one in enumerate(optimizers)),
        *(_part(name_of(f"{SCHEDULER_NAME}.bin", number), one) for number, one in enumerate(schedulers)),
        *(
            _part(name_of("dl_state_dict.bin", number), one, on_every_rank=True)
            for number, one in enumerate(loaders)
            if one.use_stateful_dataloader
        ),
    ]
    if scaler is not None:
        parts.append(_part(SCALER_NAME, scaler))
    return [*parts, *(_part(f"custom_checkpoint_{number}.pkl", one) for number, one in enumerate(custom))]


def name_of(first: str, number: int) -> str:
    """Return ``optimizer_2.bin`` for ``optimizer.bin`` and 2."""
    stem, _, ending = first.rpartition(".")
    return f"{stem}_{number}.{ending}" if number else first


def save_state(
    folder: Path,
    *,
    place: Place,
    weights: Callable[[Path], Sequence[Mapping[str, Any]]],
    parts: Sequence[Part],
    loaders: Sequence[Any],
    step: int,
    serial: int,
    safe_serialization: bool,
) -> None:
    """Write this rank's files.

    Ranks do not wait for each other: scripts call it on one rank only, or under ``if is_main_process``.

    Args:
        folder: made if it is not there. What a save before has left is replaced.
        place: of this rank.
        weights: returns the weights of the models, given the folder that hooks may write to.
        parts: see `parts_of`.
        loaders: whose epochs and seeds are noted.
        step: batches in the current accumulation window.
        serial: of this save. It and the whereabouts of loaders tell files of this save from those of one before.
        safe_serialization: write weights as safetensors.
    """
    with replacing(folder, place.rank, outdated=lambda name: _is_outdated(name, place)) as incoming:
        states = weights(incoming)
        if place.is_writer:
            for number, state in enumerate(states):
                name = name_of(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME, number)
                write(state, incoming / name, safe_serialization=safe_serialization)
        for part in parts:
            if part.on_every_rank or place.is_writer:
                name = _on_rank(part.file, place.rank) if part.on_every_rank else part.file
                write(part.save(), incoming / name, safe_serialization=False)
        # Either is the same on all ranks: a rank that left out a save has another serial, and ranks with different
        # numbers of batches end an epoch at different places.
        which = {"serial": serial, "whereabouts": [list(loader.whereabouts) for loader in loaders]}
        numbers = {"step": step, "save": which, **rng.capture(place.kind)}
        write(numbers, incoming / _RANDOM.format(place.rank), safe_serialization=False)
        if place.is_writer:
            about = {
                "format": 1,
                "save": which,
                "step": step,
                "num_processes": place.world_size,
                "epochs": [loader.whereabouts[0] for loader in loaders],
                "seeds": [getattr(loader.get_sampler(), "initial_seed", None) for loader in loaders],
            }
            (incoming / ABOUT).write_text(json.dumps(about, indent=2) + "\n")


def check_state(folder: Path, *, models: Sequence[nn.Module], parts: Sequence[Part]) -> None:
    """Look whether all is there that is needed, before anything is loaded.

    Raises:
        CheckpointError: it is not, or there are states of more objects than are registered now.
    """
    there = {entry.name for entry in folder.iterdir()}
    if not models and not parts and there & {SAFE_WEIGHTS_NAME, WEIGHTS_NAME}:
        raise CheckpointError(
            f"There is nothing that {folder} could be loaded into. Call load_state after prepare(model, ...)."
        )
    missing = [part.file for part in parts if part.file not in there and not part.on_every_rank]
    missing += [
        name_of(SAFE_WEIGHTS_NAME, number)
        for number in range(len(models))
        if not there & {name_of(SAFE_WEIGHTS_NAME, number), name_of(WEIGHTS_NAME, number)}
    ]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(sorted(missing))}. A state is loaded after the same models, optimizers, "
            "schedulers and objects were prepared or registered as when it was saved, in the same order."
        )
    saved = [name for name in there if re.fullmatch(r"custom_checkpoint_\d+\.pkl", name)]
    registered = [part for part in parts if part.file.startswith("custom_checkpoint_")]
    if len(saved) != len(registered):
        raise CheckpointError(
            f"{folder} has the states of {len(saved)} registered objects, and {len(registered)} are registered now. "
            "Call register_for_checkpointing with the same objects before load_state."
        )


def load_models(
    folder: Path, models: Sequence[nn.Module], *, map_location: str | torch.device, strict: bool, **kwargs: Any
) -> None:
    """Load the weights of models.

    Args:
        folder: see `save_state`.
        models: as prepared; they may be wrapped or compiled otherwise than when they were saved.
        map_location: where weights are read to, before they are copied.
        strict: see `fit`.
        **kwargs: those of `torch.nn.Module.load_state_dict`.
    """
    for number, model in enumerate(models):
        file = folder / name_of(SAFE_WEIGHTS_NAME, number)
        if not file.exists():
            file = folder / name_of(WEIGHTS_NAME, number)
        tensors = fit(load_state_dict(file, {"": map_location}), model, str(file), strict=strict)
        model.load_state_dict(tensors, strict=False, **kwargs)


def load_parts(folder: Path, parts: Sequence[Part], *, place: Place, **kwargs: Any) -> None:
    """Load the parts of a run, see `parts_of`.

    Args:
        folder: see `save_state`.
        parts: likewise.
        place: of this rank.
        **kwargs: those of `torch.load`.

    Raises:
        CheckpointError: a file would run code, or was cut off.
    """
    # To the CPU: an optimizer moves on what belongs to the device. It does not move back what does not: with the
    # steps counted on a device every step would wait for it, and a sampler's random state cannot be restored from one.
    rank = 0 if _numbers(folder, place) is None else place.rank
    for part in parts:
        file = folder / (_on_rank(part.file, rank) if part.on_every_rank else part.file)
        if part.on_every_rank and not file.exists():
            file = folder / part.file  # of accelerate's, which has one for all
            if not file.exists():
                continue
        part.load(read(file, "cpu", if_trusted=_IF_TRUSTED, **kwargs))


def load_numbers(folder: Path, loaders: Sequence[Any], *, place: Place) -> int | None:
    """Restore random numbers, and the epochs and seeds of loaders.

    Returns:
        Batches in the accumulation window when it was saved; None if that is not known.
    """
    about = _about(folder)
    step: int | None = about.get("step")  # the same on all ranks, those without a file of their own too
    for loader, epoch in zip(loaders, about.get("epochs", ()), strict=False):
        loader.set_epoch(epoch)
    for loader, seed in zip(loaders, about.get("seeds", ()), strict=False):
        if seed is not None and hasattr(loader.get_sampler(), "initial_seed"):
            loader.get_sampler().initial_seed = seed
    states = _numbers(folder, place)
    if states is None:
        logger.warning(
            "%s is not there, or of another save: rank %d goes on with other random numbers than it had. %s",
            folder / _RANDOM.format(place.rank),
            place.rank,
            f"It was saved by {about['num_processes']} processes, and this run has {place.world_size}."
            if about.get("num_processes", place.world_size) != place.world_size
            else "Was save_state called on the main process only, or was it cut off between two ranks?",
        )
        return step
    rng.restore(states, place.kind)
    return states.get("step") if step is None else step


def _about(folder: Path) -> dict[str, Any]:
    """Return what is noted about a checkpoint; nothing for one of accelerate's."""
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text()) if (folder / ABOUT).exists() else {}
    return about


def _numbers(folder: Path, place: Place) -> dict[str, Any] | None:
    """Return this rank's random numbers, or None if the rank wrote nothing in the save that is there."""
    file = folder / _RANDOM.format(place.rank)
    numbers: dict[str, Any] | None = read(file, "cpu", if_trusted=_IF_TRUSTED) if file.exists() else None
    return None if numbers is None or not _is_same(numbers.get("save"), _about(folder).get("save")) else numbers


def _is_same(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether two files are of one save. Those of accelerate do not say."""
    if one is None or other is None:
        return one is other
    is_at_one_place: bool = one["whereabouts"] == other["whereabouts"] != []
    return is_at_one_place or bool(one["serial"] == other["serial"])


def _part(file: str, thing: Any, *, on_every_rank: bool = False) -> Part:
    return Part(file=file, save=thing.state_dict, load=thing.load_state_dict, on_every_rank=on_every_rank)


def _on_rank(name: str, rank: int) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{stem}_rank{rank}.{ending}" if rank else name


def _is_outdated(name: str, place: Place) -> bool:
    """Whether a file of a save before is in the way: what one rank writes, no other removes while it exists."""
    if not place.is_writer or not _OF_A_STATE.fullmatch(name):
        return False
    of_a_rank = _OF_A_RANK.fullmatch(name)
    return of_a_rank is None or int(of_a_rank[1]) >= place.world_size
