"""Finds the display of the notebook that a rank means by its own ``display_id``. Pure.

Every rank makes ids of its own. A display that is shown once for several ranks has one id in the notebook, and
updates arrive under several.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NotebookDisplay:
    """A display as the notebook knows it.

    Attributes:
        id: the id in the notebook.
        is_new: it is to be shown, not updated: the one there is belongs to other ranks as well.
    """

    id: str
    is_new: bool


class DisplayIds:
    """The displays of some ranks, remembered as long as the ranks live."""

    def __init__(self) -> None:
        self._order: dict[int, dict[str, int]] = {}
        self._shown: dict[tuple[int, str], str] = {}

    def order(self, rank: int, own: str) -> int:
        """Count the ids that the rank made before this one: the same number on ranks that do the same."""
        known = self._order.setdefault(rank, {})
        return known.setdefault(own, len(known))

    def shown(self, own: dict[int, str]) -> str:
        """Remember a new display and give its id in the notebook; `own` are the ranks' ids of it, by rank."""
        first = own[min(own)]
        for rank, one in own.items():
            self._shown[rank, one] = first
        return first

    def update(self, own: dict[int, str]) -> NotebookDisplay:
        """Find the display for an update that some ranks ask for; `own` are the ranks' ids of it, by rank."""
        first = own[min(own)]
        place = self._shown.get((min(own), first))
        if place is None:
            return NotebookDisplay(first, is_new=False)
        meant_by = {rank for (rank, _), shown in self._shown.items() if shown == place}
        if meant_by == own.keys():
            return NotebookDisplay(place, is_new=False)
        # Others share that display and do not update it, or not in this way: from here on they go separate ways.
        separate = f"{place}-{'-'.join(map(str, sorted(own)))}"
        for rank, one in own.items():
            self._shown[rank, one] = separate
        return NotebookDisplay(separate, is_new=True)
