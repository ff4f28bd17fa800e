"""Compute which rows go to which rank. Pure functions, without data or processes.

A loader's rows, in the order of its sampler, are cut into *groups*: what all ranks together see in one step. Each
rank takes its slice of each group. With batches of 2 and 2 ranks::

    rows        0 1 2 3 | 4 5 6 7 | 8
    rank 0      0 1       4 5       8 0     <- even_batches fills the last group from the start
    rank 1          2 3       6 7       1 2

A group is ``world_size`` batches, so batch k goes to rank k modulo world_size; with ``split_batches`` it is one
batch, cut into pieces. Everything else is the same. Gathered in rank order, a group is in the loader's order, and
in the last one only its first ``remainder`` rows are real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.pytree import children_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


T = TypeVar("T")

_BLOCK_ROWS = 1 << 10  # row numbers of a tensor that are converted to Python numbers at a time


@dataclass(frozen=True, slots=True)
class GroupRows:
    """How many rows of a group are real (not copies), and how many rows each rank has of it.

    Gathered in rank order, the real rows come first.
    """

    real: int | None  # of all ranks together; None if all rows are real
    on_rank: int | None  # of this rank, copies included; None if not known
    of_ranks: tuple[int, ...] | None = None  # if they differ

    def real_entries(self, entries: Sequence[int]) -> int | None:
        """Return how many entries belong to real rows: the first, in rank order. None if that cannot be known.

        Ranks have ``entries``; as many for one row as for another, or padded to those of the longest.
        """
        if self.real is None:
            return sum(entries)
        if self.on_rank is None:
            return min(self.real, sum(entries))
        left, kept = self.real, 0
        for rows, number in zip(self.of_ranks or [self.on_rank] * len(entries), entries, strict=True):
            real = min(rows, left)
            left -= real
            if real < rows and real and number % rows:
                return None
            kept += number if real == rows else number // rows * real if real else 0
        return kept


def rows_of_ranks(real: int, rows: Sequence[int]) -> list[GroupRows]:
    """Return the `GroupRows` of each rank, where ranks have ``rows`` of a group and its first ``real`` are real."""
    differ = len(set(rows)) > 1
    return [GroupRows(real, on_rank, tuple(rows) if differ else None) for on_rank in rows]


def rows_per_rank(batch_size: int, world_size: int, *, split_batches: bool) -> int:
    """Return how many rows of a full group each rank takes; a `ConfigError` if batches cannot be split evenly."""
    if not split_batches:
        return batch_size
    if batch_size % world_size:
        lower = batch_size - batch_size % world_size
        near = f"batch_size={lower} or {lower + world_size}" if lower else f"batch_size={world_size}"
        raise ConfigError(
            f"split_batches=True was asked for, but batches of {batch_size} cannot be cut into {world_size} equal "
            f"pieces. Write {near} in the DataLoader, or split_batches=False."
        )
    return batch_size // world_size


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How the rows of one epoch are shared out."""

    rows: int  # that the sampler yields
    batch_size: int  # of the user's loader
    world_size: int
    split_batches: bool = False  # cut each batch into pieces instead of handing out whole batches
    even_batches: bool = True  # fill the last group with rows from the start, so that all ranks have equal batches
    drop_last: bool = False  # leave out an incomplete last group
    local_size: int = field(init=False)
    group_size: int = field(init=False)

    def __post_init__(self) -> None:
        local = rows_per_rank(self.batch_size, self.world_size, split_batches=self.split_batches)
        object.__setattr__(self, "local_size", local)
        object.__setattr__(self, "group_size", local * self.world_size)

    @property
    def full_groups(self) -> int:
        return self.rows // self.group_size

    @property
    def remainder(self) -> int:
        """Real rows in the incomplete last group; 0 if there is none, or if it is left out."""
        return 0 if self.drop_last else self.rows % self.group_size

    def num_batches(self, rank: int) -> int:
        return self.full_groups + (
            self.remainder > 0 and (self.even_batches or self.remainder > rank * self.local_size)
        )

    def batches(self, order: Sequence[Any] | Tensor, rank: int, *, start: int = 0) -> Iterator[list[Any]]:
        """Yield the batches of a rank, without the first ``start``, which cost nothing.

        ``order`` has all rows, in the order of the sampler.
        """
        local, group = self.local_size, self.group_size
        end = self.full_groups * group
        if isinstance(order, Tensor):
            # In blocks, because a list of a million numbers delays the first batch, and single numbers every batch.
            of_rank = order[:end].view(self.full_groups, self.world_size, local)[start:, rank]
            for block in torch.split(of_rank, max(_BLOCK_ROWS // local, 1)):
                yield from block.tolist()
        else:
            for first in range(start * group + rank * local, end, group):
                yield list(order[first : first + local])
        if self.remainder and start <= self.full_groups:
            first_rows, last_rows = (
                part.tolist() if isinstance(part, Tensor) else list(part) for part in (order[:group], order[end:])
            )
            yield from piece_of_last_group(
                last_rows, first_rows, rank, local_size=local, group_size=group, even_batches=self.even_batches
            )


def piece_of_last_group(
    last: list[T], start: Sequence[T], rank: int, *, local_size: int, group_size: int, even_batches: bool
) -> Iterator[list[T]]:
    """Yield the rows that a rank gets of an incomplete group, whose real rows are ``last``: one list, or nothing.

    With ``even_batches`` it is filled up with rows from the ``start`` of the data, again and again if they are few;
    otherwise the last ranks get fewer rows, or none.
    """
    first = rank * local_size
    if even_batches:
        missing = group_size - len(last)
        last = last + [start[index % len(start)] for index in range(missing)]
    piece = last[first : first + local_size]
    if piece:
        yield piece


def round_of_batches(last: list[T], start: Sequence[T], world_size: int, *, even_batches: bool) -> list[T]:
    """Return the batches of an incomplete last round, in rank order, where batches have no fixed size.

    No row is moved from one batch to another: what belongs together stays so. With ``even_batches`` the round is filled
    up with batches of the first one, ``start``, again and again if they are few.
    """
    missing = world_size - len(last) if even_batches else 0
    return last + [start[index % len(start)] for index in range(missing)]


def part_bounds(rows: int, world_size: int, *, even: bool) -> list[tuple[int, int]]:
    """Return the first row and the end of each rank's part of an incomplete group that rank 0 splits.

    With ``even``, the group is filled up with as few copies as possible, so ends may exceed ``rows``; otherwise the
    last ranks may get fewer rows, or none.
    """
    each = -(-rows // world_size)
    bounds = [(rank * each, (rank + 1) * each) for rank in range(world_size)]
    return bounds if even else [(min(first, rows), min(end, rows)) for first, end in bounds]


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
    indices = [*range(first, end), *[len(inputs) - 1] * missing]
    if hasattr(inputs, "column_names") and hasattr(inputs, "select"):  # a datasets.Dataset: slices are dicts of columns
        return inputs.select(indices)
    if hasattr(inputs, "iloc"):  # of pandas
        return inputs.iloc[indices]
    part = inputs[first:end]
    if not missing:
        return part
    if isinstance(inputs, (Tensor, np.ndarray)):
        return inputs[indices]
    # A range, say, cannot hold an item twice.
    return part + inputs[-1:] * missing if isinstance(inputs, _JOINED) else [inputs[number] for number in indices]
