"""Build the exception to raise for a request that went wrong.

When a rank fails, the others fail because of it: their collective reports a closed connection a tenth of a second
later, or never. The notebook raises the first cause only: with its own type, with the traceback on its rank, and with
what the other ranks were doing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from typing import TYPE_CHECKING

from nb_accelerate.base.ipython_versions import is_module_level
from nb_accelerate.base.topology.rank_lists import label, named
from nb_accelerate.errors import DeadlineError, DeadlockError, LaunchError, RankDiedError, RemoteError, StartError
from nb_accelerate.errors.out_of_memory import says_out_of_memory
from nb_accelerate.errors.traceback_lines import is_users, show_instead, text_lines, user_frames
from nb_accelerate.notebook.diagnostics.render import place, render_report
from nb_accelerate.notebook.diagnostics.stacks import OUTSIDE, where
from nb_accelerate.notebook.display.view import FailureSummary
from nb_accelerate.notebook.protocol.main_module import main_globals
from nb_accelerate.notebook.protocol.messages import Failure
from nb_accelerate.notebook.protocol.shipping import unpack
from nb_accelerate.notebook.ranks.failing.incidents import STOPPED, IncidentKind, first_cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nb_accelerate.errors.traceback_lines import Style
    from nb_accelerate.notebook.display.view import PanelStatus
    from nb_accelerate.notebook.protocol.messages import ErrorReport, Frame
    from nb_accelerate.notebook.ranks.failing.incidents import Answer, Incident, Wording
    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.request import Request


_EXIT_CODE = re.compile(r"-?[0-9]{1,10}")

_OUT_OF_MEMORY = (
    " The system's out-of-memory killer was at work meanwhile: the machine, or this container, is short of memory. "
    "Use smaller batches, fewer loader workers or fewer ranks."
)

_KILLED = " If nobody ended it, memory was probably short: use smaller batches, fewer loader workers or fewer ranks."


class RankTraceback(Exception):  # noqa: N818 - it is the text shown above an error, not an error
    """Holds the traceback of a rank, as the ``__cause__`` of an exception, which plain Python prints before it.

    Attributes:
        who: the note of the exception that says which ranks have raised it, as the first line of the traceback does.
    """

    def __init__(self, text: str, who: str) -> None:
        super().__init__(text, who)
        self.who = who

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def error_of(request: Request, *more_requests: Request) -> BaseException | None:
    """Return the exception to raise for a request that is done, or None if all went well. Not in the loop's thread.

    Users' code may run in it, where an exception of theirs is unpickled.
    """
    for each in (request, *more_requests):
        if each.failure is not None:
            return each.failure
    incidents = [incident for each in (request, *more_requests) for incident in each.incidents]
    if not incidents:
        return None
    cause = first_cause(incidents)
    lost = lost_as_well(cause, incidents)
    wording, world_size = request.wording, request.world_size
    if cause.kind is IncidentKind.INTERRUPTED:
        locations = interrupted_at(request.answers, request.stacks)
        return interrupted(f"{wording.what} was {cause.how}", "\n".join(filter(None, (locations, *lost))))
    failed_rank = cause.rank.rank if cause.rank is not None else None
    stacks = {rank: dump for rank, dump in request.stacks.items() if rank != failed_rank}
    if cause.failure is not None and cause.rank is not None:
        failure, fds = cause.failure
        request.take(cause.rank.rank)
        error = rebuild(cause.rank.rank, failure, fds, cause.tail, who=f"rank {cause.rank.label}")
        _add_stacks(error, stacks)
        notes = (_not_sent(failure.report), cause.memory, *failed_otherwise(cause, request.incidents), *lost)
        footer = "\n".join(filter(None, notes))
        title = whose(cause, request)
        show_traceback_of_rank(error, failure.report, title, world_size, footer)
        return error
    error = _error_without_report(cause, request, stacks)
    _add_stacks(error, stacks)
    add_note(error, cause.memory)
    if not isinstance(error, DeadlockError):  # its text says where the ranks are
        add_note(error, meanwhile(stacks))
    add_note(error, "\n".join(lost))
    return error


def _not_sent(report: ErrorReport) -> str:
    """Return what to write if a rank lacks a variable of the notebook; "" if it failed by anything else."""
    name = report.absent
    if not name or name not in main_globals():
        return ""
    code = "the cell" if is_module_level(report.absent_in) else report.absent_in
    return (
        f"{name} is a variable of the notebook that the ranks were not sent: they are sent the names in code, and no "
        f"names in strings. Write it in {code} as a line of its own: {name}"
    )


def _error_without_report(cause: Incident, request: Request, stacks: Mapping[int, str]) -> BaseException:
    if cause.error is not None:
        return cause.error
    if cause.rank is not None:
        return death(cause.rank, request.wording, cause.tail, out_of_memory=cause.out_of_memory)
    text = _lateness(cause, request)
    return StartError(text) if cause.kind is IncidentKind.NOT_STARTED else DeadlineError(text, stacks=dict(stacks))


def _lateness(cause: Incident, request: Request) -> str:
    missing = f"{named(cause.late)} of {request.world_size}"
    if cause.kind is IncidentKind.NOT_STARTED:
        module, _, name = request.wording.owner.partition(".")
        return (
            f"{missing} could not be started: in {request.start:g} s no processor time was used and no file was read "
            f"({cause.how}). To wait longer: from dataclasses import replace; from nb_accelerate.notebook.{module} "
            f"import {name}; {name}.timeouts = replace({name}.timeouts, start={5 * request.start:g})"
        )
    limit = request.wording.limit.format(seconds=request.timeout)
    whom = label(cause.late)
    return f"{request.wording.what} took longer than {limit}; {whom} had not finished"


def _add_stacks(error: BaseException, stacks: Mapping[int, str]) -> None:
    if isinstance(error, (RankDiedError, RemoteError)):
        error.stacks = dict(stacks)


def death(rank: RankProxy, wording: Wording, tail: str = "", *, out_of_memory: bool = False) -> LaunchError:
    """Return the error about a rank that has ended, or is of no use any more, with its last output."""
    rank_number, exitcode, after = rank.rank, rank.handle.exitcode, wording.after_end(rank)
    who = f"rank {rank.label}"
    last_output = f"\nIts last output was:\n{tail.rstrip()}" if tail.strip() else ""
    if rank.why_lost:
        error = wording.unusable(f"{who} is lost: {rank.why_lost}{after}.{last_output}")
        error.__cause__ = rank.lost_by
        return error
    if exitcode is None:
        return wording.unseen(f"{who} is lost: {rank.handle.lost}{after}.{last_output}")
    end = f"was ended by {signal_name(-exitcode)}" if exitcode < 0 else f"ended with exit code {exitcode}"
    hint = ""
    if exitcode == -signal.SIGKILL:
        hint = _OUT_OF_MEMORY if out_of_memory else _KILLED
    return RankDiedError(f"{who} {end}{after}.{hint}{last_output}", rank=rank_number, exitcode=exitcode, output=tail)


def how_it_ended(rank: RankProxy, wording: Wording) -> str:
    """Return how a rank has ended, in a few words and without advice."""
    return str(death(rank, wording)).split(". ", maxsplit=1)[0].removesuffix(".")


def signal_name(number: int) -> str:
    """Return the name and meaning of a signal: ``SIGSEGV (segmentation fault)``."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    meaning = (signal.strsignal(number) or "").lower()
    return f"{name} ({meaning})" if meaning and meaning != "unknown signal" else name


def rebuild(rank: int, failure: Failure, fds: tuple[int, ...], output: str, *, who: str) -> BaseException:
    """Return the exception that a rank has answered with; a `RemoteError` if it cannot be unpickled here.

    Users' code may run in it. The descriptors are closed.
    """
    report = failure.report
    if report.type_name == "SystemExit" and failure.result_of_call:
        code = int(report.message) if _EXIT_CODE.fullmatch(report.message) else 1
        text = f"{who} called sys.exit({report.message}), before the function returned."
        return RankDiedError(text, rank=rank, exitcode=code, output=output)
    if failure.parcel is not None:
        # If the class or its state, which are users' code, cannot be rebuilt in this process, the report says it all.
        with contextlib.suppress(Exception, SystemExit):
            rebuild, args = unpack(failure.parcel, fds)
            error: BaseException = rebuild(*args)
            return error
    else:
        for fd in fds:
            os.close(fd)
    text = f"{who} raised {report.type_name}: {report.message}"
    return RemoteError(text, rank=rank, type_name=report.type_name, output=output)


def interrupted(text: str, locations: str = "") -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that a notebook shows without the traceback of the wait."""
    error = KeyboardInterrupt(text)
    add_note(error, locations)
    show_instead(error, functools.partial(text_lines, error))
    return error


def summary(error: BaseException) -> str:
    """Return one line about an error: the ranks, the type and the first line of its text."""
    who = getattr(error, "_nb_ranks", None)
    lines = str(error).splitlines() or [""]
    if isinstance(error, LaunchError):
        return lines[0]
    prefix = f"{who} failed: " if who is not None else ""
    return f"{prefix}{type(error).__name__}: {lines[0]}" if lines[0] else f"{prefix}{type(error).__name__}"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, as PEP 678's ``add_note`` does, also to one whose class refuses it. "" adds none."""
    if note:
        with contextlib.suppress(Exception):  # the class may refuse attributes, or have an odd one of that name
            notes = getattr(error, "__notes__", None)
            setattr(error, "__notes__", [*(notes if isinstance(notes, (list, tuple)) else ()), note])  # noqa: B010 - new in 3.11


def show_traceback_of_rank(error: BaseException, report: ErrorReport, title: str, world_size: int, footer: str) -> None:
    """Have IPython and plain Python print the traceback on the rank instead of the traceback of the wait for it."""
    users_frames = _users_frames(report)
    # IPython shows no line of a rank for a SyntaxError, so the user's line that led to it is named.
    location = f", in {place(users_frames[-1])}" if isinstance(error, SyntaxError) and users_frames else ""
    who = f"Raised by {title}{location}."
    add_note(error, who)
    add_note(error, footer)
    error.__cause__ = RankTraceback(render_report(report, title=title), who)
    show_instead(error, functools.partial(_lines, error, report, title, footer))
    with contextlib.suppress(Exception):  # types with slots cannot have it, or refuse
        error._nb_ranks = title.replace(f" of {world_size}", "")  # type: ignore[attr-defined] # noqa: SLF001 - ours, on a type that is not


def _lines(error: BaseException, report: ErrorReport, title: str, footer: str, style: Style) -> list[str]:
    called_from = user_frames(error.__traceback__)
    return render_report(report, title=title, footer=footer, style=style, called_from=called_from[-1:]).split("\n")


def said_of(cause: Incident, request: Request) -> str:
    """Return one line about what went wrong. Runs no code of users."""
    if cause.kind is IncidentKind.INTERRUPTED:
        return f"{request.wording.what} was {cause.how}"
    if cause.failure is not None:
        title = whose(cause, request).replace(f" of {request.world_size}", "")
        return f"{title} failed: {one_line(cause.failure[0].report)}"
    if cause.error is not None:
        return summary(cause.error)
    if cause.rank is not None:
        return how_it_ended(cause.rank, request.wording)
    return _lateness(cause, request)


def outcome_of(
    request: Request, *more_requests: Request, error: BaseException | None = None
) -> tuple[PanelStatus, FailureSummary | None]:
    """Return how a request has ended, for its panel: the ranks that failed, and the traceback if no error is raised."""
    failure = next((each.failure for each in (request, *more_requests) if each.failure is not None), None)
    incidents = [incident for each in (request, *more_requests) for incident in each.incidents]
    # Nothing went wrong on a rank: all is well, or the loop has ended, or a value cannot be unpickled here.
    if failure is not None or not incidents:
        error = failure or error
        if error is None:
            return "done", None
        return ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed"), None
    cause = first_cause(incidents)
    if cause.kind is IncidentKind.INTERRUPTED:
        return ("stopped" if cause.how == STOPPED else "interrupted"), None
    if isinstance(cause.error, DeadlockError):
        waiting = cause.error.stacks
        early = tuple(rank.rank for rank in request.ranks if rank.rank not in waiting)
        what = "returned early" if early else "deadlocked"
        return "failed", FailureSummary(ranks=early or tuple(waiting), what=what)
    ranks = tuple(failed_alike(cause, incidents))
    # A rank has ended, was late, or could not be asked.
    if cause.failure is None:
        exitcode = None if cause.rank is None else cause.rank.handle.exitcode
        what = "" if exitcode is None else f"exit code {exitcode}" if exitcode >= 0 else f"{signal_name(-exitcode)}"
        return "failed", FailureSummary(ranks=ranks, what=what)
    # A rank has answered with an exception.
    report = cause.failure[0].report
    title = whose(cause, request)
    details = "" if request.is_raised else render_report(report, title=title)
    what = "out of memory" if says_out_of_memory(report.type_name, report.message) else report.type_name
    return "failed", FailureSummary(ranks=ranks, what=what, label=f"traceback of {title}", details=details)


_MAX_OTHERS = 3  # ranks whose failures are told beside the first one


def failed_alike(cause: Incident, incidents: Iterable[Incident]) -> list[int]:
    """Return the ranks that raised what `cause` is: the same type and text, from the same lines of the user's code."""
    if cause.failure is None:
        return [] if cause.rank is None else [cause.rank.rank]
    report = cause.failure[0].report
    return sorted({rank.rank for rank, other in _reports(incidents) if _is_same(other, report)})


def failed_otherwise(cause: Incident, incidents: Iterable[Incident]) -> list[str]:
    """Return a line for each rank that failed by itself and with another error than `cause`, the first few."""
    if cause.failure is None:
        return []
    report = cause.failure[0].report
    others = [(rank, other) for rank, other in _reports(incidents) if not _is_same(other, report)]
    return [
        f"Rank {rank.label} failed as well: {one_line(other)}"
        for rank, other in sorted(others, key=lambda pair: pair[0].rank)[:_MAX_OTHERS]
    ]


def lost_as_well(cause: Incident, incidents: Iterable[Incident]) -> list[str]:
    """Return a line for each rank that is of no use any more, although its process did not end by itself."""
    ranks = [incident.rank for incident in incidents if incident.rank is not None and incident is not cause]
    lost = {rank.rank: rank for rank in ranks}
    return [f"Rank {rank.label} is lost: {rank.why_lost}." for _, rank in sorted(lost.items()) if rank.why_lost]


def _is_same(report: ErrorReport, other: ErrorReport) -> bool:
    """Return whether two reports tell a user the same. Frames of libraries and causes may differ from rank to rank."""
    if report == other:
        return True
    lines = _users_frames(report)
    has_same_text = (report.type_name, report.message) == (other.type_name, other.message)
    return bool(lines) and has_same_text and lines == _users_frames(other)


def _users_frames(report: ErrorReport) -> list[Frame]:
    return [frame for frame in report.frames if is_users(frame.filename)]


def whose(cause: Incident, request: Request) -> str:
    """Return who raised `cause`: ``rank 1 of 4``, ``ranks 2-3 of 4 on b`` or ``all 4 ranks``."""
    ranks, world_size = failed_alike(cause, request.incidents), request.world_size
    if len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    machines = {rank.handle.machine for rank in request.ranks if rank.rank in ranks} - {""}
    return f"{label(ranks)} of {world_size}{f' on {machines.pop()}' if len(machines) == 1 else ''}"


def one_line(report: ErrorReport) -> str:
    """Return the type and the first line of the text of an exception."""
    return f"{report.type_name}: {report.message}".rstrip(": ").split("\n")[0]


def meanwhile(stacks: Mapping[int, str]) -> str:
    """Return where ranks were: ``Meanwhile rank 0 was in all_reduce, called from train, cell 7 line 12``."""
    # Ranks outside users' code are left out: most of them know of the failure, and where they are says nothing of it.
    locations = {rank: where(dump) for rank, dump in stacks.items()}
    inside = {rank: location for rank, location in locations.items() if location != OUTSIDE}
    return _lines_of_ranks(inside, "Meanwhile ")


def interrupted_at(answers: Mapping[int, Answer], stacks: Mapping[int, str]) -> str:
    """Return the line of users' code in which an interrupt hit each rank: ``Rank 0 was in train, cell 7 line 12``."""
    locations = {rank: where(dump) for rank, dump in stacks.items() if rank not in answers}
    for rank, (answer, _) in answers.items():
        if not isinstance(answer, Failure) or answer.report.type_name != "KeyboardInterrupt":
            continue
        if frames := _users_frames(answer.report):
            locations[rank] = f"in {place(frames[-1])}"
    return _lines_of_ranks(locations)


def _lines_of_ranks(locations: Mapping[int, str], prefix: str = "") -> str:
    ranks_by_location: dict[str, list[int]] = {}
    for rank, location in sorted(locations.items()):
        ranks_by_location.setdefault(location, []).append(rank)
    lines = []
    for location, ranks in ranks_by_location.items():
        line = f"{prefix}{named(ranks)} {'were' if len(ranks) > 1 else 'was'} {location}"
        lines.append(line[:1].upper() + line[1:])
    return "\n".join(lines)


def _reports(incidents: Iterable[Incident]) -> list[tuple[RankProxy, ErrorReport]]:
    return [
        (incident.rank, incident.failure[0].report)
        for incident in incidents
        if incident.rank is not None
        and incident.failure is not None
        and not (incident.peer_lost or incident.is_consequence)
    ]
