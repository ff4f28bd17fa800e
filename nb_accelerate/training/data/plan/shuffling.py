"""Shuffle in the same order on all ranks, although their random numbers differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from nb_accelerate.training.comm.data_parallel import share_random_numbers
from nb_accelerate.training.process.rng import RNGType, synchronize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.training.comm import Collectives

Broadcast = Callable[[Tensor], Tensor]
"""Returns rank 0's tensor on every rank."""


class SeededGenerator(torch.Generator):
    """A generator that is seeded when an epoch begins, so that its state need not be saved."""


class SamplerSync:
    """Give a sampler the random state of rank 0's at the start of each epoch.

    One without a generator would draw from torch's global numbers, which may differ between ranks. It gets its own,
    seeded with the number that a `RandomSampler` would have drawn, or with the state from which others draw all rows.
    So the order is the one that rank 0 would see if it were alone, and the global numbers go on as there.
    """

    def __init__(self, sampler: Any, broadcast: Broadcast) -> None:
        self.sampler = sampler
        self.broadcast = broadcast
        self.draws = sampler.generator is None
        if self.draws:
            sampler.generator = SeededGenerator()

    @property
    def generator(self) -> Any:
        return self.sampler.generator

    def __call__(self) -> None:
        """Give the sampler's generator the same state on all ranks. All ranks call it together."""
        if not self.draws:
            synchronize((RNGType.GENERATOR,), self.broadcast, self.sampler.generator)
            return
        if isinstance(self.sampler, (SubsetRandomSampler, WeightedRandomSampler)):
            state, generator, self.sampler.generator = torch.get_rng_state(), self.sampler.generator, None
            next(iter(self.sampler), None)
            self.sampler.generator = generator
            generator.set_state(self.broadcast(state))
            return
        seed = torch.empty((), dtype=torch.int64).random_()
        self.sampler.generator.manual_seed(int(self.broadcast(seed).item()))


class EpochStart:
    """Give ranks the random states of rank 0 at the start of each epoch, and all of them to ranks that share rows.

    The states of ``rng_types``, with the ``generator`` of a dataset if it has one, and of a sampler: ``in_step``.
    """

    def __init__(
        self,
        rng_types: Sequence[RNGType],
        collectives: Collectives,
        generator: torch.Generator | None,
        in_step: SamplerSync | None,
    ) -> None:
        self._rng_types = rng_types
        self._collectives = collectives
        self._in_step = in_step
        self.generator = generator if in_step is None else in_step.generator

    def __call__(self) -> None:
        """Set the states. All ranks call it together."""
        if self._rng_types:
            synchronize(self._rng_types, partial(self._collectives.broadcast, source=0), self.generator)
        if self._in_step is not None:
            self._in_step()
        share_random_numbers(self._collectives)


def sampler_sync(sampler: Any, broadcast: Broadcast) -> SamplerSync | None:
    """Return a function that makes a sampler shuffle alike on all ranks, or None if it has no generator of torch."""
    # Others may have a generator that is not torch's, or none and no use for one.
    known = isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
    if known or isinstance(getattr(sampler, "generator", None), torch.Generator):
        return SamplerSync(sampler, broadcast)
    return None
