"""What the ranks returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.protocol.shipping import unpack

if TYPE_CHECKING:
    from nb_accelerate.protocol.messages import Result

    Answers = dict[int, tuple[Result, tuple[int, ...]]]


class Values(list[Any]):
    """A list in rank order. As the last expression of a cell it shows nothing if every rank returned None."""

    def _ipython_display_(self) -> None:
        if all(value is None for value in self):
            return
        # Not a method that hides itself by raising: IPython would go on and look for a plain repr, which is there.
        from IPython.display import display

        display(list(self))  # type: ignore[no-untyped-call]


def unpack_values(answers: Answers) -> Values:
    """The values, in rank order. Raises whatever unpickling one of them raises."""
    return Values(unpack(result.parcel, fds) for _, (result, fds) in sorted(answers.items()))


def keep_values(error: BaseException, answers: Answers) -> None:
    """Put what the other ranks returned on the exception of a launch, as ``error.results``, by rank."""
    results = {}
    for rank, (result, fds) in answers.items():
        try:
            results[rank] = unpack(result.parcel, fds)
        except Exception:  # noqa: S112 - the exception that is being raised says more than this one
            continue
    try:
        error.results = results  # type: ignore[attr-defined]
    except AttributeError:  # a type with slots
        return
