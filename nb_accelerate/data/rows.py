"""Count, slice and join the rows of batches of any structure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nb_accelerate.pytree import children_of, find_batch_size


def count_rows(batch: Any) -> int | None:
    """Return how many rows a batch seems to have, or None if nothing in it has rows.

    Those of its first tensor; without tensors, those of its first list of other things, such as texts.
    """
    rows = find_batch_size(batch)
    return rows if rows is not None else _listed_rows(batch)


def _listed_rows(data: Any) -> int | None:
    inside = children_of(data)
    if inside is None:
        return None
    found = next((rows for rows in map(_listed_rows, inside[0]) if rows is not None), None)
    return len(data) if found is None and isinstance(data, (list, tuple)) else found


def slice_rows(
    batch: Any,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001 - what a user's own slice function is told as well
    num_processes: int | None = None,  # noqa: ARG001 - likewise
    *,
    rows: int | None = None,
) -> Any:
    """Return some rows of a batch: a slice of every tensor, and of every list of other things with one per row.

    Args:
        batch: any structure.
        tensor_slice: which rows.
        process_index: the rank they are for.
        num_processes: number of ranks.
        rows: number of rows of ``batch``; counted by default.
    """
    return _slice(batch, tensor_slice, count_rows(batch) if rows is None else rows)


def _slice(data: Any, rows_wanted: slice, rows: int | None) -> Any:
    if isinstance(data, Tensor):
        return data[rows_wanted] if data.dim() else data
    if _is_column(data, rows):
        return data[rows_wanted]
    inside = children_of(data)
    if inside is None:
        return data
    items, rebuild = inside
    return rebuild([_slice(item, rows_wanted, rows) for item in items])


def join_rows(batches: list[Any], rows: list[int | None] | None = None) -> Any:
    """Return the rows of several batches of the same structure as one batch.

    Args:
        batches: at least one.
        rows: how many each has; counted by default.

    Raises:
        ValueError: tensors of the batches do not fit together.
    """
    if len(batches) == 1:
        return batches[0]
    return _join(batches, [count_rows(batch) for batch in batches] if rows is None else rows)


def _join(batches: list[Any], rows: list[int | None]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return _concatenated(batches) if first.dim() else first
    if all(_is_column(batch, count) for batch, count in zip(batches, rows, strict=True)):
        return type(first)(item for batch in batches for item in batch)
    inside = children_of(first)
    if inside is None:
        return first
    _, rebuild = inside
    columns = zip(*((children_of(batch) or ([],))[0] for batch in batches), strict=True)
    return rebuild([_join(list(items), rows) for items in columns])


def _concatenated(tensors: list[Tensor]) -> Tensor:
    try:
        return torch.cat(tensors)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"Batches with tensors of shapes {shapes} cannot be joined row by row to be sent to ranks. Pad them to one "
            "size in collate_fn, or write dispatch_batches=False."
        ) from error


def _is_column(data: Any, rows: int | None) -> bool:
    """Return whether an object is a list with one entry for each row, such as the texts of a batch.

    A list of columns that happen to be as many as rows is not: all tensors in it have that many rows.
    """
    if type(data) not in (list, tuple) or len(data) != rows:
        return False
    if all(children_of(item) is None and not isinstance(item, Tensor) for item in data):
        return True
    columns = [_is_of_columns(item, rows) for item in data]
    return False in columns or True not in columns


def _is_of_columns(data: Any, rows: int) -> bool | None:
    """Return whether everything in an object has ``rows`` rows; None if nothing in it can have rows."""
    if isinstance(data, Tensor):
        return data.dim() > 0 and len(data) == rows
    if _is_column(data, rows):
        return True
    inside = children_of(data)
    if inside is None:
        return None
    parts = [part for part in (_is_of_columns(item, rows) for item in inside[0]) if part is not None]
    return all(parts) if parts else None
