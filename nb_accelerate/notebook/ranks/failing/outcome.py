"""How a request has ended, as its panel shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.errors import DeadlockError
from nb_accelerate.errors.out_of_memory import says_out_of_memory
from nb_accelerate.notebook.diagnostics.render import render_report
from nb_accelerate.notebook.display.view import FailureSummary
from nb_accelerate.notebook.ranks.failing.errors import signal_name
from nb_accelerate.notebook.ranks.failing.incidents import STOPPED, IncidentKind, first_cause
from nb_accelerate.notebook.ranks.failing.same_failure import failed_alike, whose

if TYPE_CHECKING:
    from nb_accelerate.notebook.display.view import PanelStatus
    from nb_accelerate.notebook.ranks.request import Request


def outcome_of(
    request: Request, *others: Request, error: BaseException | None = None
) -> tuple[PanelStatus, FailureSummary | None]:
    """Return how a request has ended, for its panel: the ranks that failed, and the traceback if no error is raised.

    Args:
        error: what is raised for them, if anything is: a value may have failed to unpickle when all ranks had answered.
    """
    failure = next((asked.failure for asked in (request, *others) if asked.failure is not None), None)
    incidents = [incident for asked in (request, *others) for incident in asked.incidents]
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
