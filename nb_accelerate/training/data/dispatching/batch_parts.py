"""Make parts of batches for ranks, in the order of the data: whole batches, or rows where these can be taken out.

What is in a batch is one of these::

    a column         a tensor, an array or a list with one entry for each row    is cut
    a single value   a number, a text, None, a tensor without dimensions         is handed on whole
    a container      of columns and single values                                is looked into

With anything else in it (a graph, a packed sequence, a tensor with time first, a grid beside the rows) a batch is not
cut: it would have to be guessed which of that belongs to which row.
"""

from __future__ import annotations

import enum
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from nb_accelerate.training.data.plan.plan import part_bounds, round_of_batches, rows_of_ranks
from nb_accelerate.training.data.reading.iterable import WrappedBatch
from nb_accelerate.training.pytree import children_of, is_movable, paths_of_children

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nb_accelerate.training.data.plan.plan import GroupRows

Take: TypeAlias = Callable[[slice], Any]

_WORDS = (str, bytes, bool, type(None), enum.Enum, torch.dtype, torch.device)
_SINGLE = (*_WORDS, int, float, complex, np.generic)


class CannotCutError(Exception):
    """A part of a batch is neither a column nor a single value. The reason continues a sentence begun by its path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} {reason}")


class AmbiguousError(CannotCutError):
    """A part can be understood in two ways."""


def count_rows(batch: Any) -> int | None:
    """Return how many rows a batch seems to have, or None if nothing in it has rows."""
    arrays = list(_arrays(batch))
    tensors = [array for array in arrays if isinstance(array, Tensor)]
    for array in tensors or arrays:
        return len(array) if isinstance(array, np.ndarray) else array.size(0)
    return _listed_rows(batch)


def _arrays(data: Any) -> Iterator[Any]:
    if isinstance(data, (Tensor, np.ndarray)):
        if _dim(data):
            yield data
    elif (inside := _inside(data)) is not None:
        for item in inside[0]:
            yield from _arrays(item)


def _listed_rows(data: Any) -> int | None:
    inside = _inside(data)
    if inside is None:
        return None
    inner = next((rows for rows in map(_listed_rows, inside[0]) if rows is not None), None)
    return len(data) if inner is None and isinstance(data, (list, tuple)) else inner


def row_taker(batches: Sequence[Any], rows: Sequence[int], *, careful: bool = True, of_columns: bool = False) -> Take:
    """Return what takes rows out of batches of the same structure, as if they were one: called with a slice.

    With ``careful``, what may be about all rows together is an `AmbiguousError`: a number (how many they are), a list
    that is the same in all batches (a size in pixels). With ``of_columns``, lists of tensors are columns, as torch's
    `default_collate` makes them, also where they are as long as there are rows.
    """
    has_rows, take = _Cutter(rows, careful=careful, of_columns=of_columns).cut(list(batches), "batch")
    if not has_rows:
        raise CannotCutError("batch", "has nothing with one entry for each row")
    return take


class _Cutter:
    """Finds out how parts of batches are cut. Arguments are those of `row_taker`."""

    def __init__(self, rows: Sequence[int], *, careful: bool, of_columns: bool) -> None:
        self._rows = rows
        self._careful = careful
        self._of_columns = of_columns

    def cut(self, parts: list[Any], path: str) -> tuple[bool, Take]:
        """Return whether a part, which is given as each batch has it, has rows; and what takes them."""
        first = parts[0]
        kind = type(first)
        if any(type(part) is not kind for part in parts):
            kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
            raise CannotCutError(path, f"is of different types: {kinds}")
        is_array = kind is np.ndarray or (kind is Tensor and first.layout is torch.strided and not first.is_nested)
        if is_array and any(map(_dim, parts)):
            return True, _joined(parts, self._rows, path).__getitem__
        if is_array or isinstance(first, _SINGLE):
            if self._careful and not (isinstance(first, _WORDS) and all(part == first for part in parts)):
                raise AmbiguousError(path, "is a single value, which may be about all rows")
            return False, lambda _: first
        if kind in (list, tuple) and all(len(part) == number for part, number in zip(parts, self._rows, strict=True)):
            return self._cut_list(parts, path)
        if kind in (list, tuple) and not self._careful and len(first) > 1:
            # Entries of one form with arrays in them may be samples.
            is_sample = not isinstance(first[0], (Tensor, np.ndarray)) and any(True for _ in _arrays(first))
            if is_sample and len(set(map(_form, first))) == 1:
                raise AmbiguousError(path, f"of {len(first)} entries of one form may have one for each row, or may not")
        return self._cut_container(parts, path)

    def _cut_list(self, parts: list[Any], path: str) -> tuple[bool, Take]:
        """Cut lists that are as long as their batches have rows: columns, or containers of so many parts."""
        whole = type(parts[0])(chain.from_iterable(parts))
        if all(isinstance(item, _SINGLE) for item in whole):
            has_rows = self._careful and all(part == parts[0] for part in parts)
        else:
            try:
                has_rows, take = self._cut_container(parts, path)
            except AmbiguousError:
                raise
            except CannotCutError:
                has_rows = False
            if has_rows and (self._of_columns or len(set(map(_form, whole))) > 1):
                return True, take  # columns: rows are of one form
        if has_rows:
            raise AmbiguousError(path, f"of {len(parts[0])} entries may have one for each row, or may not")
        return True, whole.__getitem__

    def _cut_container(self, parts: list[Any], path: str) -> tuple[bool, Take]:
        insides = [inside for inside in map(_inside, parts) if inside is not None]
        if not insides:
            raise CannotCutError(path, f"is a {type(parts[0]).__name__}, whose rows are not known")
        paths = [[name for name, _ in paths_of_children(part, path)] for part in parts]
        if any(names != paths[0] for names in paths):
            raise CannotCutError(path, "does not have the same parts in all batches")
        columns = zip(*[items for items, _ in insides], strict=True)
        takers = [self.cut(list(column), name) for name, column in zip(paths[0], columns, strict=True)]
        rebuild = insides[0][1]
        return any(has_rows for has_rows, _ in takers), lambda wanted: rebuild([take(wanted) for _, take in takers])


def _form(data: Any) -> Any:
    return (type(data), data.dtype, data.ndim) if isinstance(data, (Tensor, np.ndarray)) else type(data)


def _joined(parts: list[Any], rows: Sequence[int], path: str) -> Any:
    """Return tensors or arrays as one, if they have the rows that they should have."""
    for part, number in zip(parts, rows, strict=True):
        if not _dim(part) or len(part) != number:
            raise CannotCutError(
                path, f"of shape {tuple(part.shape)} does not have one entry for each of {number} rows"
            )
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise CannotCutError(path, f"has shapes {shapes} in batches that are to be joined")
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)


def _inside(data: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]] | None:
    """Return `children_of` an object, but of none that keeps rows in a way of its own, such as a ``PackedSequence``."""
    if is_movable(data) and not (isinstance(data, (dict, UserDict)) or is_dataclass(data)):
        return None
    return children_of(data)


def _dim(array: Any) -> int:
    return array.ndim  # type: ignore[no-any-return]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CountedBatch(WrappedBatch):
    """A batch, as the user's loader makes it, and its rows."""

    rows: int | None  # None if that is not known
    of_columns: bool = False  # whether lists in it are known to hold columns, see `row_taker`


class CountingCollate:
    """Wrap a loader's ``collate_fn`` to count rows, which may not be visible in what it returns.

    With ``ranks``, a batch is made of each rank's rows, so that no batch has to be cut.
    """

    def __init__(self, collate: Callable[[Any], Any], ranks: int | None = None) -> None:
        self.collate = collate
        self.ranks = ranks

    def __call__(self, rows: Any) -> CountedBatch | list[CountedBatch]:
        """Return rows as a batch, or as a list of batches. Called by the loader, perhaps in a worker process."""
        if not isinstance(rows, (list, tuple)):  # of a dataset that fetches many rows at once
            return count_batch(self.collate(rows))
        if self.ranks is None or not rows:
            return CountedBatch(self.collate(rows), len(rows), self.collate is default_collate)
        return [
            CountedBatch(self.collate(rows[first:end]), end - first)
            for first, end in part_bounds(len(rows), self.ranks, even=False)
            if first < end
        ]


def count_batch(batch: Any) -> CountedBatch:
    """Return a batch with its number of rows; one that `CountingCollate` made is returned as it is."""
    return batch if type(batch) is CountedBatch else CountedBatch(batch, count_rows(batch))


def pieces_of(batch: Any, ranks: int) -> list[CountedBatch]:
    """Return a batch, or the pieces that `CountingCollate` made of it, as one for each rank, or fewer."""
    if type(batch) is list and batch and type(batch[0]) is CountedBatch:
        return batch
    whole = count_batch(batch)
    if whole.rows == 0:
        return [whole] * ranks
    rows = whole.rows or 0
    take = row_taker([whole.batch], [rows], careful=False)
    return [
        CountedBatch(take(slice(first, end)), end - first)
        for first, end in part_bounds(rows, ranks, even=False)
        if first < end
    ]


def take_from(batches: Sequence[CountedBatch], *, careful: bool = True) -> Take | None:
    """Return what `row_taker` returns; None if batches cannot be cut."""
    rows = [counted.rows for counted in batches if counted.rows is not None]
    if len(rows) < len(batches):
        return None
    try:
        of_columns = all(counted.of_columns for counted in batches)
        return row_taker([counted.batch for counted in batches], rows, careful=careful, of_columns=of_columns)
    except CannotCutError:
        return None


def parts_of_last_group(
    group: list[CountedBatch], start: list[CountedBatch], ranks: int, *, even: bool, by_row: bool
) -> tuple[list[Any], list[GroupRows] | None]:
    """Give each rank a part of an incomplete last group, which is filled up with batches of the ``start`` of the epoch.

    With ``even``, all ranks get something, and equally many rows where rows can be taken out. Without ``by_row``,
    batches stay whole. Return the part of each rank, None if it gets no row; and the rows of each, or None if every
    rank gets equally many real rows, or all batches are real and whole.
    """
    if by_row:
        real = num_rows(group)
        bounds = part_bounds(real, ranks, even=even)
        filled, rows = list(group), real
        copied = start if any(counted.rows for counted in start) else group
        while rows < bounds[-1][1]:
            filled += copied
            rows += num_rows(copied)
        # The start shows how batches look also where no row of it is needed.
        take = take_from(filled if rows > real or start is group else [*group, *start])
        if take is not None:
            parts = [take(slice(first, end)) if first < end else None for first, end in bounds]
            return parts, None if real % ranks == 0 else rows_of_ranks(real, [end - first for first, end in bounds])
    batches = round_of_batches(group, start, ranks, even_batches=even)
    nothing = ranks - len(batches)
    counts = [1 if counted.rows is None else counted.rows for counted in batches] + [0] * nothing
    end = None if len(group) == ranks else rows_of_ranks(sum(counts[: len(group)]), counts)
    return [counted.batch for counted in batches] + [None] * nothing, end


def num_rows(batches: Iterable[CountedBatch]) -> int:
    """Return how many rows batches have together, as far as it is known."""
    return sum(counted.rows or 0 for counted in batches)


def grouped(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` items, and what is left in the end."""
    group: list[T] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def raise_on_next(error: Exception) -> Iterator[T]:
    """Return an iterator that raises an error when its first item is asked for."""
    raise error
    yield


def next_or_error(items: Iterator[T]) -> tuple[T | None, Exception | None]:
    """Return the next item and None, or None and the error that was raised; None and None at the end."""
    try:
        return next(items, None), None
    except Exception as error:
        return None, error
