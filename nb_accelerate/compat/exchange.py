"""Free functions that exchange tensors and objects between processes; see `training.comm.operations`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.training.comm import operations
from nb_accelerate.training.process import rng
from nb_accelerate.training.pytree import map_tensors, tensors_in
from nb_accelerate.training.state.choices import current_collectives, current_data_collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def gather(tensor: Any) -> Any:
    """Return the tensors of all processes, concatenated along dimension 0. See `Accelerator.gather`."""
    return operations.gather(current_data_collectives(), tensor)


def gather_object(object: Sequence[Any]) -> list[Any]:  # noqa: A002 - accelerate's name
    """Return the items of all processes in one list, in the order of processes.

    Raises:
        TypeError: what was given is not a list.
    """
    return operations.gather_object(current_data_collectives(), object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the mean of tensors over all processes; or ``"sum"``, or ``"max"``, the largest of each element."""
    return operations.reduce(current_data_collectives(), tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return, on all processes, the tensors of process ``from_process``. They are also written to ``tensor``."""
    collectives = current_collectives()
    received = operations.broadcast(collectives, tensor, from_process)
    if collectives.rank != from_process:
        for mine, sent in zip(tensors_in(tensor), tensors_in(received), strict=True):
            is_expanded = any(not step and size > 1 for step, size in zip(mine.stride(), mine.shape, strict=True))
            if mine is not sent and not is_expanded:
                mine.data.copy_(sent)  # unseen by autograd, as in torch's own broadcast
    return received


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Return, on every process, the tensor of the one process that has it; the others pass None.

    Raises:
        ValueError: no process has it, or several have.
    """
    return operations.copy_from_owner(current_collectives(), tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list by those of process ``from_process``, in place, and return the list."""
    return operations.broadcast_object_list(current_collectives(), object_list, from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Return tensors padded to their greatest size on any process; see `Accelerator.pad_across_processes`."""
    return operations.pad_across_processes(current_data_collectives(), tensor, dim, pad_index, pad_first)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return tensors with as many zeros added along a dimension as make the rows of a batch a multiple of processes.

    Args:
        tensor: a tensor, or a structure of tensors.
        batch_size: rows of the batch.
        num_processes: the rows are shared out among so many.
        dim: the dimension of the rows.
    """

    def pad(rows: Tensor) -> Tensor:
        size = list(rows.shape)
        size[dim] = -batch_size % num_processes
        return torch.cat([rows, rows.new_zeros(size)], dim)

    return map_tensors(pad, tensor)


def wait_for_everyone() -> None:
    """Block until all processes have called it: a barrier."""
    current_collectives().barrier()


def synchronize_rng_states(rng_types: Sequence[str | rng.RNGType], generator: torch.Generator | None = None) -> None:
    """Set the random states of all processes to those of process 0.

    Args:
        rng_types: names of generators: ``"torch"``, ``"cuda"``, ``"generator"`` and so on; see `RNGType`.
        generator: the generator that ``"generator"`` means.

    Raises:
        ConfigError: a name is not one of `RNGType`.
    """
    collectives = current_collectives()

    def from_first(state: Tensor) -> Tensor:
        sent: Tensor = operations.broadcast(collectives, state)
        return sent

    rng.synchronize(rng.resolve_rng_types(rng_types), from_first, generator)


def synchronize_rng_state(rng_type: str | rng.RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Set one random state of all processes to the state of process 0. See `synchronize_rng_states`."""
    if rng_type is not None:
        synchronize_rng_states([rng_type], generator)
