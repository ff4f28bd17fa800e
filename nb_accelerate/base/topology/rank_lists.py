"""Format lists of ranks for people to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def ranges(ranks: Sequence[int], *, shortest: int = 3) -> str:
    """Format ranks as short as can be: ``0-2, 5``; ``shortest`` or more in a row are written with a dash."""
    parts: list[str] = []
    ordered = sorted(ranks)
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            run = ordered[start:index]
            parts += [f"{run[0]}-{run[-1]}"] if len(run) >= max(shortest, 2) else map(str, run)
            start = index
    return ", ".join(parts)


def as_option(ranks: Sequence[int]) -> str:
    """Format ranks as they are written on a line: ``0,2-4``."""
    return ranges(ranks).replace(" ", "")


def label(ranks: Sequence[int]) -> str:
    """Format ranks as a prefix of what they print: ``rank 3``, ``ranks 0-1``, ``ranks 0, 2-3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks, shortest=2)}"


def named(ranks: Sequence[int]) -> str:
    """Format ranks for a sentence: ``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0-62``."""
    text = ranges(ranks)
    head, comma, last = text.rpartition(", ")
    return ("rank " if len(ranks) == 1 else "ranks ") + (f"{head} and {last}" if comma else text)
