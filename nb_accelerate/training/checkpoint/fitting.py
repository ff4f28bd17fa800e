"""Compare what was read from a checkpoint with the objects that it is for, before any of them is changed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from nb_accelerate.training.checkpoint.manifest import Manifest


def class_of(thing: Any) -> str:
    """Return the name of the class of a user's optimizer or scheduler, also of one that ``prepare`` has wrapped."""
    for name in ("optimizer", "scheduler"):
        inside = vars(thing).get(name) if hasattr(thing, "__dict__") else None
        if inside is not None and hasattr(inside, "state_dict") and type(thing).__module__.startswith("nb_accelerate."):
            thing = inside
    return type(thing).__qualname__


def check_class(file: str, was: str | None, thing: Any) -> None:
    """Compare the class of the saved object with the class of the object that it is loaded into."""
    now = class_of(thing)
    if was is not None and was != now:
        raise CheckpointError(
            f"{file} is the state of a {was}, and would be loaded into a {now}. Make a {was} as when it was saved, "
            f"or leave the state behind: start the {now} from the beginning, and load the model alone."
        )


def check_optimizer(file: str, state: Any, optimizer: Any) -> None:
    """Compare the state of an optimizer with the parameters that it has now."""
    groups_now = optimizer.param_groups
    try:
        states, groups = state["state"], state["param_groups"]
        sizes = [len(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        if {"state", "param_groups"} <= optimizer.state_dict().keys():
            raise CheckpointError(
                f"{file} is not the state of an optimizer ({type(error).__name__}: {error})."
            ) from error
        return  # it has a format of its own, which only it can check
    now = [len(group["params"]) for group in groups_now]
    if sizes != now:
        raise CheckpointError(
            f"{file} is the state of an optimizer of {_groups(sizes)}, and this one has {_groups(now)}. Make model and "
            "optimizer as they were when it was saved."
        )
    inside = getattr(optimizer, "optimizer", optimizer)
    if not type(inside).__module__.startswith("torch.optim."):
        return
    # Versions of torch add flags to the defaults; the numbers of an optimizer stay.
    needed = {name for name, value in inside.defaults.items() if not isinstance(value, (bool, type(None)))}
    for group in groups:
        missing = needed - group.keys()
        if missing:
            raise CheckpointError(
                f"{file} is not the state of a {type(inside).__name__}: it lacks {', '.join(sorted(missing))}. Make "
                "the optimizer that it was saved from."
            )
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in groups_now for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in (states.get(number) or {}).items():
            # What is of no shape, or of another number of dimensions, need not be of the parameter's; factored states
            # have sizes of 1.
            if type(value) is not torch.Tensor or value.dim() == 0 or value.dim() != parameter.dim():
                continue
            if any(size not in {1, of} for size, of in zip(value.shape, parameter.shape, strict=True)):
                raise CheckpointError(
                    f"{file} does not fit: its {name} of parameter {number} is of shape {tuple(value.shape)}, and the "
                    f"parameter of shape {tuple(parameter.shape)} here. Make the model as it was when it was saved."
                )


def check_scheduler(file: str, state: Any, scheduler: Any) -> None:
    """Compare the names in the saved state of a scheduler with the names in its state now."""
    now = scheduler.state_dict()
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is not the state of a scheduler: it holds a {type(state).__name__}.")
    # A version of torch may add names, or drop some: another class does both.
    if now.keys() - state.keys() and state.keys() - now.keys():
        raise CheckpointError(
            f"{file} is not the state of a {class_of(scheduler)}: it lacks "
            f"{', '.join(sorted(map(str, now.keys() - state.keys())))}, and has "
            f"{', '.join(sorted(map(str, state.keys() - now.keys())))}. Make the scheduler that it was saved from."
        )


def check_shapes(file: str, shapes: Mapping[str, Any], model: nn.Module, now: Mapping[str, Any] | None = None) -> None:
    """Compare the saved shapes of weights with the model's, by name; the shape is None for what is no tensor."""
    now = model.state_dict() if now is None else now
    for name, shape in shapes.items():
        tensor = now.get(name)
        if shape is None or not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
            continue
        if tuple(shape) == tuple(tensor.shape):
            continue
        if tensor.dim() == 0 and tuple(shape) == (1,):
            continue  # old files have such numbers in a list
        owner = model.get_submodule(name.rpartition(".")[0])
        loads_itself = type(owner)._load_from_state_dict is not torch.nn.Module._load_from_state_dict  # noqa: SLF001
        if loads_itself and not type(owner).__module__.startswith("torch.nn."):
            continue  # it may take other shapes: observers of quantisation do
        raise CheckpointError(
            f"{file} does not fit this {type(model).__name__}: {name} is of shape {tuple(shape)} in the "
            f"checkpoint and {tuple(tensor.shape)} here. Make the model as it was when it was saved."
        )


def number_of(loader: Any, name: str) -> int | None:
    """Return ``total_batch_size`` or ``total_dataset_length`` of a loader; None if it does not say."""
    try:
        return int(getattr(loader, name))
    except Exception:  # a dataset's own
        return None


def position_here(manifest: Manifest, number: int, loader: Any, world_size: int) -> int:
    """Return how many batches of its epoch a loader is to leave out, on this number of ranks."""
    position, before = manifest.positions[number], manifest.rows_per_step[number]
    now = number_of(loader, "total_batch_size")
    rows_before, rows_now = manifest.num_rows[number], number_of(loader, "total_dataset_length")
    # In the middle of an epoch: other rows are shuffled in another order; rows may be added where none are shuffled.
    if position and None not in (rows_before, rows_now) and rows_before != rows_now:
        is_longer = rows_now > rows_before  # type: ignore[operator]  # neither is None
        if not (is_longer and isinstance(loader.get_sampler(), SequentialSampler)):
            raise CheckpointError(
                f"It was saved in the middle of an epoch of {rows_before} rows, and the dataset has {rows_now} now: "
                "rows would be left out or come twice. Go on with the same dataset, or load a checkpoint that was "
                "saved between epochs."
            )
    same_size = before is not None and before == now
    if not position or same_size or (before is now is None and manifest.num_data_ranks == world_size):
        return position
    if before is not None and now is not None and position * before % now == 0:
        return position * before // now
    had = f"{position} batches" + ("" if before is None else f" of {before} rows, {position * before} in all,")
    reads = "in batches of no fixed size" if now is None else f"{now} rows at a time"
    raise CheckpointError(
        f"It was saved by {manifest.num_data_ranks} processes after {had} of an epoch, and this run of {world_size} "
        f"reads {reads}: rows would be left out or come twice. Start {manifest.num_data_ranks} processes with the same "
        "batch_size, or load a checkpoint that was saved between epochs."
    )


def check_random_numbers(file: str, states: Any) -> None:
    """Restore states of random numbers on new generators, to find out whether that works."""
    try:
        if "random_state" in states:
            version, numbers, gauss = states["random_state"]
            random.Random().setstate((version, tuple(numbers), gauss))  # noqa: S311
        if "numpy_random_seed" in states:
            np.random.RandomState().set_state(states["numpy_random_seed"])
        if "torch_manual_seed" in states:
            torch.Generator().set_state(states["torch_manual_seed"])
        step = states.get("step")
        if step is not None and type(step) is not int:
            raise TypeError(f"its step is {step!r:.60}")
        if type(states.get("orders", [])) is not list:
            raise TypeError(f"its orders are {states['orders']!r:.60}")
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{file} holds no states of random numbers ({type(error).__name__}: {error}).") from error


def _groups(sizes: list[int]) -> str:
    return f"{sum(sizes)} parameters in {len(sizes)} group{'s' if len(sizes) != 1 else ''} {sizes!r:.60}"
