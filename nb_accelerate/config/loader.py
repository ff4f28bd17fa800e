"""How prepared data loaders share out their batches."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from nb_accelerate.config.checks import check_flag, check_options, check_whole
from nb_accelerate.config.options import Options
from nb_accelerate.errors import ConfigError


@dataclass
class DataLoaderConfiguration(Options):
    """How prepared data loaders share out their batches. Counts for loaders that are prepared after it was set.

    Attributes:
        split_batches: a batch of the loader is cut into one piece for each rank, so the batch size you wrote is
            that of all ranks together. By default every rank gets whole batches of that size.
        dispatch_batches: rank 0 reads all data and sends the others their part, for data that only one process
            can or should read. False: every rank reads, of an iterable dataset all rows, and keeps its own; they have
            to come in the same order on all ranks. None: rank 0 reads iterable datasets. Those that can shard
            themselves (``datasets.IterableDataset`` with a shard for each rank) are read by all ranks, each its own
            shards, unless this is True.
        even_batches: fill up the last batches with rows from the start, so that all ranks have equally many; with
            whole batches from the start, where a batch sampler has no ``batch_size`` and its batches vary in size.
        use_seedable_sampler: shuffle by ``data_seed`` plus the epoch, independent of all other random numbers.
        data_seed: the seed for that; None takes the seed of torch when the loader is prepared.
        non_blocking: copy batches to the device asynchronously; needs loaders with ``pin_memory=True``.
        use_stateful_dataloader: make loaders that can save and restore their position, and the state of a dataset that
            has one (the package torchdata). Where rank 0 reads for all, the state is its own. What a sampler of yours
            has of a state beyond its position is saved only by torchdata's own loaders, on one rank or dispatching.

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

    @override
    def _check(self) -> None:
        check_flag("split_batches", self.split_batches)
        if self.dispatch_batches is not None:
            check_flag("dispatch_batches", self.dispatch_batches)
        check_flag("even_batches", self.even_batches)
        check_flag("use_seedable_sampler", self.use_seedable_sampler)
        if self.data_seed is not None:
            check_whole("data_seed", self.data_seed, at_least=0)
        check_flag("non_blocking", self.non_blocking)
        check_flag("use_stateful_dataloader", self.use_stateful_dataloader)


def resolve_loader(split_batches: bool | None, given: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """Write the ``split_batches`` argument of `Accelerator` into its ``dataloader_config``, and return that.

    Raises:
        ConfigError: they contradict each other, or ``given`` is something else.
    """
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
