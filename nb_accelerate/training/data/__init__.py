"""Share out data between ranks: which rows are mine, in which order, and which of them are copies."""

from nb_accelerate.training.data.dispatcher import DataLoaderDispatcher
from nb_accelerate.training.data.loader import DataLoaderShard
from nb_accelerate.training.data.prepare import prepare_data_loader, skip_first_batches
from nb_accelerate.training.data.sameness import check_loaders
from nb_accelerate.training.data.samplers import BatchSamplerShard, SeedableRandomSampler
from nb_accelerate.training.data.skipping import SkipBatchSampler
from nb_accelerate.training.data.tracker import LoaderTracker

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "LoaderTracker",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "check_loaders",
    "prepare_data_loader",
    "skip_first_batches",
]
