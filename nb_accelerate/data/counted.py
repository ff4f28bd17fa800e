"""Batches that know how many rows they have, whatever they are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils.pin_memory import pin_memory

from nb_accelerate.data.rows import count_rows

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Counted:
    """A batch and its rows.

    Attributes:
        batch: as the user's loader makes it.
        rows: how many it has; None if that is not known.
    """

    batch: Any
    rows: int | None

    def pin_memory(self) -> Counted:
        """Return this with the batch inside in pinned memory. Called by the loader's pinning thread."""
        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


class CountingCollate:
    """A loader's ``collate_fn`` that counts the rows it is given: in what it returns they may not be found again.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Counted:
        """Return rows as a batch. Called by the loader, perhaps in a worker process."""
        # A dataset that fetches many rows at once may return something else than a list.
        count = len(rows) if isinstance(rows, (list, tuple)) else None
        batch = self.collate(rows)
        return Counted(batch, count_rows(batch) if count is None else count)


def counted(batch: Any) -> Counted:
    """Return a batch with its rows, counted if its loader did not."""
    return batch if type(batch) is Counted else Counted(batch, count_rows(batch))
