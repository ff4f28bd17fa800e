"""What the ranks returned."""

from __future__ import annotations

from typing import Any


class Values(list[Any]):
    """A list in rank order. As the last expression of a cell it shows nothing if every rank returned None."""

    def _ipython_display_(self) -> None:
        if all(value is None for value in self):
            return
        # Not a method that hides itself by raising: IPython would go on and look for a plain repr, which is there.
        from IPython.display import display

        display(list(self))  # type: ignore[no-untyped-call]
