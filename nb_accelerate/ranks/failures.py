"""What went wrong in a launch, and which of several things was the cause.

When a rank fails, the others fail because of it: their collective reports a closed connection a tenth of a second
later, or never. What a user needs is the first cause, raised in the notebook with its own type, with the lines of
the cell and with what the other ranks were doing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.diagnostics.render import ANSI, render_report
from nb_accelerate.diagnostics.stacks import where
from nb_accelerate.display.words import named
from nb_accelerate.errors import DeadlineError, LaunchError, RankDiedError, RemoteError, StartError
from nb_accelerate.protocol.shipping import unpack
from nb_accelerate.ranks.memory import HINT as OUT_OF_MEMORY

if TYPE_CHECKING:
    from nb_accelerate.launch.local import RankHandle
    from nb_accelerate.protocol.messages import ErrorReport, Failure


_EXIT_CODE = re.compile(r"-?[0-9]{1,10}")


class Interrupted(KeyboardInterrupt):
    """The user interrupted the launch, or stopped it, as its text says; a KeyboardInterrupt is what they get."""


class Overdue(Exception):  # noqa: N818 - never raised: it becomes a DeadlineError or a StartError
    """The launch, or its start, took too long."""

    def __init__(self, *, seconds: float, ranks: tuple[int, ...], starting: bool) -> None:
        super().__init__(seconds, ranks)
        self.seconds = seconds
        self.ranks = ranks
        self.starting = starting


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Something that ends a launch.

    Attributes:
        error: what to raise if this was the cause.
        when: `time.monotonic` of it.
        rank: whose, or None.
        report: the traceback in the rank, if there is one.
        peer_lost: it only says that another rank has gone.
    """

    error: BaseException
    when: float
    rank: int | None = None
    report: ErrorReport | None = None
    peer_lost: bool = False


class RankTraceback(Exception):  # noqa: N818 - it is the text shown above an error, not an error
    """The traceback of a rank, as the ``__cause__`` of the exception raised here: plain Python prints it first."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def died(handle: RankHandle, output: str, *, started: bool, out_of_memory: bool) -> Incident:
    """A rank's process ended without an answer."""
    error = _death(handle, output, started=started, out_of_memory=out_of_memory)
    return Incident(error=error, when=time.monotonic(), rank=handle.rank)


def unreadable(handle: RankHandle, error: Exception) -> Incident:
    """A message of a rank cannot be read, and it may have been its answer."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    problem = LaunchError(
        f"what rank {handle.rank} sent to the notebook cannot be read ({said}), so the launch was ended"
    )
    problem.__cause__ = error
    return Incident(error=problem, when=time.monotonic(), rank=handle.rank)


def _death(handle: RankHandle, output: str, *, started: bool, out_of_memory: bool) -> BaseException:
    rank, exitcode = handle.rank, handle.exitcode
    said = f" Its last output was:\n{output.rstrip()}" if output.strip() else ""
    if exitcode is None:
        return StartError(f"rank {rank} is lost: {handle.lost}.{said}")
    doing = "while it ran" if started else "while it was being set up"
    if exitcode >= 0:
        how = f"ended with exit code {exitcode} {doing}, before the function returned"
    else:
        how = f"was ended by {signal_name(-exitcode)} {doing}"
    if exitcode == -signal.SIGKILL and out_of_memory:
        said = f" {OUT_OF_MEMORY}{said}"
    return RankDiedError(f"rank {rank} {how}.{said}", rank=rank, exitcode=exitcode, output=output)


def signal_name(number: int) -> str:
    """``SIGSEGV (segmentation fault)``."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    meaning = (signal.strsignal(number) or "").lower()
    return f"{name} ({meaning})" if meaning and meaning != "unknown signal" else name


def failed(handle: RankHandle, failure: Failure, fds: tuple[int, ...], output: str) -> Incident:
    """A rank answered with an exception."""
    return Incident(
        error=_rebuild(handle.rank, failure, fds, output),
        when=failure.when,
        rank=handle.rank,
        report=failure.report,
        peer_lost=failure.peer_lost,
    )


def _rebuild(rank: int, failure: Failure, fds: tuple[int, ...], output: str) -> BaseException:
    report = failure.report
    if report.type_name == "SystemExit" and failure.result_of_call:
        code = int(report.message) if _EXIT_CODE.fullmatch(report.message) else 1
        text = f"rank {rank} called sys.exit({report.message}), before the function returned."
        return RankDiedError(text, rank=rank, exitcode=code, output=output)
    if failure.parcel is not None:
        try:
            rebuild, args = unpack(failure.parcel, fds)
            error: BaseException = rebuild(*args)
        # The class or its state cannot be rebuilt in this process, which is users' code; the report says it all.
        except (Exception, SystemExit):
            error = _remote(rank, report, output)
    else:
        for fd in fds:
            os.close(fd)
        error = _remote(rank, report, output)
    return error


def _remote(rank: int, report: ErrorReport, output: str) -> RemoteError:
    text = f"rank {rank} raised {report.type_name}: {report.message}"
    return RemoteError(text, rank=rank, type_name=report.type_name, output=output)


def first_cause(incidents: list[Incident], world_size: int, stacks: dict[int, str]) -> BaseException:
    """The exception to raise for what happened.

    An interrupt wins over everything, since it is what the user did. Otherwise the earliest incident does, and one
    that only says that a peer has gone comes after all others.
    """
    for incident in incidents:
        if isinstance(incident.error, Interrupted):
            return interrupted(f"the launch was {incident.error}")
    cause = min(incidents, key=lambda incident: (incident.peer_lost, incident.when))
    others = {rank: dump for rank, dump in stacks.items() if rank != cause.rank}
    if isinstance(cause.error, Overdue):
        return _deadline(cause.error, world_size, others)
    error = cause.error
    if isinstance(error, (RankDiedError, RemoteError)):
        error.stacks = others
    footer = whereabouts(others)
    if cause.report is not None and cause.rank is not None:
        _show_traceback_of_rank(error, cause.report, cause.rank, world_size, footer)
    elif footer:
        add_note(error, footer)
    return error


def interrupted(text: str) -> KeyboardInterrupt:
    """What the user gets who interrupts: in a notebook one line, and not where we were while we waited."""
    error = KeyboardInterrupt(text)
    line = f"{ANSI.error}KeyboardInterrupt{ANSI.end}: {text}"
    error._render_traceback_ = functools.partial(list, (line,))  # type: ignore[attr-defined]
    return error


def _deadline(overdue: Overdue, world_size: int, stacks: dict[int, str]) -> BaseException:
    ranks = f"rank{'s' if len(overdue.ranks) > 1 else ''} {', '.join(map(str, overdue.ranks))} of {world_size}"
    if overdue.starting:
        return StartError(f"{ranks} could not be started within {overdue.seconds:g} s")
    text = f"the launch took longer than timeout={overdue.seconds:g} s; {ranks} had not returned"
    error = DeadlineError(text, stacks=stacks)
    add_note(error, whereabouts(stacks))
    return error


def whereabouts(stacks: dict[int, str]) -> str:
    """``Meanwhile rank 0 was in all_reduce, called from train, Cell In[7] line 12``; equal places said once."""
    places: dict[str, list[int]] = {}
    for rank, dump in sorted(stacks.items()):
        places.setdefault(where(dump), []).append(rank)
    return "\n".join(
        f"Meanwhile {named(ranks)} {'were' if len(ranks) > 1 else 'was'} {place}" for place, ranks in places.items()
    )


def summary(error: BaseException) -> str:
    """One line: who failed, and with what."""
    rank = getattr(error, "_nb_rank", None)
    lines = str(error).splitlines() or [""]
    if isinstance(error, LaunchError):
        return lines[0]
    where_ = f"rank {rank} failed: " if rank is not None else ""
    return f"{where_}{type(error).__name__}: {lines[0]}" if lines[0] else f"{where_}{type(error).__name__}"


def add_note(error: BaseException, note: str) -> None:
    """PEP 678's ``add_note``, also on Python 3.10."""
    if note:
        with contextlib.suppress(Exception):  # the class may refuse attributes, or have an odd one of that name
            notes = getattr(error, "__notes__", None)
            error.__notes__ = [*(notes if isinstance(notes, (list, tuple)) else ()), note]


def _show_traceback_of_rank(error: BaseException, report: ErrorReport, rank: int, world_size: int, footer: str) -> None:
    """What IPython and plain Python print is the traceback in the rank, not our own waiting for it."""
    title = f"rank {rank} of {world_size}"
    add_note(error, f"Raised by {title}.")
    add_note(error, footer)
    vars(BaseException)["__cause__"].__set__(error, RankTraceback(render_report(report, title=title)))
    # IPython asks for this method before it formats a traceback itself. Types with slots cannot have it, or refuse.
    render = functools.partial(_lines, report, title, footer)
    with contextlib.suppress(Exception):
        error._render_traceback_ = render  # type: ignore[attr-defined]
        error._nb_rank = rank  # type: ignore[attr-defined] # noqa: SLF001 - ours, on a type that is not


def _lines(report: ErrorReport, title: str, footer: str) -> list[str]:
    return render_report(report, title=title, footer=footer, style=ANSI).split("\n")
