"""Map the ``display_id`` that a rank uses to the id of the display in the notebook. Pure.

Every rank makes ids of its own. A display that is shown once for several ranks has one id in the notebook, and its
updates arrive under the id of each rank.
"""

from __future__ import annotations


class DisplayIds:
    """Remembers the displays of some ranks, for as long as the ranks live."""

    def __init__(self) -> None:
        self._order: dict[int, dict[str, int]] = {}
        self._shown: dict[tuple[int, str], str] = {}

    def order(self, rank: int, own: str) -> int:
        """Return how many ids the rank has made before this one: the same number on ranks that do the same."""
        known = self._order.setdefault(rank, {})
        return known.setdefault(own, len(known))

    def shown(self, own: dict[int, str]) -> str:
        """Remember a new display, and return its id in the notebook. `own` has the ranks' ids of it, by rank."""
        first = own[min(own)]
        for rank, own_id in own.items():
            self._shown[rank, own_id] = first
        return first

    def update(self, own: dict[int, str]) -> tuple[str, bool]:
        """Return the id in the notebook of the display that some ranks want to update, by the ranks' ids of it.

        And whether it has to be shown first: the display that there is belongs to other ranks too, and is not updated.
        """
        first = own[min(own)]
        shared = self._shown.get((min(own), first))
        if shared is None:
            return first, False
        meant_by = {rank for (rank, _), shown in self._shown.items() if shown == shared}
        if meant_by == own.keys():
            return shared, False
        # Other ranks share that display and do not update it in the same way, so these get one of their own.
        separate = f"{shared}-{'-'.join(map(str, sorted(own)))}"
        for rank, own_id in own.items():
            self._shown[rank, own_id] = separate
        return separate, True
