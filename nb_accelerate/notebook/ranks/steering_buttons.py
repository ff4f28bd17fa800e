"""The buttons of a panel that steer training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.progress_page.commands import NO_EPOCH_LOOP, NO_FOLDER, NO_LOOP
from nb_accelerate.errors import LaunchError, NbAccelerateError
from nb_accelerate.notebook.display.panel import PAUSE, RESUME, Action
from nb_accelerate.notebook.ranks.steerable import Steerable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.base.progress_page import Sample
    from nb_accelerate.notebook.ranks.request import Request

_END_TIMEOUT = 1.0
"""Seconds for the threads of buttons to notice that training has ended."""


def steering_actions(
    request: Request, world_size: int, *, note: Callable[[str], object], say: Callable[[str], object]
) -> tuple[Action, ...]:
    """Return buttons that steer the ranks of a request; none where they could not.

    A button returns at once, with the thread that gives its command. One that no rank could obey yet, or that any rank
    could not obey, says why. Commands that had no effect are named when the request ends.

    Args:
        note: shows a line that says what was done. Any thread.
        say: shows one that says why nothing was done. Any thread.
    """
    if len(request.ranks) != world_size:
        return ()
    buttons = _Buttons(request, world_size, note, say)
    request.callbacks.append(buttons.tell_end)
    return (
        buttons.action(PAUSE, "pause training before its next batch, or go on", buttons.pause_or_resume, _why_no_pause),
        buttons.action("Save", "save a checkpoint now", buttons.save, _why_no_save),
        buttons.action("Stop after epoch", "end training when this epoch does", buttons.stop_after_epoch, _why_no_stop),
    )


class _Buttons(Steerable):
    """Gives the commands of buttons, and remembers those that had no effect."""

    _at_end = ""  # a cell has no object to call .result() on

    def __init__(
        self, request: Request, world_size: int, note: Callable[[str], object], say: Callable[[str], object]
    ) -> None:
        self._request = request
        self._world_size = world_size
        self._note, self._say = note, say
        self._threads: list[HelperThread] = []
        self._without_effect: list[str] = []

    @override
    def _steered(self) -> tuple[Request | None, int]:
        return self._request, self._world_size

    @override
    def wait(self, timeout: float | None = None) -> bool:
        return self._request.done.wait(timeout)

    @override
    def _show_here(self, text: str) -> None:
        self._note(text)

    def pause_or_resume(self) -> None:
        """Pause training, or have it go on if it is paused."""
        (self.resume if self.is_paused else self.pause)()

    def save(self) -> None:
        """Save a checkpoint, and say where."""
        self._note(f"saved {self.save_checkpoint()}")

    def action(
        self, title: str, hint: str, give: Callable[[], None], why_not: Callable[[Sequence[Sample]], str]
    ) -> Action:
        """Return a button that gives a command in a thread of its own."""

        def start() -> HelperThread:
            name = RESUME if title == PAUSE and self.is_paused else title
            thread = HelperThread(self._run, name.lower(), give, name="steering", on_failure=self._failed)
            self._threads.append(thread)
            thread.start()
            return thread

        return Action(title, hint, start, lambda: why_not(_busy(self._request)))

    def tell_end(self) -> None:
        """Name the commands that had no effect, when all ranks have answered or ended. In the thread of the loop."""
        until = time.monotonic() + _END_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._without_effect:
            *others, last = dict.fromkeys(self._without_effect)
            names = f"{', '.join(others)} and {last}" if others else last
            has_begun = any(sample.takes_commands for sample in _samples(self._request))
            why = "training ended before its next batch" if has_begun else "no loop over a prepared loader has begun"
            self._say(f"{names} had no effect: {why}")

    def _run(self, name: str, give: Callable[[], None]) -> None:
        try:
            if _why_no_pause(_busy(self._request)):
                self._note(f"{name}: no loop over a prepared loader has begun yet; the command waits for one")
            give()
        except LaunchError as error:
            if self._request.done.is_set():
                self._say(str(error))
            else:  # it is about to end: `tell_end` says this of all commands in one line
                self._without_effect.append(name)
        except NbAccelerateError as error:
            self._say(str(error))

    def _failed(self, _: str, error: BaseException) -> None:
        self._say(f"the command could not be given ({type(error).__name__}: {error})")


def _samples(request: Request) -> list[Sample]:
    try:
        return [rank.handle.page.read() for rank in request.ranks]
    except ValueError:  # they were closed: the ranks have just ended
        return []


def _busy(request: Request) -> list[Sample]:
    """Return the samples of ranks whose page does not show a call or cell that is over, maybe the one before."""
    return [sample for sample in _samples(request) if sample.phase is not Phase.ENDED]


def _why_no_pause(busy: Sequence[Sample]) -> str:
    return NO_LOOP if busy and not any(sample.takes_commands for sample in busy) else ""


def _why_no_save(busy: Sequence[Sample]) -> str:
    return _why_no_pause(busy) or (NO_FOLDER if any(sample.has_folder is False for sample in busy) else "")


def _why_no_stop(busy: Sequence[Sample]) -> str:
    # Before the first step, the loop over epochs may be still to come.
    lacks_loop = any(sample.has_epoch_loop is False and sample.steps for sample in busy)
    return _why_no_pause(busy) or (NO_EPOCH_LOOP if lacks_loop else "")
