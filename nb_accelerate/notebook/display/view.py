"""What a panel shows, as data. Two renderings of it are in `html` and `text`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nb_accelerate.base.records import Curve, Points

PanelStatus = Literal["starting", "running", "done", "failed", "interrupted", "stopped"]
Kind = Literal["", "late", "bad", "done"]

ENDED_BY_USER: tuple[PanelStatus, ...] = ("interrupted", "stopped")
"""By Ctrl-C, the kernel's interrupt or a button of that name; and by ``Launch.stop`` or the button of that name."""

_MARKS: dict[PanelStatus, str] = {
    "starting": "○",
    "running": "●",
    "done": "✓",
    "failed": "✗",
    "interrupted": "■",
    "stopped": "■",
}

FIGURES = (
    ("step", "step"),
    ("epoch", "epoch"),
    ("rate", "it/s"),
    ("loss", "loss"),
    ("memory", "memory"),
    ("gpu", "GPU"),
    ("cpu", "CPU"),
)
"""Fields of a row that are columns, and the columns' titles. One without a value in any row is left out."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What does not change while it runs.

    Attributes:
        name: of the function, or of the cell.
        setup: number of ranks, device, backend and precision in a few words each.
        brief: the same in one line; said in the place of a panel that was never drawn.
        details: the same with everything there is to know; shown on request.
        cores: of this machine.
    """

    name: str
    setup: tuple[str, ...]
    brief: str = ""
    details: str = ""
    cores: int = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: a rank, several ranks that do the same, or a progress bar of theirs. All texts may be empty.

    Attributes:
        ranks: numbers of the ranks, as text: ``0-3, 6``.
        kind: whether it is late, has failed or is done; empty otherwise.
        share: how much of it is done, from 0 to 1; None if that is not known.
        step: steps taken, with the number of all if that is known.
        epoch: the current one, from 1.
        rate: steps per second.
        loss: the newest.
        memory: in use, with its unit.
        held: what of it parameters, gradients and optimizer states are.
        gpu: percent of its time in which the device computed.
        cpu: percent of one core that the process used.
        now: what it does, in words.
        location: the line of the user's code at which it does that.
        label: of a bar.
        times: where its time goes: lately, and in a run that has ended, from the first step to the last.
    """

    ranks: str
    kind: Kind = ""
    share: float | None = None
    step: str = ""
    epoch: str = ""
    rate: str = ""
    loss: str = ""
    memory: str = ""
    held: str = ""
    gpu: str = ""
    cpu: str = ""
    now: str = ""
    location: str = ""
    label: str = ""
    times: str = ""

    @property
    def said(self) -> str:
        """Return the label of a bar, and what it does now and where, as one text."""
        doing = ", ".join(part for part in (self.now, self.location) if part)
        return " · ".join(part for part in (self.label, doing) if part)


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One rank in a panel that has too many for a row each."""

    rank: int
    share: float
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class FailureSummary:
    """Why it ended. The whole is told by the error that is raised.

    Attributes:
        ranks: those that failed with it; none if it is no rank's failure.
        what: a few words for their rows: the type of an exception, say.
        label: what `details` is.
        details: several lines, a traceback say, where no error is raised; may be empty.
    """

    ranks: tuple[int, ...] = ()
    what: str = ""
    label: str = ""
    details: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Values that were logged under a name.

    Attributes:
        curve: those of the run that is on.
        earlier: those of runs before it.
    """

    curve: Curve
    earlier: tuple[Curve, ...] = ()


@dataclass(frozen=True, kw_only=True)
class View:
    """A panel at one moment.

    Attributes:
        state: of the whole.
        facts: what does not change.
        is_paused: all its ranks wait until they are told to go on.
        elapsed: since it began.
        outlook: what else is known about the whole: how long it will take, samples a second.
        summary: of a run that has ended, in one line.
        remarks: about its ranks.
        bars: progress bars.
        rows: the ranks, or those of many that stand out.
        columns: names of the figures that have a column in any case, so that none comes and goes while one watches.
        dots: all ranks, if they are too many for a row each.
        curve: (step, loss), in order; nan where no rank had a finite one.
        logged: what else was logged, by step.
        before: losses of earlier runs.
        charts: what was logged to be drawn here.
        held: how the model is spread over ranks, and what they hold of it; empty if it is not spread.
        memory: what each rank holds, as a table of text; empty if nothing is known.
        warnings: sentences about what is wrong.
        times: where the time of all ranks together goes, as in `Row`.
        advice: a sentence about what slowed down a run that has ended, and what to try; "" if nothing is worth one.
        failure: why it ended, if it failed.
        key: of this panel, other than those of all others in the notebook; "" if it is drawn once.
    """

    state: PanelStatus
    facts: Facts
    elapsed: str
    is_paused: bool = False
    outlook: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    bars: tuple[Row, ...] = ()
    rows: tuple[Row, ...] = ()
    columns: tuple[str, ...] = ()
    dots: tuple[Dot, ...] = ()
    curve: Points = ()
    logged: tuple[Curve, ...] = ()
    before: tuple[Curve, ...] = ()
    charts: tuple[Chart, ...] = ()
    held: str = ""
    memory: str = ""
    warnings: tuple[str, ...] = ()
    times: str = ""
    advice: str = ""
    failure: FailureSummary | None = None
    key: str = ""

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
