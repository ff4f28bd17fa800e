"""Encode the position of a loader that reads by torchdata: torchdata's state, plus what that lacks.

torchdata counts the batches of an epoch, but not epochs, nor does it know what the order was drawn from. The key
``nb_accelerate`` holds that. It is left out where its values are the default: the first epoch (the second, if the first
is over), as many batches handed out as read, and an order that is not drawn. Such states can be loaded by torchdata
itself and by other loaders built on it, and theirs can be loaded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nb_accelerate.errors import CheckpointError

_OVER = "_iterator_finished"
_OURS = "nb_accelerate"
_OF_SAMPLERS = ("_index_sampler_state", "_sampler_iter_state")
_OF_DATASETS = ("dataset_state", "dataset_iter_state")


@dataclass(frozen=True, kw_only=True)
class SavedPosition:
    """A saved position in the data."""

    epoch: int  # the current one, from 0
    position: int  # batches of it that were handed out
    reading: dict[str, Any] = field(default_factory=dict)  # the state of torchdata's loader; empty for other loaders
    repeat: int = 0  # batches to leave out after ``reading`` was restored
    restores: bool = False  # whether samplers or datasets have a state in it; else the position is enough
    # what draws the order of the epoch, see `Order.encoded`; empty if nothing does
    order: dict[str, Any] = field(default_factory=dict)


def encode(position: SavedPosition, *, per_batch: int) -> dict[str, Any]:
    """Return a position in the form in which it is saved: torchdata's state, and our key where it is needed."""
    reading, repeat = position.reading, position.repeat
    if (position.epoch, position.position) == _assumed(reading, per_batch) and not (repeat or position.order):
        return dict(reading)
    ours = {"epoch": position.epoch, "position": position.position} | ({"repeat": repeat} if repeat else {})
    return {**reading, _OURS: ours | ({"order": position.order} if position.order else {})}


def decode(state: Any, *, per_batch: int, workers: int) -> SavedPosition:
    """Return the position in a state that `encode`, torchdata's loader or another loader built on it returned.

    It is refused if it is something else, or has states of samplers or datasets for another number of ``workers``.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"A loader cannot load a {type(state).__name__} as its position. {_WHAT}")
    reading = {key: value for key, value in state.items() if key != _OURS}
    try:
        epoch, position = _assumed(reading, per_batch)
        ours = state.get(_OURS, {"epoch": epoch, "position": position})
        epoch, position, repeat = _whole(ours["epoch"]), _whole(ours["position"]), _whole(ours.get("repeat", 0))
        order = ours.get("order", {})
        states = _states(reading)
        were = len(reading["_snapshot"]["_worker_snapshots"]) if "_snapshot" in reading else 0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"A loader cannot load this position ({type(error).__name__}: {error}). {_WHAT} The keys given: "
            f"{', '.join(map(repr, state)) or 'none'}."
        ) from error
    if were != workers and any(set(state) - {"samples_yielded"} for state in states if isinstance(state, Mapping)):
        raise CheckpointError(
            f"The position was saved by a loader with num_workers={were}, together with the state of its sampler or "
            f"dataset in each of them, and this loader has num_workers={workers}. Write num_workers={were}."
        )
    restores = bool(states) and were == workers
    return SavedPosition(
        epoch=epoch,
        position=position,
        reading=reading,
        repeat=repeat if restores else 0,
        restores=restores,
        order=order,
    )


def is_over(reading: Mapping[str, Any]) -> bool:
    """Return whether the epoch of a state of torchdata is over."""
    return bool(reading.get(_OVER, False))


def shifted(reading: Mapping[str, Any], batches: int, *, over: bool = False) -> dict[str, Any]:
    """Return a state of torchdata with ``batches`` added to its counts; with ``over``, as at the end of the epoch."""
    reading = {**reading, _OVER: True} if over and reading else dict(reading)
    if not (batches and reading):
        return reading
    if "_snapshot" not in reading:
        return _added(reading, batches, "_num_yielded", "_sampler_iter_yielded")
    snapshot = _added(reading["_snapshot"], batches, "_snapshot_step")
    snapshot["_main_snapshot"] = _added(snapshot["_main_snapshot"], batches, "_sampler_iter_yielded")
    return {**reading, "_snapshot": snapshot}


_WHAT = "Pass what state_dict() of a stateful loader, or of torchdata's own loader, returned."


def _added(counts: Mapping[str, Any], batches: int, *names: str) -> dict[str, Any]:
    return {**counts, **{name: max(counts[name] + batches, 0) for name in names}}


def _assumed(reading: Mapping[str, Any], per_batch: int) -> tuple[int, int]:
    """Return the epoch and position that a state of torchdata implies without our key."""
    if not reading:
        return 0, 0
    if "_snapshot" in reading:
        read = reading["_snapshot"]["_snapshot_step"] + reading["_steps_since_snapshot"]
    else:
        read = reading["_num_yielded"]
    return (1, 0) if is_over(reading) else (0, _whole(read) // per_batch)


def _states(reading: Mapping[str, Any]) -> list[Any]:
    """Return the states of samplers and datasets in a state of torchdata."""
    main, workers = reading, [reading]
    if "_snapshot" in reading:
        main = reading["_snapshot"]["_main_snapshot"]
        workers = list(reading["_snapshot"]["_worker_snapshots"].values())
    streams = [worker["fetcher_state"] for worker in workers if worker.get("fetcher_state") is not None]
    states = [holder.get(name) for holder in (*workers, *streams) for name in _OF_DATASETS]
    if not streams:  # what is read from its beginning has a sampler too, which only counts
        states += [main.get(name) for name in _OF_SAMPLERS]
    return [state for state in states if state is not None]


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is not a number of batches")
    return number
