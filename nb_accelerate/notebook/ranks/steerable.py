"""Steer training that runs: save a checkpoint now, end after this epoch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors import CheckpointError, ConfigError, DeadlineError, LaunchError
from nb_accelerate.notebook.display.panel import Action

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.progress_page import PageReader, Sample
    from nb_accelerate.notebook.ranks.request import Request

_INTERVAL = 0.02  # seconds between two looks at a page: memory that is shared tells no events

_NO_LOOP = (
    "This training cannot be steered: it has no loop over epochs that obeys. Write it as "
    "`for epoch in accelerator.epochs(3)`, or with accelerator.resumable(loader, epochs=3)."
)


class Steerable(ABC):
    """Training that runs in the background. It obeys in loops of `Accelerator.epochs` and `Accelerator.resumable`."""

    @abstractmethod
    def _steered(self) -> Request | None:
        """Return the request whose ranks are steered; None before it began, and between two attempts."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds, and return whether it has come."""

    def save_checkpoint(self, *, timeout: float = 600.0) -> Path:
        """Save the next numbered checkpoint of the project now, on all ranks, and return its folder.

        In a loop over `Accelerator.resumable` that is after one of the next batches, in one over `Accelerator.epochs`
        at the end of the epoch.

        Args:
            timeout: seconds until it is saved.

        Raises:
            CheckpointError: it could not be saved. Training goes on.
            ConfigError: training has no such loop, or the project no folder.
            LaunchError: training has ended before.
            DeadlineError: it was not saved in time.
        """
        deadline = time.monotonic() + timeout
        request, page = self._page_of_loop(deadline)
        number = time.monotonic_ns()  # unique
        page.save(number)
        while (sample := _look(page)) is None or sample.answer is None or sample.answer[0] != number:
            if sample is None or not sample.obeys or request.done.wait(_INTERVAL):
                raise LaunchError("Training ended before it came to save: nothing was saved.")
            if time.monotonic() > deadline:
                raise DeadlineError(f"Training has not come to save within {timeout:g} s. It saves when it does.")
        _, has_failed, said = sample.answer
        if has_failed:
            raise CheckpointError(said)
        return Path(said)

    def stop_after_epoch(self, *, timeout: float = 60.0) -> None:
        """Have training end when the current epoch does. `Accelerator.resumable` then saves its last checkpoint.

        Args:
            timeout: seconds until the loop over epochs begins, if it has not.

        Raises:
            ConfigError: training has no loop that obeys.
            LaunchError: training has ended.
            DeadlineError: the loop has not begun in time.
        """
        self._page_of_loop(time.monotonic() + timeout)[1].stop()

    def _page_of_loop(self, deadline: float) -> tuple[Request, PageReader]:
        """Wait for a loop that obeys, and return its request and the page of a rank."""
        while not self.wait(_INTERVAL):
            request = self._steered()
            if request is not None and request.ranks:
                page = request.ranks[0].handle.page
                sample = _look(page)
                if sample is not None and sample.obeys:
                    return request, page
                if sample is not None and sample.steps:
                    raise ConfigError(_NO_LOOP)
            if time.monotonic() > deadline:
                raise DeadlineError("The ranks have begun no loop over epochs in time, and nothing was asked of them.")
        raise LaunchError("Training has ended already. Start it again, and steer it while it runs.")


def steering_actions(request: Request, say: Callable[[str], object]) -> tuple[Action, ...]:
    """Return the buttons of a panel that steer the ranks of a request. The ranks say what they have done."""
    page = request.ranks[0].handle.page

    def obeys() -> int:
        sample = _look(page)
        return 0 if sample is None or request.done.is_set() else sample.obeys

    def ask(write: Callable[[], object], least: int) -> None:
        if obeys() < least:
            say("training has no loop over epochs any more that could obey")
        else:
            write()

    def stop() -> None:
        page.stop()
        say("training ends after this epoch")

    return (
        Action(
            "Save now",
            "save a checkpoint after a batch of resumable, or at the end of the epoch",
            lambda: ask(lambda: page.save(time.monotonic_ns()), 2),
            lambda: obeys() > 1,
        ),
        Action("Stop after this epoch", "end training when this epoch does", lambda: ask(stop, 1), lambda: obeys() > 0),
    )


def _look(page: PageReader) -> Sample | None:
    """Return what a rank says; None if its page was closed, because it has ended."""
    try:
        return page.read()
    except ValueError:
        return None
