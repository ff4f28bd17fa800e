"""Read a part of each batch on each rank, and give all ranks the whole."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, default_collate

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.training.comm.packing import communicate_packed
from nb_accelerate.training.data import prepare_data_loader
from nb_accelerate.training.process import rng
from nb_accelerate.training.pytree import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data import DataLoaderShard


def in_parts(loader: DataLoader[Any], collectives: Collectives, kind: DeviceKind) -> DataLoaderShard | None:
    """Return a loader of this rank's part of each batch; None if all ranks have to read all rows.

    They have to where batches are not made of rows that can be told from one another, users' code orders them, or
    this process draws random numbers for a row.
    """
    if (
        isinstance(loader.dataset, IterableDataset)
        or type(loader.sampler) not in (RandomSampler, SequentialSampler)
        or loader.collate_fn is not default_collate
        or (loader.batch_size or 1) % collectives.world_size
    ):
        return None
    states = rng.capture(kind, all_devices=False)
    undisturbed = _random_numbers()
    rng.restore(states, kind)
    try:
        tensors_in(default_collate([loader.dataset[0]]), strict=True)
        if not loader.num_workers and _random_numbers() != undisturbed:
            return None
        loader = copy.copy(loader)
        loader.generator = torch.Generator()
        return prepare_data_loader(loader, collectives=collectives, config=DataLoaderConfiguration(split_batches=True))
    except Exception:  # a dataset is users' code, and may have names as numbers, or texts in its rows
        return None
    finally:
        rng.restore(states, kind)


def _random_numbers() -> tuple[float, ...]:
    return random.random(), np.random.random_sample(), torch.rand(()).item()  # noqa: S311 - compared


def whole_batch(part: Any, real: int | None, collectives: Collectives) -> Any:
    """Return the batch of which each rank has read a part; only the first `real` rows are not repeated ones."""
    wholes = iter(communicate_packed(tensors_in(part), collectives.all_gather, collectives.world_size))
    return map_tensors(lambda _: next(wholes).flatten(0, 1)[:real], part)
