"""Functions that make loaders without an `Accelerator`, with the arguments of ``accelerate.data_loader``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.errors import ConfigError
from nb_accelerate.training import data
from nb_accelerate.training.comm import SingleCollectives
from nb_accelerate.training.data.loader import DataLoaderShard
from nb_accelerate.training.data.plan.samplers import innermost_sampler
from nb_accelerate.training.process.rng import resolve_rng_types
from nb_accelerate.training.state import GradientState
from nb_accelerate.training.state.choices import current_collectives, current_process, newest_choices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.utils.data import DataLoader

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.process.rng import RNGType


class SimulatedCollectives(SingleCollectives):
    """Collectives of a process that takes a rank of its own choice, without other processes.

    Args:
        rank: the rank it takes.
        world_size: the number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @override
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        raise ConfigError(
            "This loader was made with a num_processes of its own, so there are no processes to gather from."
        )


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard:
    """Return a loader that yields one process's part of another; `Accelerator.prepare` is the usual way.

    Args:
        dataloader: the same on all processes.
        device: where batches go, if ``put_on_device``.
        num_processes: the number of parts; by default the number of processes.
        process_index: the part to return; by default the part of this process.
        split_batches: as in `DataLoaderConfiguration`, like the other arguments without a description.
        put_on_device: move batches to ``device``.
        rng_types: random states that are set to those of process 0 before each epoch.
        dispatch_batches: process 0 reads for all. None: it does so for an iterable dataset that cannot shard itself,
            if there are other processes.
        even_batches: give all processes equally many batches.
        slice_fn_for_dispatch: cuts a batch into parts, where process 0 reads for all.
        use_seedable_sampler: shuffle by ``data_seed`` and the epoch.
        data_seed: the seed of ``use_seedable_sampler``.
        non_blocking: do not wait for copies to the device.
        use_stateful_dataloader: make a loader that can save its position.
        torch_device_mesh: not supported yet.

    Raises:
        ConfigError: the loader cannot be shared out so, or ``torch_device_mesh`` was given.
    """
    if torch_device_mesh is not None:
        raise ConfigError("torch_device_mesh was given, but device meshes are not supported yet. Leave it out.")
    collectives = _collectives(num_processes, process_index)
    alone = isinstance(collectives, SimulatedCollectives)
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=False if alone and dispatch_batches is None else dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    choices = newest_choices()
    return data.prepare_data_loader(
        dataloader,
        collectives=collectives,
        config=config,
        device=(device or current_process().device) if put_on_device else None,
        gradient_state=GradientState.of(choices) if choices else None,
        rng_types=resolve_rng_types(rng_types),
        slice_fn=slice_fn_for_dispatch,
    )


def _collectives(num_processes: int | None, process_index: int | None) -> Collectives:
    real = current_collectives()
    world_size = real.world_size if num_processes is None else num_processes
    rank = real.rank if process_index is None else process_index
    if (world_size, rank) == (real.world_size, real.rank):
        return real
    if not 0 <= rank < world_size:
        raise ConfigError(f"process_index={rank} is none of num_processes={world_size}. They count from 0.")
    return SimulatedCollectives(rank, world_size)


class SkipDataLoader(DataLoaderShard):
    """A `torch.utils.data.DataLoader` that leaves out the first batches of every epoch.

    `skip_first_batches` does the same for a loader that exists, and reads none of what it leaves out.

    Args:
        dataset: as for a DataLoader.
        skip_batches: how many batches to leave out.
        use_stateful_dataloader: make a loader of torchdata.
        **kwargs: those of a DataLoader.

    Raises:
        MissingDependencyError: a stateful loader is asked for, and torchdata is not installed.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler that decides the order of rows, inside a batch sampler or not; None if there is none."""
    return innermost_sampler(dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler)
