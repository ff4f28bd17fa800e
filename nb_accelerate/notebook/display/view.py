"""What a panel shows, as data. Two renderings of it are in `html` and `text`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.records import Curve, Points

PanelStatus = Literal["starting", "running", "done", "failed", "interrupted", "stopped"]
Kind = Literal["", "late", "bad", "done"]

# By Ctrl-C, the kernel's interrupt or the button of that name; and by ``Launch.stop``.
ENDED_BY_USER: tuple[PanelStatus, ...] = ("interrupted", "stopped")

_MARKS: dict[PanelStatus, str] = {
    "starting": "○",
    "running": "●",
    "done": "✓",
    "failed": "✗",
    "interrupted": "■",
    "stopped": "■",
}

# Fields of a row that are columns, and the columns' titles. One without a value in any row is left out.
FIGURES = (
    ("step", "step"),
    ("epoch", "epoch"),
    ("rate", "it/s"),
    ("loss", "loss"),
    ("memory", "memory"),
    ("gpu", "GPU"),
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What does not change while it runs."""

    name: str  # of the function, or of the cell
    setup: tuple[str, ...]  # number of ranks, device, backend and precision in a few words each
    brief: str = ""  # the same in one line; said in the place of a panel that was never drawn
    details: str = ""  # the same with everything there is to know; shown on request
    cores: int = 1  # of this machine
    config: Mapping[str, Any] = field(default_factory=dict)  # arguments of the function
    settings: Mapping[str, Any] = field(default_factory=dict)  # in which runs differ: number of ranks, device, start


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: a rank, or several ranks that do the same. All texts may be empty."""

    ranks: str  # numbers: ``0-3, 6``
    machine: str = ""  # where they are, if not all ranks are there
    kind: Kind = ""
    share: float | None = None  # of it that is done, from 0 to 1
    step: str = ""  # with the number of all if that is known
    epoch: str = ""
    rate: str = ""  # steps per second
    loss: str = ""
    memory: str = ""
    gpu: str = ""  # percent of its time in which the device computed
    now: str = ""  # what it does
    location: str = ""  # the line of the user's code at which it does that
    times: str = ""  # where its time goes: lately, and in a run that has ended, from the first step to the last

    @property
    def said(self) -> str:
        """Return what it does now and where, as one text."""
        return ", ".join(part for part in (self.now, self.location) if part)


@dataclass(frozen=True, kw_only=True)
class BarLine:
    """A progress bar of users' own, of one rank or of several."""

    label: str  # its description; may be empty
    text: str  # what tqdm writes beside it
    share: float | None = None  # of it that is done, from 0 to 1; None if its total is not known
    kind: Literal["", "done", "ended"] = ""  # ``ended``: before its total
    depth: int = 0  # bars that it stands in


@dataclass(frozen=True, kw_only=True)
class FailureSummary:
    """Why it ended. The whole is told by the error that is raised."""

    ranks: tuple[int, ...] = ()  # those that failed with it; none if it is no rank's failure
    what: str = ""  # for their rows: the type of an exception, say
    label: str = ""  # of the details
    details: str = ""  # several lines, a traceback say, where no error is raised


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Values that were logged under a name, with those of earlier runs."""

    curve: Curve
    earlier: tuple[Curve, ...] = ()


@dataclass(frozen=True, kw_only=True)
class View:
    """A panel at one moment."""

    state: PanelStatus
    facts: Facts
    elapsed: str
    outlook: tuple[str, ...] = ()  # how long it will take, samples a second
    summary: tuple[str, ...] = ()  # of a run that has ended
    peak: str = ""  # most memory that a rank used, when it has ended
    bars: tuple[BarLine, ...] = ()
    rows: tuple[Row, ...] = ()  # of ranks; ranks that are in step share one
    each: tuple[Row, ...] = ()  # what differs between ranks, where these can have one together
    columns: tuple[str, ...] = ()  # figures that have a column in any case, so that none comes and goes
    curve: Points = ()  # losses; nan where no rank had a finite one
    logged: tuple[Curve, ...] = ()  # what else was logged
    before: tuple[Curve, ...] = ()  # losses of earlier runs, called by the settings in which they differ
    run_label: str = ""  # the same of this run; "" if none differ
    charts: tuple[Chart, ...] = ()  # what was logged to be drawn here
    settings: Mapping[str, Any] = field(default_factory=dict)  # those of `facts`, and what ranks have told of theirs
    held: str = ""  # how the model is spread over ranks, and what they hold of it
    warnings: tuple[str, ...] = ()  # sentences
    notes: tuple[str, ...] = ()  # lines of information, in grey
    times: str = ""  # of all ranks together, as in `Row`
    advice: str = ""  # what slowed down a run that has ended, and what to try
    failure: FailureSummary | None = None
    key: str = ""  # of this panel alone; "" if it is drawn once

    @property
    def mark(self) -> str:
        """Return a sign for its state; "!" if it is done but something is wrong."""
        return "!" if self.state == "done" and self.warnings else _MARKS[self.state]

    @property
    def has_steps(self) -> bool:
        """Whether a rank or a progress bar says how far it is."""
        return bool(self.bars) or any(row.step for row in self.rows)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether it stays in the cell when the run is over: it says more than that all went well."""
        return self.has_steps or bool(self.charts) or self.state != "done"
