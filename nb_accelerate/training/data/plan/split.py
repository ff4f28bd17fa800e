"""Cut any sequence into one part per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from nb_accelerate.training.pytree import children_of

_JOINED: tuple[type[Any], ...] = (list, tuple)  # by a plus, which of a numpy array means numbers


def bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where a rank's part of ``length`` items begins and ends; the first ranks get one more."""
    each, more = divmod(length, world_size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def split_between(inputs: Any, rank: int, world_size: int, *, pad: bool) -> Any:
    """Return a rank's part of something with a length, of its own type; of a mapping, of every value.

    Text and bytes are handed out whole, as by accelerate: a prompt is one item. ``pad`` repeats the last item, so that
    all parts are equally long.
    """
    if world_size == 1 or isinstance(inputs, (str, bytes)):
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"split_between_processes was given a {type(inputs).__name__} whose values have different lengths, "
                f"{lengths}, so their items do not belong together. Split them one by one, or make them equally long."
            )
        inside = children_of(inputs)
        assert inside is not None
        values, rebuild = inside
        return rebuild([split_between(value, rank, world_size, pad=pad) for value in values])
    length = len(inputs)
    first, end = bounds(length, rank, world_size)
    missing = -(-length // world_size) - (end - first) if pad and length else 0
    return _rows_of(inputs, first, end, missing)


def _rows_of(inputs: Any, first: int, end: int, missing: int) -> Any:
    """Return a part of something, and ``missing`` times its very last item after it."""
    numbers = [*range(first, end), *[len(inputs) - 1] * missing]
    if hasattr(inputs, "column_names") and hasattr(inputs, "select"):  # a datasets.Dataset: slices are dicts of columns
        return inputs.select(numbers)
    if hasattr(inputs, "iloc"):  # of pandas
        return inputs.iloc[numbers]
    part = inputs[first:end]
    if not missing:
        return part
    if isinstance(inputs, (Tensor, np.ndarray)):
        return inputs[numbers]
    # A range, say, cannot hold an item twice.
    return part + inputs[-1:] * missing if isinstance(inputs, _JOINED) else [inputs[number] for number in numbers]
