"""Share out data between ranks: which rows are mine, in which order, and which of them are copies."""

from nb_accelerate.data.loader import DataLoaderShard
from nb_accelerate.data.plan import ShardPlan
from nb_accelerate.data.prepare import prepare_data_loader
from nb_accelerate.data.samplers import BatchSamplerShard, SeedableRandomSampler
from nb_accelerate.data.tracker import LoaderTracker

__all__ = [
    "BatchSamplerShard",
    "DataLoaderShard",
    "LoaderTracker",
    "SeedableRandomSampler",
    "ShardPlan",
    "prepare_data_loader",
]
