"""What one rank did in a rehearsal, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

Line = tuple[str, int]
"""File and number of a line of the user's; the file is "" where there is none."""


@dataclass(frozen=True)
class Exchange:
    """Something that ranks do together.

    Attributes:
        what: operation, dtype and shape: ``all_gather of int64 (4,)``. Equal on ranks that are in step.
        line: of the user's code.
        called: what the line has called, if that is of this package.
    """

    what: str
    line: Line
    called: str = ""


@dataclass
class Pass:
    """One loop over a prepared loader: the rows of each batch, and how many optimizer steps were taken in it."""

    line: Line
    rows: list[int] = field(default_factory=list)
    steps: int = 0
    since_step: int = 0  # rows since the last step


@dataclass
class Trace:
    """What one rank did.

    Attributes:
        exchanges: in their order.
        passes: over prepared loaders.
        rates: the learning rate of each step, of each prepared optimizer.
        step_rows: rows of this rank for each step of the first optimizer.
        files: written by this rank, with the line.
        unused: parameters without a gradient, by the model's name.
        invented: lines that read a number that was not computed.
        notes: what could not be rehearsed.
        failure: the text of the exception that ended it; "" if none did.
        failed_at: its line.
        ended: whether it came to its end, in the given time.
        seconds: that it took.
    """

    rank: int
    exchanges: list[Exchange] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    step_rows: list[int] = field(default_factory=list)
    files: dict[str, Line] = field(default_factory=dict)
    invented: dict[Line, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failure: str = ""
    failed_at: Line = ("", 0)
    ended: bool = False
    seconds: float = 0.0

    @property
    def trained(self) -> list[Pass]:
        """The passes in which an optimizer stepped."""
        return [one for one in self.passes if one.steps]

    @property
    def summary(self) -> tuple[object, ...]:
        """What ranks that are alike have in common."""
        return (
            [(one.rows, one.steps) for one in self.passes],
            self.rates,
            self.failure,
            self.ended,
        )
