"""Read a part of each batch on each rank, and give all ranks the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, default_collate

from nb_accelerate.comm.packing import communicate_packed
from nb_accelerate.config.loader import DataLoaderConfiguration
from nb_accelerate.data import prepare_data_loader
from nb_accelerate.process import rng
from nb_accelerate.pytree import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from nb_accelerate.comm import Collectives
    from nb_accelerate.data import DataLoaderShard
    from nb_accelerate.devices import DeviceKind


def in_parts(loader: DataLoader[Any], collectives: Collectives, kind: DeviceKind) -> DataLoaderShard | None:
    """Return a loader of this rank's part of each batch; None if all ranks have to read all rows.

    They have to where batches are not made of rows that can be told from one another, or users' code orders them.
    """
    if (
        isinstance(loader.dataset, IterableDataset)
        or type(loader.sampler) not in (RandomSampler, SequentialSampler)
        or loader.collate_fn is not default_collate
        or (loader.batch_size or 1) % collectives.world_size
    ):
        return None
    states = rng.capture(kind, all_devices=False)
    try:
        tensors_in(default_collate([loader.dataset[0]]), strict=True)
        return prepare_data_loader(loader, collectives=collectives, config=DataLoaderConfiguration(split_batches=True))
    except Exception:  # a dataset is users' code, and may have names as numbers, or texts in its rows
        return None
    finally:
        rng.restore(states, kind)


def whole_batch(part: Any, real: int | None, collectives: Collectives) -> Any:
    """Return the batch of which each rank has read a part; only the first `real` rows are not repeated ones."""
    wholes = iter(communicate_packed(tensors_in(part), collectives.all_gather, collectives.world_size))
    return map_tensors(lambda _: next(wholes).flatten(0, 1)[:real], part)
