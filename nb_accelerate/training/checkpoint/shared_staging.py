"""One staging folder for all ranks that see the same disk.

::

    rank 0 makes it -> who sees it?  all: rank 0 publishes for all
                                     not those of other machines: with save_on_each_node the first rank of each of these
                                     makes one there, and publishes for its machine
    each rank writes -> every rank has written, or none of it counts -> those who made a folder publish it
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nb_accelerate.base.topology import Topology
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.publishing import Staging, folder_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.comm import Collectives


T = TypeVar("T")

logger = logging.getLogger("nb_accelerate")


class GathersObjects(Protocol):
    """`Collectives`, or those of a save in the background."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""


def run_on_all_ranks(collectives: GathersObjects, action: Callable[[], T]) -> T:
    """Return what ``action`` returns on this rank, when it has ended on all. All ranks call it together."""
    # A rank that cannot read a file would otherwise leave the others waiting in their next collective. If it failed on
    # other ranks only, `CheckpointError` is raised.
    result: T

    def run() -> None:
        nonlocal result
        result = action()

    gather_from_all_ranks(collectives, run)
    return result


def gather_from_all_ranks(collectives: GathersObjects, action: Callable[[], T]) -> list[T]:
    """Return what ``action`` returns on each rank, in rank order: it travels pickled. See `run_on_all_ranks`."""
    error: Exception | SystemExit | None = None
    result: T | None = None
    try:
        result = action()
    except (Exception, SystemExit) as caught:  # the others wait for what this rank says
        error = caught
    # As text: an exception of the user's may not be picklable, or its class unknown to the others.
    told = collectives.all_gather_object((None if error is None else f"{type(error).__name__}: {error}", result))
    if error is not None:
        raise error
    failed = [f"on rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text is not None]
    if failed:
        raise CheckpointError("\n".join(failed))
    return [value for _, value in told]


@dataclass(frozen=True, kw_only=True)
class ThisRank(Topology):
    """Which rank this is, and what it is to a checkpoint."""

    kind: DeviceKind  # of device, which has random numbers of its own
    num_sharing: int = 1  # processes that read the same rows as this one, with itself

    @property
    def num_data_ranks(self) -> int:
        """Processes, or groups of them that share rows, that read rows of their own."""
        return self.world_size // self.num_sharing


@dataclass(frozen=True, kw_only=True)
class SharedStaging:
    """What `share` returns."""

    staging: Staging | None  # where this rank publishes; None on others
    name: str  # of the save, which no other has; the same on all ranks
    path: Path  # the folder that all of `ranks` see
    ranks: list[int]  # which write to it
    rank: int

    @property
    def own(self) -> Path:
        """Where this rank writes."""
        return folder_of(self.path, self.rank)

    def discard(self) -> None:
        """Remove what was written, where this rank would have published it."""
        if self.staging is not None:
            self.staging.discard()


def share(folder: Path, *, collectives: Collectives, this_rank: ThisRank, on_each_machine: bool) -> SharedStaging:
    """Make a staging folder. All ranks call it together.

    With ``on_each_machine``, machines do not share their disks, so that each is to have a checkpoint.
    """
    staging: Staging | None = None

    def begin(is_needed: bool) -> str:
        nonlocal staging
        if not is_needed:
            return ""
        staging = Staging.begin(folder, "state")
        for rank in range(this_rank.world_size):
            folder_of(staging.path, rank).mkdir()
        return str(staging.path)

    try:
        # Rank 0 makes the folder, and all ranks look for theirs in it.
        path, first = gather_from_all_ranks(collectives, lambda: (begin(collectives.rank == 0), folder.absolute()))[0]
        name = Path(path).name
        sees = gather_from_all_ranks(collectives, lambda: folder_of(Path(path), this_rank.rank).is_dir())
        if all(sees):
            if first != folder.absolute():
                logger.warning(
                    "Rank %d is to save to %s, and rank 0 to %s: all of it is saved there.",
                    *(this_rank.rank, folder, first),
                )
            ranks = list(range(this_rank.world_size)) if collectives.world_size > 1 else [this_rank.rank]
        elif not on_each_machine:
            raise CheckpointError(
                f"What the main process makes beside {folder} rank {sees.index(False)} does not see: their machines do "
                "not share this disk. Give a folder on one that they share, or write "
                "ProjectConfiguration(save_on_each_node=True)."
            )
        else:
            # Machines that do not see it: the first rank of each makes one there, for the ranks of its machine.
            is_blind = not sees[this_rank.rank]
            makes = is_blind and this_rank.local_rank == 0
            nodes = gather_from_all_ranks(collectives, lambda: (this_rank.node_rank, begin(makes)))
            ranks = [
                rank
                for rank, (node, _) in enumerate(nodes)
                if (not sees[rank] and node == this_rank.node_rank if is_blind else sees[rank])
            ]
            if is_blind:
                path = nodes[ranks[0]][1]
    except BaseException:
        if staging is not None:
            staging.discard()
        raise
    return SharedStaging(staging=staging, name=name, path=Path(path), ranks=ranks, rank=this_rank.rank)
