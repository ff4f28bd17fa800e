"""The end that a panel shows is that of the launch, also if something goes wrong when all ranks have answered."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.deadlines import observing
from tqdm import tqdm

from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.request import Awaits


def _rank_of_the_value(rank: int) -> int:
    if "RANK" not in os.environ:
        raise LookupError(f"the value of rank {rank} is for ranks only")
    return rank


class _ForRanksOnly:
    def __reduce__(self) -> tuple[Any, ...]:
        return _rank_of_the_value, (int(os.environ["RANK"]),)


def _with_a_bar(value: Callable[[], Any]) -> Any:
    """Return a value; a launch that has shown a bar shows the end of its panel, however short it was."""
    for _ in tqdm(range(3), desc="rows"):
        pass
    return value()


def last_line_of_panel(value: Callable[[], Any], error: type[BaseException]) -> tuple[str, dict[int, Any]]:
    """Launch two ranks that return values; return the end of the panel, and the values on the exception."""
    with contextlib.redirect_stderr(io.StringIO()) as shown, pytest.raises(error) as caught:
        notebook_launcher(_with_a_bar, (value,), 2, progress="text", devices="cpu")
    return shown.getvalue().splitlines()[-1], caught.value.results  # type: ignore[attr-defined]


def test_a_value_that_cannot_be_unpickled_has_failed() -> None:
    end, results = last_line_of_panel(lambda: _ForRanksOnly() if os.environ["RANK"] == "1" else "kept", LookupError)
    assert end.startswith("_with_a_bar: failed in ")
    assert results == {0: "kept"}


def test_an_interrupt_while_ranks_leave_is_an_interrupt() -> None:
    def interrupt_once(loop: RankLoop) -> None:
        if not interrupts and any(request.awaits is Awaits.END for request in loop.requests):
            interrupts.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    def leave_slowly() -> str:
        import atexit
        import threading

        atexit.register(threading.Event().wait)
        return "kept"

    interrupts: list[int] = []
    with observing(interrupt_once):
        end, results = last_line_of_panel(leave_slowly, KeyboardInterrupt)
    assert end.startswith("_with_a_bar: interrupted in ")
    assert results == {0: "kept", 1: "kept"}


def test_a_panel_is_kept_up_to_date_while_ranks_leave() -> None:
    panels = set()

    def note_panel(loop: RankLoop) -> None:
        panels.update((request.awaits, request.panel is not None) for request in loop.requests)

    with observing(note_panel), contextlib.redirect_stderr(io.StringIO()):
        assert notebook_launcher(_with_a_bar, (lambda: 1,), 2, progress="text", devices="cpu") == [1, 1]
    assert (Awaits.END, True) in panels
    assert (Awaits.END, False) not in panels
