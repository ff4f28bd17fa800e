"""Find loaders that would end sooner on some ranks than on others, before ranks wait for each other in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.comm import Collectives
    from nb_accelerate.data.loader import DataLoaderShard


def check_alike(collectives: Collectives, loaders: Sequence[DataLoaderShard]) -> None:
    """Compare the loaders of all ranks. All call it together, with equally many.

    Loaders that may end apart (``even_batches=False``) are not compared, nor those that do not know their length.

    Raises:
        CollectiveMismatchError: some are longer on one rank than on another.
    """
    if collectives.world_size == 1 or not loaders:
        return
    told = collectives.all_gather_object([loader.extent() for loader in loaders])
    for number, extents in enumerate(zip(*told, strict=False), start=1):
        if None in extents or len(set(extents)) == 1:
            continue
        other = next(rank for rank, extent in enumerate(extents) if extent != extents[0])
        (rows, batches), (other_rows, other_batches) = extents[0], extents[other]
        raise CollectiveMismatchError(
            f"prepare was given loaders of different lengths: number {number} has {rows} rows on rank 0, so {batches} "
            f"batches for each rank, and {other_rows} rows on rank {other}, so {other_batches} batches. Ranks would "
            "wait for each other for ever. Give all ranks the same dataset; prepare shares it out. "
            "If each is to have data of its own, write DataLoaderConfiguration(even_batches=False) and loop inside of "
            "accelerator.join_uneven_inputs([model])."
        )
