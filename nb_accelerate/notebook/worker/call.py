"""Run a user's function in a rank, and turn what happens into an answer."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.progress_page import here
from nb_accelerate.base.seam import call_interrupted, call_returned
from nb_accelerate.errors.out_of_memory import says_out_of_memory
from nb_accelerate.notebook.diagnostics.report import has_plain_text, readable, report_exception, text_of
from nb_accelerate.notebook.protocol.messages import Failure, Result
from nb_accelerate.notebook.protocol.shipping import RETURNABLE, closed_on_error, pack, unpack
from nb_accelerate.notebook.worker.trained_models import trained_models

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.worker.interrupt import InterruptGate

logger = logging.getLogger("nb_accelerate")

# In torch's own words, from torch/cuda/__init__.py and its C++ code.
_NO_CUDA = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")
_NO_CUDA_ADVICE = "These ranks have no CUDA device. Write accelerator.device where the code names one."

# In texts of exceptions that only report that another rank went away: torch has no type for that.
_PEER_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


def answer(
    load: Callable[[], tuple[Any, Any, Any]], gate: InterruptGate, fds: tuple[int, ...] = ()
) -> tuple[Result | Failure, Packed | None]:
    """Run the function that ``load`` returns with its arguments. It takes over ``fds``."""
    page = here()
    page.begin_request()
    dropped: tuple[str, ...] = ()
    try:
        with gate:
            with closed_on_error(fds):
                gate.check()  # before what came with it: an interrupt may have taken back a part
            function, args, kwargs = load()
            trained_models.begin()
            try:
                value = function(*args, **kwargs)
            except SystemExit as error:
                if not exits_well(error):
                    raise
                value = None
            trained_models.end()
            call_returned.fire()
            if Environment().resume and not page.looked_for_state:
                logger.warning(
                    "resume=True: nothing was resumed. The function has not gone over accelerator.resumable(loader, "
                    "epochs), which goes on from the newest checkpoint, nor called accelerator.load_state."
                )
            dropped = tuple(trained_models.dropped(function, args, kwargs, value))
    except BaseException as error:  # KeyboardInterrupt too: what it means is the kernel's to judge
        if not exits_well(error):
            if isinstance(error, KeyboardInterrupt):
                call_interrupted.fire()
            return fail(error)
        value = None
    page.end_request()
    try:
        packed = pack(value, name="the returned value", advice=f"Send back {RETURNABLE}.")
    except BaseException as error:  # users' code takes part: it may also exit
        return fail(error, returned=True)
    return Result(parcel=packed.parcel, dropped=dropped), packed


def exits_well(error: BaseException) -> bool:
    """Return whether an exception is ``sys.exit()`` with an exit code that means success."""
    return isinstance(error, SystemExit) and (error.code is None or error.code == 0)


def fail(error: BaseException, *, result_of_call: bool = True, returned: bool = False) -> tuple[Failure, Packed | None]:
    """Return the `Failure` of an exception, and the packed exception if it can be pickled. Never raises."""
    when = time.monotonic()
    report = report_exception(error)
    if says_out_of_memory(report.type_name, report.message):
        with contextlib.suppress(Exception):  # what was measured before has to do then
            here().measure()
    if report.type_name in ("AssertionError", "RuntimeError") and any(words in report.message for words in _NO_CUDA):
        report = replace(
            report, notes=(*report.notes, _NO_CUDA_ADVICE), last_lines=(*report.last_lines, f"{_NO_CUDA_ADVICE}\n")
        )
    packed = _pack_exception(error)
    failure = Failure(
        report=report,
        parcel=packed.parcel if packed else None,
        when=when,
        peer_lost=isinstance(error, RuntimeError) and any(text in report.message.lower() for text in _PEER_LOST),
        result_of_call=result_of_call,
        returned=returned,
    )
    return failure, packed


def _pack_exception(error: BaseException) -> Packed | None:
    """Pack an exception so that unpickling it in the kernel will work; return None if there is no way."""
    text = text_of(error)
    if not has_plain_text(error):
        shortened = tuple(readable(arg) if type(arg) is str else arg for arg in error.args)
        packed = _pack_as((_rebuild_exception, (type(error), shortened, {})), text)
        return packed or _pack_as((_rebuild_exception, (type(error), (text,), {})), text)
    packed = _pack_as((_same, (error,)), text)
    return packed or _pack_as((_rebuild_exception, (type(error), error.args, _state(error))), text)


def _pack_as(candidate: tuple[Any, ...], text: str) -> Packed | None:
    """Pack a function and its arguments that make an exception again; return None unless it then has the same text."""
    packed: Packed | None = None
    try:
        packed = pack(candidate)
        # Many exceptions pickle and cannot be unpickled: their __init__ wants other arguments than .args.
        rebuild, args = unpack(packed.parcel, tuple(map(os.dup, packed.fds)))
        copy = rebuild(*args)
        copy.__traceback__ = None  # the kernel sets it; that of a frozen dataclass, say, cannot be set
        if isinstance(copy, BaseException) and has_plain_text(copy) and str(copy) == text:
            return packed
    except BaseException:  # noqa: S110 - users' code, which may also exit; the next candidate, or none, is the answer
        pass
    if packed is not None:
        packed.close()
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
    for key, value in list(vars(error).items()):
        try:
            with pack(value):
                kept[key] = value
        except BaseException:  # noqa: S112 - a lock or a socket on an exception; its text is what matters
            continue
    return kept
