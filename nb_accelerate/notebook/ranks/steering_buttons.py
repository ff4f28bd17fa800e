"""The buttons of a panel that steer training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.errors import NbAccelerateError
from nb_accelerate.notebook.display.panel import PAUSE, Action
from nb_accelerate.notebook.ranks.steerable import Steerable

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.progress_page import Sample
    from nb_accelerate.notebook.ranks.request import Request

_END_TIMEOUT = 1.0
"""Seconds for the threads of buttons to notice that training has ended."""


def steering_actions(
    request: Request, world_size: int, *, note: Callable[[str], object], say: Callable[[str], object]
) -> tuple[Action, ...]:
    """Return buttons that steer the ranks of a request; none where they could not.

    Args:
        note: shows a line that says what was done. Any thread.
    """
    if len(request.ranks) != world_size:
        return ()
    buttons = _Buttons(request, world_size, note, say)
    request.callbacks.append(buttons.join)
    return (
        Action(
            PAUSE,
            "pause training before its next batch, or go on",
            lambda: buttons.start(buttons.pause_or_resume),
            buttons.can_steer,
        ),
        Action("Save", "save a checkpoint now", lambda: buttons.start(buttons.save), buttons.can_save),
        Action(
            "Stop after epoch",
            "end training when this epoch does",
            lambda: buttons.start(buttons.stop_after_epoch),
            buttons.can_stop,
        ),
    )


class _Buttons(Steerable):
    """Gives the commands of buttons, each in a thread of its own."""

    def __init__(
        self, request: Request, world_size: int, note: Callable[[str], object], say: Callable[[str], object]
    ) -> None:
        self._request = request
        self._world_size = world_size
        self._note, self._say = note, say
        self._threads: list[HelperThread] = []

    @override
    def _steered(self) -> tuple[Request | None, int]:
        return self._request, self._world_size

    @override
    def wait(self, timeout: float | None = None) -> bool:
        return self._request.done.wait(timeout)

    @override
    def _show_here(self, text: str) -> None:
        """Show nothing: the panel itself shows what is paused, and its lines of information stay there."""

    def pause_or_resume(self) -> None:
        """Pause training, or have it go on if it is paused."""
        (self.resume if self.is_paused else self.pause)()

    @override
    def stop_after_epoch(self, *, timeout: float = 60.0) -> None:
        super().stop_after_epoch(timeout=timeout)
        self._note("asked to end after this epoch")

    def save(self) -> None:
        """Save a checkpoint, and say where."""
        self._note(f"saved {self.save_checkpoint()}")

    def start(self, give: Callable[[], None]) -> HelperThread:
        """Give a command in a thread, which is returned."""
        thread = HelperThread(self._run, give, name="steering", on_failure=self._failed)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self) -> None:
        """Have commands that training did not come to say so before its request is done. In the thread of the loop."""
        until = time.monotonic() + _END_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def can_steer(self) -> bool:
        """Return whether a loop over a prepared loader has begun."""
        return any(sample.takes_commands for sample in self._busy())

    def can_save(self) -> bool:
        """Return whether numbered checkpoints have a folder, too."""
        return self.can_steer() and all(sample.has_folder is not False for sample in self._busy())

    def can_stop(self) -> bool:
        """Return whether a loop over epochs can be ended, too. Before the first step it may be still to come."""
        lacks_loop = any(sample.has_epoch_loop is False and sample.steps for sample in self._busy())
        return self.can_steer() and not lacks_loop

    def _busy(self) -> list[Sample]:
        """Return the samples of ranks whose page does not show a call or cell that is over, maybe the one before."""
        try:
            samples = [rank.handle.page.read() for rank in self._request.ranks]
        except ValueError:  # they were closed: the ranks have just ended
            return []
        return [sample for sample in samples if sample.phase is not Phase.ENDED]

    def _run(self, give: Callable[[], None]) -> None:
        try:
            give()
        except NbAccelerateError as error:
            self._say(str(error))

    def _failed(self, _: str, error: BaseException) -> None:
        self._say(f"the command could not be given ({type(error).__name__}: {error})")
