"""Which display of the notebook a rank means by its own ``display_id``. Pure.

Every rank makes ids of its own. A display that is shown once for several ranks has one id in the notebook, and
updates arrive under several.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a display goes.

    Attributes:
        id: the id in the notebook.
        is_new: there is none yet, or the one there is belongs to other ranks as well.
    """

    id: str
    is_new: bool


class DisplayIds:
    """Remembers, as long as the ranks live."""

    def __init__(self) -> None:
        self._order: dict[int, dict[str, int]] = {}
        self._shown: dict[tuple[int, str], str] = {}

    def order(self, rank: int, own: str) -> int:
        """How many ids the rank made before this one: the same on ranks that do the same."""
        known = self._order.setdefault(rank, {})
        return known.setdefault(own, len(known))

    def shown(self, own: dict[int, str]) -> str:
        """A new display; `own` are the ranks' ids of it."""
        first = own[min(own)]
        for rank, one in own.items():
            self._shown[rank, one] = first
        return first

    def update(self, own: dict[int, str]) -> Place:
        """Where an update that some ranks ask for goes: the same for all of them."""
        first = own[min(own)]
        place = self._shown.get((min(own), first))
        if place is None:
            return Place(first, is_new=False)
        meant_by = {rank for (rank, _), shown in self._shown.items() if shown == place}
        if meant_by == own.keys():
            return Place(place, is_new=False)
        # Others share that display and do not update it, or not in this way: from here on they go separate ways.
        separate = f"{place}-{'-'.join(map(str, sorted(own)))}"
        for rank, one in own.items():
            self._shown[rank, one] = separate
        return Place(separate, is_new=True)
