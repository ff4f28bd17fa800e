"""Under the names of ``accelerate.data_loader``."""

from nb_accelerate.compat.loaders import SkipDataLoader, get_sampler, prepare_data_loader
from nb_accelerate.data import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    skip_first_batches,
)
from nb_accelerate.data.adapter import DataLoaderAdapter
from nb_accelerate.data.iterable import IterableDatasetShard
from nb_accelerate.data.tracker import DataLoaderStateMixin

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
