"""Say which ranks failed with a cause, what the others were doing, and where an interrupt has hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.base.topology.rank_lists import label, named
from nb_accelerate.errors.traceback_lines import is_users
from nb_accelerate.notebook.diagnostics.render import place
from nb_accelerate.notebook.diagnostics.stacks import OUTSIDE, where
from nb_accelerate.notebook.protocol.messages import Failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nb_accelerate.notebook.protocol.messages import ErrorReport, Frame
    from nb_accelerate.notebook.ranks.failing.incidents import Answer, Incident
    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.request import Request

_MAX_OTHERS = 3
"""Ranks whose failures are told beside the first one."""


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
        for rank, other in sorted(others, key=lambda one: one[0].rank)[:_MAX_OTHERS]
    ]


def lost_as_well(cause: Incident, incidents: Iterable[Incident]) -> list[str]:
    """Return a line for each rank that is of no use any more, although its process did not end by itself."""
    lost = {
        incident.rank.rank: incident.rank
        for incident in incidents
        if incident.rank is not None and incident is not cause
    }
    return [f"Rank {rank.label} is lost: {rank.why_lost}." for _, rank in sorted(lost.items()) if rank.why_lost]


def _is_same(report: ErrorReport, other: ErrorReport) -> bool:
    """Return whether two reports tell a user the same. Frames of libraries and causes may differ from rank to rank."""
    if report == other:
        return True
    lines = _users_frames(report)
    return bool(lines) and (report.type_name, report.message, lines) == (
        other.type_name,
        other.message,
        _users_frames(other),
    )


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
    """Return where ranks were: ``Meanwhile rank 0 was in all_reduce, called from train, cell 7 line 12``.

    Leaves out ranks outside users' code, where most are that know of the failure: it says nothing of the cause.
    """
    locations = {rank: where(dump) for rank, dump in stacks.items()}
    return _lines({rank: found for rank, found in locations.items() if found != OUTSIDE}, "Meanwhile ")


def interrupted_at(answers: Mapping[int, Answer], stacks: Mapping[int, str]) -> str:
    """Return the line of users' code in which an interrupt hit each rank: ``Rank 0 was in train, cell 7 line 12``."""
    places = {rank: where(dump) for rank, dump in stacks.items() if rank not in answers}
    for rank, (answer, _) in answers.items():
        if not isinstance(answer, Failure) or answer.report.type_name != "KeyboardInterrupt":
            continue
        if frames := _users_frames(answer.report):
            places[rank] = f"in {place(frames[-1])}"
    return _lines(places)


def _lines(places: Mapping[int, str], before: str = "") -> str:
    by_place: dict[str, list[int]] = {}
    for rank, where_ in sorted(places.items()):
        by_place.setdefault(where_, []).append(rank)
    lines = (
        f"{before}{named(ranks)} {'were' if len(ranks) > 1 else 'was'} {where_}" for where_, ranks in by_place.items()
    )
    return "\n".join(line[:1].upper() + line[1:] for line in lines)


def _reports(incidents: Iterable[Incident]) -> list[tuple[RankProxy, ErrorReport]]:
    return [
        (incident.rank, incident.failure[0].report)
        for incident in incidents
        if incident.rank is not None
        and incident.failure is not None
        and not (incident.peer_lost or incident.is_consequence)
    ]
