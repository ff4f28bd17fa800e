"""Pickle what a launch calls, and unpickle what the ranks have returned."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ShippingError
from nb_accelerate.errors.traceback_lines import short_lines, show_instead
from nb_accelerate.notebook.protocol.main_module import Globals
from nb_accelerate.notebook.protocol.messages import Result
from nb_accelerate.notebook.protocol.shipping import pack, unpack
from nb_accelerate.notebook.ranks.failing.errors import add_note

if TYPE_CHECKING:
    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.ranks.request import Request


class Values(list[Any]):
    """A list of values in rank order. A cell that ends in it shows nothing if every rank has returned None."""

    def _ipython_display_(self) -> None:
        if all(value is None for value in self):
            return
        # A `_repr_mimebundle_` that raises would not do: IPython then shows the repr of the list.
        from IPython.display import display

        display(list(self))  # type: ignore[no-untyped-call]


_ADVICE = "Create it inside the function, or pass what it is made from."


def pack_call(options: LaunchOptions, name: str, *, can_fork: bool) -> Packed:
    """Pickle the function of a launch with its arguments. The caller closes what is returned."""
    call = (options.function, options.args, dict(options.kwargs))
    # In a process that multiprocessing has spawned, the user's script is a module of this name, which only such
    # processes have.
    script = sys.modules.get("__mp_main__")
    by_value = options.by_value if script is None else (*options.by_value, script)
    parts = {name: options.function, "args": options.args, "kwargs": options.kwargs}
    try:
        return pack(
            call,
            name=f"the call of {name}",
            parts=parts,
            advice=_ADVICE,
            by_value=by_value,
            globals_there=Globals.OF_RECEIVER_AND_SENT,
            refuses_graphs=True,
        )
    except ShippingError as error:
        if not can_fork or error.is_final:
            raise
        text = f"{error} Or write start_method='fork': ranks are then born with it in memory."
        raise ShippingError(text, path=error.path) from error.__cause__


def unpack_values(request: Request) -> Values:
    """Unpack what every rank returned. An error of unpickling has the other values as ``error.results``."""
    results, errors = _unpack_each(request)
    if errors:
        _attach(errors[0], results)
        raise errors[0]
    return Values(results.values())


# Names of models that `note_of_dropped` has returned a sentence about in this process: it does so once.
_told: set[str] = set()


def note_of_dropped(request: Request, function: str) -> str:
    """Return what is to be said of models that were trained on ranks, and that nobody gets back; "" if nothing is."""
    results = [answer for answer, _ in request.answers.values() if isinstance(answer, Result)]
    names = {name: None for result in results for name in result.dropped if name not in _told}
    if not names or len(results) < len(request.ranks):
        return ""
    _told.update(names)
    first, *others = names
    ending = function if function.isidentifier() else "the function"
    which = " and ".join(f"`{name}`" for name in names)
    were, own = ("were", "ones are") if others else ("was", "is")
    return (
        f"{which} {were} trained on the ranks; the notebook's own {own} unchanged. To take the weights over, end "
        f"{ending} with `return accelerator.get_state_dict({first})`, and write "
        f"`{first}.load_state_dict(notebook_launcher(...)[0])`"
    )


def keep_values(error: BaseException, request: Request) -> None:
    """Put what other ranks returned on the exception of a launch, as ``error.results``, by rank."""
    _attach(error, _unpack_each(request)[0])


def _unpack_each(request: Request) -> tuple[dict[int, Any], list[Exception]]:
    """Unpack each value once, since that closes its descriptors. Return them by rank, and the errors of others."""
    results: dict[int, Any] = {}
    errors: list[Exception] = []
    for rank, (answer, _) in sorted(request.answers.items()):
        if isinstance(answer, Result):
            try:
                results[rank] = unpack(answer.parcel, request.take(rank)[1])
            except Exception as error:
                add_note(
                    error,
                    f"The value that rank {rank} returned was pickled there, and cannot be unpickled here. Return "
                    "numbers or tensors instead; of a model, accelerator.get_state_dict(model).",
                )
                show_instead(error, functools.partial(short_lines, error))
                errors.append(error)
    return results, errors


def _attach(error: BaseException, results: dict[int, Any]) -> None:
    with contextlib.suppress(AttributeError):  # a type with slots
        error.results = results  # type: ignore[attr-defined]
