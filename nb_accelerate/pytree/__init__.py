"""Structures that hold tensors: walk through them, change every tensor, keep the structure."""

from nb_accelerate.pytree.paths import paths_of_tensors
from nb_accelerate.pytree.placement import send_to_device, to_float32
from nb_accelerate.pytree.pytree import find_batch_size, map_tensors, tensors_in

__all__ = ["find_batch_size", "map_tensors", "paths_of_tensors", "send_to_device", "tensors_in", "to_float32"]
