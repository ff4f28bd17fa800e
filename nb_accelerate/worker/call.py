"""Running a user's function in a rank, and turning what happens into an answer."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from nb_accelerate.board import here
from nb_accelerate.diagnostics.report import report_exception
from nb_accelerate.protocol.messages import Failure, Result
from nb_accelerate.protocol.shipping import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.shipping import Packed
    from nb_accelerate.worker.interrupt import InterruptGate


def answer(load: Callable[[], tuple[Any, Any, Any]], gate: InterruptGate) -> tuple[Result | Failure, Packed | None]:
    """Run a function to its end.

    Args:
        load: gives the function, its positional and its keyword arguments; may raise whatever unpickling raises.
        gate: opened while users' code runs.

    Returns:
        The message, and the parcel that has to travel with it.
    """
    board = here()
    board.begin_turn()
    try:
        with gate:
            function, args, kwargs = load()
            gate.check()
            value = function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            return fail(error)
        value = None
    except BaseException as error:  # KeyboardInterrupt too: what it means is the kernel's to judge
        return fail(error)
    board.end_turn()
    try:
        packed = pack(value, name="the returned value")
    except Exception as error:
        return fail(error, returned=True)
    return Result(parcel=packed.parcel), packed


def fail(error: BaseException, *, result_of_call: bool = True, returned: bool = False) -> tuple[Failure, Packed | None]:
    """The message that tells of `error`, and the exception itself if it can travel."""
    when = time.monotonic()
    packed = _pack_exception(error)
    failure = Failure(
        report=report_exception(error),
        parcel=packed.parcel if packed else None,
        when=when,
        peer_lost=_says_peer_lost(error),
        result_of_call=result_of_call,
        returned=returned,
    )
    return failure, packed


def _pack_exception(error: BaseException) -> Packed | None:
    """The exception, so that unpickling it in the kernel will work; None if there is no way."""
    whole: tuple[Any, ...] = (_same, (error,))
    parts = (_rebuild_exception, (type(error), error.args, _state(error)))
    for candidate in (whole, parts):
        try:
            packed = pack(candidate)
            # Many exceptions pickle and cannot be unpickled: their __init__ wants other arguments than .args.
            rebuild, args = unpack(packed.parcel, tuple(map(os.dup, packed.fds)))
            if str(rebuild(*args)) == str(error):
                return packed
            packed.close()
        except Exception:  # noqa: S112 - users' code; the next candidate, or none, is the answer
            continue
    return None


def _same(error: BaseException) -> BaseException:
    return error


def _rebuild_exception(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _state(error: BaseException) -> dict[str, Any]:
    kept = {}
    for key, value in vars(error).items():
        try:
            with pack(value):
                kept[key] = value
        except Exception:  # noqa: S112 - a lock or a socket on an exception; its text is what matters
            continue
    return kept


_PEER_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


def _says_peer_lost(error: BaseException) -> bool:
    """Does it only report that another rank went away? Torch has no type for that, just words."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _PEER_LOST)
