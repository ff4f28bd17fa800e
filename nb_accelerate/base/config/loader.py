"""`DataLoaderConfiguration`: how prepared loaders divide data among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from nb_accelerate.base.config.checks import check_flag, check_options, check_whole
from nb_accelerate.base.config.options import Options
from nb_accelerate.errors import ConfigError


@dataclass
class DataLoaderConfiguration(Options):
    """Options for how prepared loaders divide data among ranks. They apply to loaders that are prepared afterwards.

    Attributes:
        split_batches: split each batch of the loader into one part for each rank: its ``batch_size`` is then the
            total over all ranks. By default every rank gets whole batches of that size.
        dispatch_batches: True: rank 0 reads all data and sends the other ranks their part, for data that only one
            process can or should read. False: every rank reads and keeps its own rows; an iterable dataset is read
            whole, and has to yield the same rows in the same order on all ranks. None: rank 0 reads iterable datasets,
            except datasets that can be sharded (``datasets.IterableDataset`` with a shard for each rank): there each
            rank reads its own shards.
        even_batches: fill up the last batches with rows from the start, so that all ranks get equally many rows; with
            whole batches from the start, if the batch sampler has no ``batch_size`` because batches vary in size.
        use_seedable_sampler: shuffle by ``data_seed`` plus the epoch, independent of all other random numbers.
        data_seed: the seed of ``use_seedable_sampler``; None is the seed of torch when the loader is prepared.
        non_blocking: copy batches to the device asynchronously; needs loaders with ``pin_memory=True``.
        use_stateful_dataloader: make loaders of the package torchdata, which save their position together with the
            state of a dataset that has a ``state_dict``. If rank 0 reads for all, the state of rank 0 is saved. The
            state of your own sampler is saved on a single rank and with ``dispatch_batches=True`` only.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    _checks: ClassVar[dict[str, Any]] = {"data_seed": partial(check_whole, at_least=0)}


def resolve_loader(split_batches: bool | None, given: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """Merge the ``split_batches`` argument of `Accelerator` into its ``dataloader_config``, and return that."""
    config = check_options("dataloader_config", given, DataLoaderConfiguration) or DataLoaderConfiguration()
    if split_batches is None:
        return config
    if given is not None and given.split_batches and not check_flag("split_batches", split_batches):
        raise ConfigError(
            "split_batches=False and dataloader_config.split_batches=True contradict each other. "
            "Write it in one of them only."
        )
    config.split_batches = split_batches
    return config
