"""Samplers that yield one rank's part of what another sampler yields, or leave out its first batches."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler
from typing_extensions import override

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.data.plan.plan import (
    GroupRows,
    ShardPlan,
    piece_of_last_group,
    round_of_batches,
    rows_of_ranks,
    rows_per_rank,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from typing_extensions import Self


MakeSync = Callable[[Any, Any], Callable[[], None] | None]


class SeedableRandomSampler(RandomSampler):
    """Shuffle by a seed plus the epoch, independent of all other random numbers.

    Args:
        data_source: the dataset.
        replacement: draw rows with replacement.
        num_samples: how many to draw; all rows by default.
        generator: what to draw with; seeded again for each epoch.
        data_seed: the seed; by default the one that torch was given, which has to be the same on all ranks.
        epoch: the first epoch; counts up by itself.

    Attributes:
        initial_seed: the seed of epoch 0.
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        data_seed: int | None = None,
        epoch: int = 0,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator or torch.Generator())
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        assert isinstance(self.generator, torch.Generator)
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next pass as in ``epoch``."""
        self.epoch = epoch


def _order_of(sampler: Any) -> tuple[Sequence[Any] | Tensor, torch.Generator | None]:
    """Return the row numbers of an epoch, and the generator from which its end draws one more permutation, or None."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler)), None
    if type(sampler) not in SHUFFLING or sampler.replacement:
        return list(sampler), None
    rows = len(sampler.data_source)
    if sampler.num_samples != rows:
        return list(sampler), None
    # What RandomSampler draws, without a list of a million Python numbers.
    generator = sampler.generator
    if type(sampler) is SeedableRandomSampler:
        generator.manual_seed(sampler.initial_seed + sampler.epoch)
        sampler.set_epoch(sampler.epoch + 1)
    elif generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    # RandomSampler draws one permutation more at the end of an epoch, which changes the order of the next epoch.
    return torch.randperm(rows, generator=generator), sampler.generator


# The order of these is fixed when iteration begins and has the length that they state, so it may be asked for at once.
FINITE = (SequentialSampler, RandomSampler, SeedableRandomSampler, SubsetRandomSampler)

# The order of these is one permutation, which is drawn as a tensor, without a list of the whole.
SHUFFLING = (RandomSampler, SeedableRandomSampler)


class IterationEnd:
    """What is known of the end of one iteration of a sampler, as soon as its last batch has been drawn.

    It belongs to the iteration, since a sampler may be iterated inside its own loop.
    """

    rows = GroupRows(None, None)  # of the last batch


class PassesEpochOn:
    """Has ``set_epoch`` if a sampler inside has it, as code asks for it that was written for that sampler."""

    @property
    def set_epoch(self) -> Callable[[int], None]:
        """Set the epoch of the sampler inside."""
        for name in ("batch_sampler", "sampler"):
            inside: Any = vars(self).get(name)
            if hasattr(inside, "set_epoch"):
                return inside.set_epoch  # type: ignore[no-any-return]
        raise AttributeError(f"{type(self).__name__} has no set_epoch: the sampler inside has none")


class RankSampler(PassesEpochOn):
    """One rank's part of a sampler, from a batch on that it can be told to start at."""

    on_start: Callable[[], None] | None  # before the first row of an epoch is drawn, so that all ranks draw the same
    start = 0  # batches of this rank that are left out at the beginning of every epoch
    end = IterationEnd()  # of the iteration that was begun last

    def starting_at(self, batch: int) -> Self:
        """Return this sampler without the first batches of each epoch; planned rows are skipped in constant time."""
        later = copy.copy(self)  # the samplers inside stay the same objects: an epoch of one is an epoch of the other
        later.start += batch
        return later

    def __iter__(self) -> Iterator[Any]:
        self.end = end = IterationEnd()
        return self._begun(end)

    def _begun(self, end: IterationEnd) -> Iterator[Any]:
        # A generator, so that all this happens when the first row is asked for: the loader draws a number in between.
        if self.on_start is not None:
            self.on_start()
        yield from self._batches(end)

    @abstractmethod
    def _batches(self, end: IterationEnd) -> Iterator[Any]:
        """Return the batches of an iteration from `start` on, and note in ``end`` what its last one is."""


class BatchSamplerShard(RankSampler, BatchSampler):
    """One rank's part of a batch sampler.

    Args:
        batch_sampler: of the user's loader; every rank has the same, in the same order.
        num_processes: how many ranks there are.
        process_index: the number of this one.
        split_batches: cut each batch into pieces instead of handing out whole batches.
        even_batches: fill up the last batches, so that all ranks have equally many of equal size. Where batches have
            no fixed size, the last round is completed with whole batches from the beginning.
        make_sync: called with the batch sampler and the sampler in it; returns a function that is called when an epoch
            starts, before the first row is drawn, so that all ranks draw the same; None if none is needed.

    Raises:
        ConfigError: batches are to be split, but have no fixed size, or one that cannot be split evenly.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[Any]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        make_sync: MakeSync | None = None,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        # Batches that are left out and yielded all the same, before the others: the last group is filled up from them.
        self.reread = 0
        size = getattr(batch_sampler, "batch_size", None)
        if size is None and split_batches:
            raise ConfigError(
                f"{type(batch_sampler).__name__} has no batch_size, so its batches cannot be split for {num_processes} "
                "ranks. Give it a batch_size attribute, or write split_batches=False."
            )
        self.batch_size = size  # type: ignore[assignment]  # None where batches differ in size
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]  # not all have one
        self._make_sync = make_sync
        self._local = rows_per_rank(size, num_processes, split_batches=split_batches) if size is not None else None
        self._examine()

    def _examine(self) -> None:
        """Set what depends on the samplers inside: whether rows can be planned, and how ranks shuffle alike."""
        self._plannable = type(self.batch_sampler) is BatchSampler and type(self.sampler) in FINITE
        self.on_start = self._make_sync(self.batch_sampler, self.sampler) if self._make_sync else None

    def use_sampler(self, sampler: Any) -> None:
        replace_sampler(self.batch_sampler, sampler)
        self.sampler = sampler
        self._examine()

    @property
    def total_length(self) -> int:
        """Batches of all ranks together."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may have different numbers of rows of the last group, as far as can be told."""
        if self.even_batches:
            return False
        if self._plannable:
            return self._plan(len(self.sampler)).remainder > 0  # type: ignore[arg-type]
        if self.split_batches:
            return True
        try:
            return not self.drop_last and self.total_length % self.num_processes > 0
        except TypeError:  # a sampler without a length
            return True

    def __len__(self) -> int:
        return max(self._num_batches() - self.start, 0)

    def _num_batches(self) -> int:
        if self._plannable:
            return self._plan(len(self.sampler)).num_batches(self.process_index)  # type: ignore[arg-type]
        batches = self.total_length
        if self.split_batches:
            return batches  # the last may be too short for a piece for this rank; only an epoch can tell
        whole, rest = divmod(batches, self.num_processes)
        if self.drop_last:
            return whole
        return whole + (rest > 0 if self.even_batches else rest > self.process_index)

    @override
    def _batches(self, end: IterationEnd) -> Iterator[list[Any]]:
        return self._planned(end) if self._plannable else without_first(self._streamed(end), self.start, self.reread)

    def _plan(self, rows: int) -> ShardPlan:
        return ShardPlan(
            rows=rows,
            batch_size=self.batch_size,
            world_size=self.num_processes,
            split_batches=self.split_batches,
            even_batches=self.even_batches,
            drop_last=self.drop_last,
        )

    def _planned(self, end: IterationEnd) -> Iterator[list[Any]]:
        """Yield slices of the order of the epoch."""
        order, drawn_again = _order_of(self.sampler)
        plan = self._plan(len(order))
        self._note_last(end, plan.remainder)
        if self.reread:
            yield from islice(plan.batches(order, self.process_index), self.reread)
        yield from plan.batches(order, self.process_index, start=self.start)
        if drawn_again is not None:
            torch.randperm(len(order), generator=drawn_again)

    def _streamed(self, end: IterationEnd) -> Iterator[list[Any]]:
        """Iterate a sampler whose order is not known before, and yield this rank's batches."""
        per_group = 1 if self.split_batches else self.num_processes
        start: list[Any] = []  # of the data: rows, or whole batches where these have no fixed size
        enough = per_group if self.batch_size is None else self.batch_size * per_group
        group: list[list[Any]] = []
        for batch in self.batch_sampler:
            if len(group) == per_group:  # another batch follows, so this group is not the last
                yield self._mine(group)
                group = []
            if len(start) < enough:
                start.extend([batch] if self.batch_size is None else batch)
            group.append(batch)
        if len(group) == per_group and (self.batch_size is None or len(group[-1]) == self.batch_size):
            mine = self._mine(group)
            end.rows = GroupRows(None, len(mine))
            yield mine
        elif group and not self.drop_last:
            yield from self._last(end, group, start)

    def _mine(self, group: list[list[Any]]) -> list[Any]:
        if not self.split_batches:
            return group[self.process_index]
        assert self._local is not None
        first = self.process_index * self._local
        return group[0][first : first + self._local]

    def _last(self, end: IterationEnd, group: list[list[Any]], start: list[Any]) -> Iterator[list[Any]]:
        if self._local is None:
            assigned = round_of_batches(group, start, self.num_processes, even_batches=self.even_batches)
            if len(assigned) > self.process_index:
                end.rows = rows_of_ranks(sum(map(len, group)), [*map(len, assigned)])[self.process_index]
                yield assigned[self.process_index]
            return
        rows = [row for batch in group for row in batch]
        self._note_last(end, len(rows))
        yield from piece_of_last_group(
            rows,
            start,
            self.process_index,
            local_size=self._local,
            group_size=self._local * self.num_processes,
            even_batches=self.even_batches,
        )

    def _note_last(self, end: IterationEnd, rows: int) -> None:
        """Note the rows of this rank's last batch; ``rows`` are in an incomplete last group, 0 if it is complete."""
        assert self._local is not None
        mine = self._local if self.even_batches else min(rows - self.process_index * self._local, self._local)
        end.rows = GroupRows(rows, mine) if rows and mine > 0 else GroupRows(None, self._local)


class SamplerShard(RankSampler, Sampler[Any]):
    """One rank's part of a sampler whose items are batches by themselves (loaders with ``batch_size=None``).

    An item counts as one row. Arguments are as in `BatchSamplerShard`.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        num_processes: int,
        process_index: int,
        *,
        even_batches: bool = True,
        make_sync: MakeSync | None = None,
    ) -> None:
        self.num_processes = num_processes
        self.process_index = process_index
        self.even_batches = even_batches
        self._make_sync = make_sync
        self.use_sampler(sampler)

    def use_sampler(self, sampler: Any) -> None:
        self.sampler = sampler
        self.on_start = self._make_sync(sampler, sampler) if self._make_sync else None

    def _plan(self, items: int) -> ShardPlan:
        return ShardPlan(rows=items, batch_size=1, world_size=self.num_processes, even_batches=self.even_batches)

    @property
    def is_uneven(self) -> bool:
        """Whether some ranks have fewer items than others."""
        return not self.even_batches and self._plan(len(self.sampler)).remainder > 0

    def __len__(self) -> int:
        batches = self._plan(len(self.sampler)).num_batches(self.process_index)
        return max(batches - self.start, 0)

    @override
    def _batches(self, end: IterationEnd) -> Iterator[Any]:
        order = list(self.sampler)
        plan = self._plan(len(order))
        has_part = self.even_batches or plan.remainder > self.process_index
        end.rows = GroupRows(plan.remainder if plan.remainder and has_part else None, 1)
        for batch in plan.batches(order, self.process_index, start=self.start):
            yield batch[0]


def innermost_sampler(outer: Any) -> Any:
    """Return the sampler that decides the order of rows, inside all wrappers; ``outer`` itself if it wraps none."""
    while getattr(outer, "batch_sampler", None) is not None:  # ours and others' wrap the user's
        outer = outer.batch_sampler
    inner = getattr(outer, "sampler", None)
    return outer if inner is None else inner


def replace_sampler(outer: Any, sampler: Any) -> None:
    """Replace the sampler inside of a batch sampler, or of a rank's part of one; a `ConfigError` if there is none."""
    if hasattr(outer, "use_sampler"):
        outer.use_sampler(sampler)
        return
    if not hasattr(outer, "sampler"):
        raise ConfigError(
            f"{type(outer).__name__} has no sampler that could be replaced: it decides by itself which rows are a "
            "batch. Prepare a loader with another batch_sampler."
        )
    outer.sampler = sampler


def without_first(items: Iterator[Any], start: int, reread: int) -> Iterator[Any]:
    """Return the first ``reread`` items, and those from ``start`` on. Nothing is drawn until the first is asked for."""
    return chain(islice(items, reread), islice(items, start - reread, None))


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
