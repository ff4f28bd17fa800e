"""Compare the loaders of the ranks when they are prepared: their lengths, and which rows they have."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from nb_accelerate.errors import CollectiveMismatchError
from nb_accelerate.errors.traceback_lines import calling_line
from nb_accelerate.training.data.dispatching.dispatcher import DataLoaderDispatcher
from nb_accelerate.training.data.loader import DataLoaderShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.utils.data import DataLoader

    from nb_accelerate.training.comm import Collectives

logger = logging.getLogger("nb_accelerate")

_ROWS = 256
"""Rows that are compared, evenly spaced: two splits of the same data differ in most of them."""

_VALUES = 8
"""Values along each dimension of a row that are compared."""

_SCALARS = (int, float, bool, str)


def check_loaders(collectives: Collectives, given: Sequence[DataLoader[Any]], made: Sequence[DataLoaderShard]) -> None:
    """Compare loaders between ranks, before ranks wait for batches that others do not have.

    All ranks call it together, with equally many loaders. Other lengths raise `CollectiveMismatchError`, but of loaders
    that may end apart (``even_batches=False``) or do not know theirs. Other rows are a warning: somebody may want them.
    """
    if collectives.world_size == 1 or not given:
        return
    own = [
        (after.extent(), {} if isinstance(after, DataLoaderDispatcher) else rows_of(before))  # rank 0 reads for all
        for before, after in zip(given, made, strict=True)
    ]
    for number, of_ranks in enumerate(zip(*collectives.all_gather_object(own), strict=False), start=1):
        _check_lengths(number, [extent for extent, _ in of_ranks])
        rows = [rows for _, rows in of_ranks]
        differs = [
            (name, rank) for name in rows[0] for rank, other in enumerate(rows) if other.get(name) != rows[0][name]
        ]
        if differs and collectives.rank == 0:
            name, rank = differs[0]
            logger.warning(
                "%s: loader number %d has other rows on rank %d than on rank 0 (%s differs). Ranks share out the rows "
                "of one dataset, so some rows are read twice and others by nobody, or rows of one rank's test are in "
                "the other's training. Make the split alike on all ranks: random_split(..., "
                "generator=torch.Generator().manual_seed(0)), train_test_split(..., random_state=0), or set_seed(0) "
                "before it",
                *(calling_line() or "prepare", number, rank, name),
            )


def _check_lengths(number: int, extents: Sequence[tuple[int, int] | None]) -> None:
    first = extents[0]
    if first is None or None in extents or len(set(extents)) == 1:
        return
    rank, other = next((rank, extent) for rank, extent in enumerate(extents) if extent is not None and extent != first)
    raise CollectiveMismatchError(
        f"prepare was given loaders of different lengths: number {number} has {first[0]} rows on rank 0, so {first[1]} "
        f"batches for each rank, and {other[0]} rows on rank {rank}, so {other[1]} batches. Ranks would "
        "wait for each other for ever. Give all ranks the same dataset; prepare shares it out. "
        "If each is to have data of its own, write DataLoaderConfiguration(even_batches=False) and loop inside of "
        "accelerator.join_uneven_inputs([model])."
    )


def rows_of(loader: DataLoader[Any]) -> dict[str, str]:
    """Return digests of what tells which rows a loader reads, by the name of its attribute: ``Subset.indices``.

    Nothing of the user's is called. Empty for a stream, and for a loader that was prepared before.
    """
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader, DataLoaderShard):
        return {}
    found: dict[str, str] = {}
    for name, value in (*_parts(loader.dataset), *_parts(loader.sampler)):
        digest = hashlib.blake2b(digest_size=8)
        if _add(digest, value):
            found.setdefault(name, digest.hexdigest())
    return found


def _parts(owner: Any, name: str = "dataset") -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a dataset or sampler, and of those in it."""
    if not isinstance(owner, (Dataset, Sampler)):
        if type(owner) in (list, tuple):
            yield name, owner
        return
    for attribute, value in list(getattr(owner, "__dict__", {}).items()):
        inside = value if type(value) in (list, tuple) else (value,)
        if any(isinstance(item, Dataset) for item in inside):
            for item in inside:
                yield from _parts(item)
        elif type(value) not in _SCALARS:
            yield f"{type(owner).__name__}.{attribute}", value


def _add(digest: Any, value: Any, *, rows: int = _ROWS) -> bool:
    """Add some rows of a value to a digest. Return whether it has rows that can be compared."""
    kind = type(value)
    if kind is torch.Tensor and value.layout is torch.strided and not (value.is_meta or value.is_quantized):
        sample = value.detach()[_evenly(value.shape, rows)].contiguous()
        digest.update(sample.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif kind is np.ndarray and value.dtype != object:
        digest.update(np.ascontiguousarray(value[_evenly(value.shape, rows)]).tobytes())
    elif kind in (list, tuple, range) or kind is np.ndarray:
        digest.update(str(len(value)).encode())
        taken = [_add(digest, item, rows=_VALUES) for item in value[:: max(1, len(value) // rows)]]
        return any(taken)
    elif kind in _SCALARS or isinstance(value, np.generic):
        digest.update(str(value).rpartition("/")[2].encode())  # machines may have the same files in other folders
    elif kind.__module__.startswith("pandas.") and hasattr(value, "index"):
        return _add(digest, value.index.to_numpy())
    else:
        return False
    return True


def _evenly(shape: Sequence[int], rows: int) -> tuple[slice, ...]:
    wanted = (rows, *[_VALUES] * (len(shape) - 1))[: len(shape)]
    return tuple(slice(None, None, max(1, size // number)) for size, number in zip(shape, wanted, strict=True))
