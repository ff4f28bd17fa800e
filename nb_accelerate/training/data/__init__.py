"""Share out data between ranks: which rows are mine, in which order, and which of them are copies.

A batch goes from the top to the bottom::

    prepare.py                         rebuild the user's loader
    plan/                              which rows go to which rank: arithmetic, samplers
    reading/                           the batches of this rank: by row number, of a whole stream, of its own shards
    dispatching/                       or rank 0 reads for all, cuts and sends
    resuming/                          positions and orders of an epoch that goes on in its middle
    adapter.py, loader.py              the loop's side: position, device, the end of the data
    loops.py                           which loops run, for accumulation and `gather_for_metrics`
"""

from nb_accelerate.training.data.dispatching.dispatcher import DataLoaderDispatcher
from nb_accelerate.training.data.loader import DataLoaderShard
from nb_accelerate.training.data.loops import RunningLoops
from nb_accelerate.training.data.plan.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from nb_accelerate.training.data.prepare import check_lengths, prepare_data_loader, skip_first_batches

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "RunningLoops",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "check_lengths",
    "prepare_data_loader",
    "skip_first_batches",
]
