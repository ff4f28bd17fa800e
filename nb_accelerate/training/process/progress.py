"""Progress bars for users' own loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tqdm.std import tqdm

from nb_accelerate.base.progress_page import here
from nb_accelerate.training.process import context

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


def progress(
    iterable: Iterable[T] | None = None, label: str = "", *, total: float | None = None, leave: bool = True
) -> tqdm[T]:
    """Return a progress bar: a line of the panel where there is one, else a line of the first process' terminal.

    Loops over prepared loaders need none. It is for other loops, and for the loop around them, where it says how long
    all will take.

    Examples:
        ```python
        for epoch in progress(range(epochs), "epochs"):
            ...

        with progress(label="rows", total=len(table)) as bar:
            for part in table.parts():
                bar.update(len(part))
        ```

    Args:
        iterable: what to go through; None to call ``update`` by hand.
        label: what is counted.
        total: how many there will be; by default as many as ``len(iterable)``.
        leave: whether it stays when it is full.

    Returns:
        A bar of [tqdm](https://tqdm.github.io).
    """
    is_row = here().wants_rows
    silent = not is_row and not context.topology_here().is_local_main
    make: Any = tqdm  # its overloads do not know that there may be nothing to go through
    bar: tqdm[T] = make(
        iterable,
        desc=label or None,
        total=total,
        leave=leave,
        disable=silent,
        # In a panel each step is told, at microseconds: a long one may follow a short one, and a bar that draws
        # ten times a second at most would stand at the one before.
        mininterval=0.0 if is_row else 0.1,
    )
    return bar
