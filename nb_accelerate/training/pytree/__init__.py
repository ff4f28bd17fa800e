"""Structures that hold tensors: walk through them, change every tensor, keep the structure."""

from nb_accelerate.training.pytree.pytree import (
    children_of,
    find_batch_size,
    is_movable,
    is_on,
    map_tensors,
    paths_of_children,
    paths_of_tensors,
    send_to_device,
    tensors_in,
    to_float32,
)

__all__ = [
    "children_of",
    "find_batch_size",
    "is_movable",
    "is_on",
    "map_tensors",
    "paths_of_children",
    "paths_of_tensors",
    "send_to_device",
    "tensors_in",
    "to_float32",
]
