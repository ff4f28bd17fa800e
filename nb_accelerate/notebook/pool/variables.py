"""What the notebook knows of the variables of its ranks, and errors about those that are brought from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.pool.namespace_sync import NamespaceSync
from nb_accelerate.notebook.protocol.content import Numbers, Snapshot

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable, Mapping

    from nb_accelerate.notebook.worker.namespace import MissingName


class RankVariables:
    """Knows which variables each rank has: what it was sent from the notebook, and what its cells have bound.

    Attributes:
        syncs: what each rank has, by rank.
        numbers: of the notebook's objects.
        trained: models of the notebook that cells have trained on the ranks, which left the notebook's as they were; by
            the name of each.
    """

    def __init__(self) -> None:
        self.syncs: dict[int, NamespaceSync] = {}
        self.numbers = Numbers()
        self.trained: dict[str, weakref.ref[Any]] = {}

    @property
    def own_names(self) -> set[str]:
        """Names that cells have bound on the ranks. Those of the cell that runs are added when it has ended."""
        return {name for sync in self.syncs.values() for name in sync.own}

    def lacking(self, ranks: Iterable[int]) -> list[str]:
        """Return the names that cells have bound on other ranks and that one of these ranks lacks."""
        return sorted({name for rank in ranks for name in self.own_names - self.syncs[rank].own})

    def begin(self, ranks: Iterable[int]) -> None:
        """Note that these ranks are new, and have no variables yet."""
        self.syncs.update({rank: NamespaceSync() for rank in ranks})

    def forget(self) -> None:
        """Note that the ranks have no variables any more."""
        self.begin(self.syncs)
        self.trained.clear()

    def note_pulled(self, values: Mapping[str, Any]) -> None:
        """Note that variables of the notebook are copies of what the ranks have, who go on with theirs."""
        for sync in self.syncs.values():
            sync.bound(values)
            for name, value in values.items():
                sync.tell(name, value, Snapshot(value, self.numbers))


def missing_name(missing: Mapping[int, MissingName], world_size: int) -> NameError:
    """Return the error for names that ranks do not have: it names the first, and all ranks that lack it."""
    name, near = next(iter(missing.values()))
    ranks = [rank for rank, absent in missing.items() if absent.name == name]
    hint = f". Did you mean: '{near}'?" if near else ""
    if len(ranks) == world_size > 1:
        return NameError(f"no rank has a variable {name!r}{hint}")
    return NameError(f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} no variable {name!r}{hint}")
