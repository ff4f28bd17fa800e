"""Share out data between ranks: which rows are mine, in which order, and which of them are copies."""

from nb_accelerate.data.dispatcher import DataLoaderDispatcher
from nb_accelerate.data.loader import DataLoaderShard
from nb_accelerate.data.plan import ShardPlan
from nb_accelerate.data.prepare import prepare_data_loader, skip_first_batches
from nb_accelerate.data.sameness import check_loaders
from nb_accelerate.data.samplers import BatchSamplerShard, SeedableRandomSampler
from nb_accelerate.data.skipping import SkipBatchSampler
from nb_accelerate.data.tracker import LoaderTracker

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "LoaderTracker",
    "SeedableRandomSampler",
    "ShardPlan",
    "SkipBatchSampler",
    "check_loaders",
    "prepare_data_loader",
    "skip_first_batches",
]
