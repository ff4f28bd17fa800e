"""What the ranks returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.protocol.messages import Result
from nb_accelerate.protocol.shipping import unpack

if TYPE_CHECKING:
    from nb_accelerate.ranks.request import Request


class Values(list[Any]):
    """A list in rank order. As the last expression of a cell it shows nothing if every rank returned None."""

    def _ipython_display_(self) -> None:
        if all(value is None for value in self):
            return
        # Not a method that hides itself by raising: IPython would go on and look for a plain repr, which is there.
        from IPython.display import display

        display(list(self))  # type: ignore[no-untyped-call]


def unpack_values(request: Request) -> Values:
    """Unpack what every rank answered, in rank order. Raises whatever unpickling one of the values raises."""
    return Values(
        unpack(answer.parcel, request.take(rank)[1])
        for rank, (answer, _) in sorted(request.answers.items())
        if isinstance(answer, Result)
    )


def keep_values(error: BaseException, request: Request) -> None:
    """Put what other ranks returned on the exception of a launch, as ``error.results``, by rank."""
    results = {}
    for rank, (answer, _) in request.answers.items():
        if not isinstance(answer, Result):
            continue
        try:
            results[rank] = unpack(answer.parcel, request.take(rank)[1])
        except Exception:  # noqa: S112 - the exception that is being raised says more than this one
            continue
    try:
        error.results = results  # type: ignore[attr-defined]
    except AttributeError:  # a type with slots
        return
