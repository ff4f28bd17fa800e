"""Leave out the first batches of a sampler."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from nb_accelerate.training.data.plan.samplers import (
    FINITE,
    BatchSamplerShard,
    PassesEpochOn,
    RankSampler,
    replace_sampler,
    without_first,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class SkipBatchSampler(PassesEpochOn, BatchSampler):
    """Leave out the first batches of any sampler. Their row numbers are drawn, but not read.

    Args:
        batch_sampler: yields batches of row numbers, or row numbers.
        skip_batches: number of batches to leave out at the beginning of every epoch.
    """

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.reread = 0  # how many of these are yielded all the same, before the others
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # not all have one
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]  # not all have one

    def use_sampler(self, sampler: Any) -> None:
        """Replace the sampler inside."""
        replace_sampler(self.batch_sampler, sampler)
        self.sampler = sampler

    @property
    def total_length(self) -> int:
        """Batches before any were left out."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(self.total_length - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batch_sampler)
        if self.reread or not hasattr(batches, "state_dict"):
            return without_first(batches, self.skip_batches, self.reread)  # draws nothing before the first is asked for
        for _ in islice(batches, self.skip_batches):
            pass
        return batches  # as it is: it can save its position


def skipping(sampler: Any, batches: int, *, reread: int = 0) -> Any:
    """Return a sampler or batch sampler without the first batches of each epoch, which are not drawn where possible.

    The first ``reread`` of these are yielded all the same, before the others.
    """
    later: Any
    inner, before = split_skip(sampler)
    if isinstance(sampler, RankSampler):
        later = sampler.starting_at(batches)
    elif type(sampler) is BatchSampler and type(sampler.sampler) in FINITE:
        later = BatchSamplerShard(sampler, even_batches=False).starting_at(batches)
    else:
        later = SkipBatchSampler(inner, before + batches)
    if reread:
        later.reread = min(reread, before + batches)
    return later


def split_skip(sampler: Any) -> tuple[Any, int]:
    """Return the sampler inside a result of `skipping`, and the number of batches that this leaves out."""
    if isinstance(sampler, SkipBatchSampler):
        return sampler.batch_sampler, sampler.skip_batches
    if isinstance(sampler, BatchSamplerShard) and sampler.num_processes == 1 and sampler.start:
        return sampler.batch_sampler, sampler.start
    return sampler, 0
