"""Cut any sequence into one part per rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where a rank's part of ``length`` items begins and ends; the first ranks get one more."""
    each, more = divmod(length, world_size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def split_between(inputs: Any, rank: int, world_size: int, *, pad: bool) -> Any:
    """Return a rank's part of a list, tuple, tensor or anything else that can be sliced, or of a dict of those.

    Args:
        inputs: the same on all ranks.
        rank: whose part.
        world_size: how many ranks there are.
        pad: repeat the last item, so that all parts are equally long.

    Raises:
        TypeError: ``inputs`` has no length.
        ValueError: the values of a dict are of different lengths.
    """
    if world_size == 1:
        return inputs
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"split_between_processes was given a dict whose values have different lengths, {lengths}, so their "
                "items do not belong together. Split them one by one, or make them equally long."
            )
        return {key: split_between(value, rank, world_size, pad=pad) for key, value in inputs.items()}
    first, end = bounds(len(inputs), rank, world_size)
    part = inputs[first:end]
    missing = -(-len(inputs) // world_size) - (end - first)
    if not pad or not missing or not len(inputs):
        return part
    last = inputs[-1:]
    if isinstance(part, Tensor):
        return torch.cat([part, last.expand(missing, *last.shape[1:])])
    return part + last * missing
