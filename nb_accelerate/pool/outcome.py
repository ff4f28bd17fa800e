"""What came of a turn: values, or the exception to raise in the notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.devices import backend_named
from nb_accelerate.display.words import label
from nb_accelerate.errors import DeadlineError, PoolError, RankDiedError
from nb_accelerate.protocol.messages import Result
from nb_accelerate.protocol.shipping import unpack
from nb_accelerate.ranks.failures import Incident, failed, first_cause, interrupted, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nb_accelerate.ranks.proxy import Member
    from nb_accelerate.ranks.request import Trouble, Turn


def result_of(turn: Turn) -> list[Any]:
    """What came of a turn that has ended: the values of its ranks, in their order.

    Raises:
        BaseException: the first cause, if it went wrong; or what unpickling a value raises.
    """
    try:
        error = _error_of(turn)
        if error is not None:
            raise error
        return _values_of(turn)
    finally:
        turn.close()


def _values_of(turn: Turn) -> list[Any]:
    """What the ranks answered, in their order.

    Raises whatever unpickling one of them raises.
    """
    return [
        unpack(answer.parcel, turn.take(rank)[1])
        for rank, (answer, _) in sorted(turn.answers.items())
        if isinstance(answer, Result) and (answer.parcel.pickled or answer.parcel.sizes)
    ]


def _error_of(turn: Turn) -> BaseException | None:
    """The first cause, or None if all went well."""
    if turn.failure is not None:
        return turn.failure
    if not turn.troubles:
        return None
    if any(trouble.kind == "interrupted" for trouble in turn.troubles):
        return interrupted("the cell was interrupted")
    return first_cause([_incident(trouble, turn) for trouble in turn.troubles], turn.world_size, dict(turn.stacks))


def _incident(trouble: Trouble, turn: Turn) -> Incident:
    if trouble.failure is not None and trouble.member is not None:
        failure, fds = trouble.failure
        turn.take(trouble.member.rank)
        return failed(trouble.member.handle, failure, fds, trouble.tail)
    if trouble.error is not None:
        return Incident(error=trouble.error, when=trouble.when, rank=trouble.member.rank if trouble.member else None)
    if trouble.member is not None:
        is_new = trouble.member.rank in turn.expendable
        error: BaseException = death(trouble.member, trouble.tail, is_new=is_new)
        return Incident(error=error, when=trouble.when, rank=trouble.member.rank)
    text = f"{turn.what} took longer than {turn.timeout:g} s; {label(trouble.late)} had not come to its end"
    return Incident(error=DeadlineError(text), when=trouble.when)


def death(member: Member, tail: str, *, is_new: bool = False) -> PoolError | RankDiedError:
    """A rank's process has ended; if it `is_new`, while it was being started."""
    rank, exitcode = member.rank, member.handle.exitcode
    said = f" Its last output was:\n{tail.rstrip()}" if tail.strip() else ""
    advice = f". Its variables are lost; those of the other ranks are kept. To replace it: %distributed restart {rank}."
    if is_new:
        advice = " while it was being started."
    if member.why_lost:
        return PoolError(f"rank {rank} is lost: {member.why_lost}{advice}{said}")
    if exitcode is None:
        return PoolError(f"rank {rank} is lost: the process it was forked from has ended{advice}{said}")
    how = f"was ended by {signal_name(-exitcode)}" if exitcode < 0 else f"ended with exit code {exitcode}"
    return RankDiedError(f"rank {rank} {how}{advice}{said}", rank=rank, exitcode=exitcode, output=tail)


def came_apart(turn: Turn, members: Mapping[int, Member], backend: str) -> bool:
    """Is the process group of no use after a cell?

    Args:
        turn: the cell, ended.
        members: all ranks.
        backend: what carries collectives.
    """
    if len(members) == 1:
        return False
    if turn.troubles:
        return turn.was_cut or out_of_step(members)
    # A collective of nccl returns before others have joined it: a cell may end well in which they never do.
    return backend_named(backend).returns_early and len(turn.members) == len(members) and out_of_step(members)


def out_of_step(members: Mapping[int, Member]) -> bool:
    """Has a rank been in more collectives of a process group than another?"""
    seen: dict[str, int] = {}
    for member in members.values():
        for group, steps in member.steps.items():
            if seen.setdefault(group, steps) != steps:
                return True
    return False


def tell_failure(turn: Turn, say: Callable[[str], None]) -> None:
    """In the crew's thread: name what went wrong, without rebuilding users' exceptions here."""
    for trouble in turn.troubles[:1]:
        rank = trouble.member.rank if trouble.member is not None else None
        if trouble.failure is not None:
            report = trouble.failure[0].report
            say(f"rank {rank} failed: {report.type_name}: {report.message}; .result() raises it here")
        elif trouble.member is not None:
            say(f"{str(death(trouble.member, '')).split('. ', maxsplit=1)[0]}; .result() raises it here")
        else:
            say(f"the cell was ended: {trouble.kind}")
