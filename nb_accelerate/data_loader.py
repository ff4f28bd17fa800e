"""Names of ``accelerate.data_loader``."""

from nb_accelerate.compat.loaders import (
    SkipDataLoader as SkipDataLoader,
    get_sampler as get_sampler,
    prepare_data_loader as prepare_data_loader,
)
from nb_accelerate.training.data import (
    BatchSamplerShard as BatchSamplerShard,
    DataLoaderDispatcher as DataLoaderDispatcher,
    DataLoaderShard as DataLoaderShard,
    SeedableRandomSampler as SeedableRandomSampler,
    SkipBatchSampler as SkipBatchSampler,
    skip_first_batches as skip_first_batches,
)
from nb_accelerate.training.data.adapter import DataLoaderAdapter as DataLoaderAdapter
from nb_accelerate.training.data.loops import DataLoaderStateMixin as DataLoaderStateMixin
from nb_accelerate.training.data.reading.iterable import IterableDatasetShard as IterableDatasetShard
