"""Steer training that runs: give the ranks of a request commands that all obey after the same optimizer step.

::

    caller's thread                                        ranks, see `training.accelerator.steering`
    the greatest step of all, and some to come  -> page -> agree, each at its next batch
    all have agreed -> it holds                 -> page -> obey after that step
    one has gone past it, or is too late        -> page -> go on; once more, with more steps to come
    answers                                     <- page <-

The loop over ranks takes no part: pages are shared memory.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.progress_page.commands import (
    NO_EPOCH_LOOP,
    NO_FOLDER,
    NO_LOOP,
    Command,
    CommandKind,
    check_text,
)
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.errors import CheckpointError, ConfigError, DeadlineError, LaunchError, NbAccelerateError
from nb_accelerate.notebook.display.panel import PAUSE, RESUME, Action
from nb_accelerate.notebook.display.words import capitalized
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.ranks.output.sinks import sink_here

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from nb_accelerate.base.progress_page import Sample
    from nb_accelerate.base.progress_page.commands import CommandState, CommandWriter
    from nb_accelerate.notebook.ranks.request import Request

_LOOK = 0.002
"""Seconds between two looks at what the ranks say."""

_START_LOOK = 0.02
"""Seconds between two looks whether ranks have been started."""

_AHEAD = 0.05
"""Seconds of steps between the newest one and that after which a command is obeyed: ranks agree meanwhile, and none has
to wait for another."""

_FIRST_HOLD, _LONGEST_HOLD = 0.5, 20.0
"""Seconds that a rank which has come to the step may wait for the others to agree; doubled with each attempt."""

_END = 1.0
"""Seconds for the threads of buttons to notice that training has ended."""

_NAMES = {
    CommandKind.PAUSE: "pause",
    CommandKind.RESUME: "resume",
    CommandKind.SAVE: "save",
    CommandKind.LEARNING_RATE: "set learning rate",
    CommandKind.STOP: "stop after epoch",
}
"""What commands are called in messages: as on their buttons."""

_numbers = itertools.count(1)  # of all commands of this process


class Steerable(ABC):
    """Steer training that runs in the background: all ranks obey after the same optimizer step.

    The training loop is one over a loader, or with an optimizer, that an `Accelerator` has prepared. Methods return
    when all ranks have obeyed, and say so. From the notebook's machine only; not with ranks on several.
    """

    _at_end: ClassVar[str] = " Call .result() for its values, or for the error if it has failed."
    """What to do when training has ended, for messages; begins with a space."""

    @abstractmethod
    def _steered(self) -> tuple[Request | None, int]:
        """Return the request whose ranks are steered, and how many ranks train together.

        The request is None before it began, and between two attempts.
        """

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds, and return whether it has come."""

    def pause(self, *, timeout: float = 60.0) -> None:
        """Have training wait before its next batch, until `resume`. Other commands are obeyed meanwhile.

        Args:
            timeout: seconds for all ranks to come to the same step.

        Raises:
            DeadlineError: they did not come; the command was withdrawn.
            LaunchError: training does not run.
            ConfigError: it cannot be steered.
        """
        self._give(Command(kind=CommandKind.PAUSE), timeout)
        self._show_here("training is paused")

    def resume(self, *, timeout: float = 60.0) -> None:
        """End what `pause` began. See there."""
        self._give(Command(kind=CommandKind.RESUME), timeout)
        self._show_here("training goes on")

    def save_checkpoint(self, folder: str | os.PathLike[str] | None = None, *, timeout: float = 600.0) -> Path:
        """Save a checkpoint now, as `Accelerator.save_state` does, and return its folder.

        Args:
            folder: where; by default the next numbered folder of the project.
            timeout: seconds for all ranks to come to the same step and to save.

        Raises:
            CheckpointError: it could not be saved. Training goes on.
            DeadlineError: as for `pause`, and LaunchError and ConfigError.
        """
        text = "" if folder is None else str(Path(folder).expanduser().absolute())
        try:
            check_text(text)
        except ValueError as error:
            raise ConfigError(f"folder={str(folder)!r} is too long: {error}.") from None
        return Path(self._give(Command(kind=CommandKind.SAVE, text=text), timeout)[0])

    def set_learning_rate(self, rate: float, *, timeout: float = 60.0) -> None:
        """Change the learning rate.

        It is that of the first parameter group; those of others change by the same factor. Schedules go on from there,
        but not `OneCycleLR`, `CyclicLR` and `SequentialLR`, which set their own rates again.

        Args:
            rate: the new one, above 0.
            timeout: as for `pause`.

        Raises:
            ConfigError: it is not a learning rate; or the one before is 0; and as for `pause`.
            DeadlineError: as for `pause`, and LaunchError.
        """
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise ConfigError(f"rate={rate!r} is not a learning rate. Write a number above 0.")
        before = float(self._give(Command(kind=CommandKind.LEARNING_RATE, value=float(rate)), timeout)[0])
        self._show_here(f"the learning rate is {rate:g}; it was {before:g}")

    def stop_after_epoch(self, *, timeout: float = 60.0) -> None:
        """Have training end when the current epoch does.

        The loop over epochs is `Accelerator.epochs` or `Accelerator.resumable`, which then saves its last checkpoint.

        Args:
            timeout: as for `pause`.

        Raises:
            ConfigError: it is another loop; and as for `pause`.
            DeadlineError: as for `pause`, and LaunchError.
        """
        self._give(Command(kind=CommandKind.STOP), timeout)
        self._show_here("training ends after this epoch")

    @property
    def is_paused(self) -> bool:
        """Whether training waits for `resume`."""
        request, _ = self._steered()
        if request is None or request.done.is_set():
            return False
        try:
            return all(rank.handle.page.read().paused for rank in request.ranks)
        except ValueError:  # it was closed: the ranks have just ended
            return False

    def _show_here(self, text: str) -> None:
        """Show a line where the method was called."""
        sink = sink_here()
        sink.write(sink.own_stream, f"{text}\n")
        sink.close()

    def _give(self, command: Command, timeout: float) -> list[str]:
        deadline = time.monotonic() + timeout
        while (steered := self._steered())[0] is None:
            if time.monotonic() > deadline:
                raise DeadlineError(f"{_named(command)}: the ranks have not been started within {timeout:g} s.")
            if self.wait(_START_LOOK) and self._steered()[0] is None:
                raise LaunchError(f"{_named(command)}: the launch has ended before its ranks were started.")
        request, world_size = steered
        assert request is not None
        if request.done.is_set():
            raise LaunchError(
                f"{_named(command)}: {request.wording.what} has ended already, so there is no training to steer."
                f"{self._at_end} To steer, start it again and give the command while it runs."
            )
        if len(request.ranks) != world_size:
            raise ConfigError(
                f"{_named(command)}: {len(request.ranks)} of {world_size} ranks are here, and only all together can be "
                "steered: ranks on other machines, and those that do not run this cell, would obey at another step."
            )
        if not request.steering.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineError(f"{capitalized(_named(command))}: another command has not ended within {timeout:g} s.")
        try:
            return _Attempts(request, command, timeout, deadline, self._at_end).run()
        finally:
            request.steering.release()


class RequestSteering(Steerable):
    """Steers the ranks of a request.

    Args:
        say: shows a line to the user. Any thread.
    """

    _at_end = ""  # a cell has no object to call .result() on

    def __init__(self, request: Request, world_size: int, say: Callable[[str], object]) -> None:
        self._request = request
        self._world_size = world_size
        self._show = say

    @override
    def _steered(self) -> tuple[Request | None, int]:
        return self._request, self._world_size

    @override
    def wait(self, timeout: float | None = None) -> bool:
        return self._request.done.wait(timeout)

    @override
    def _show_here(self, text: str) -> None:
        self._show(text)


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
    return buttons.actions


class _Buttons:
    """The buttons of a panel, and the commands that were given by them. The arguments are those of `steering_actions`.

    Attributes:
        actions: the buttons.
    """

    def __init__(
        self, request: Request, world_size: int, note: Callable[[str], object], say: Callable[[str], object]
    ) -> None:
        self._request = request
        self._steered = RequestSteering(request, world_size, note)
        self._note, self._say = note, say
        self._threads: list[HelperThread] = []
        self._without_effect: list[str] = []
        self.actions = (
            self._button(PAUSE, "pause training before its next batch, or go on", self._pause, self._no_pause),
            self._button("Save", "save a checkpoint now", self._save, self._no_save),
            self._button(
                "Stop after epoch", "end training when this epoch does", self._steered.stop_after_epoch, self._no_stop
            ),
        )

    def tell_end(self) -> None:
        """Name the commands that had no effect, when all ranks have answered or ended. In the thread of the loop."""
        until = time.monotonic() + _END
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._without_effect:
            *others, last = dict.fromkeys(self._without_effect)
            names = f"{', '.join(others)} and {last}" if others else last
            has_begun = any(one.takes_commands for one in _samples(self._request))
            why = "training ended before its next batch" if has_begun else "no loop over a prepared loader has begun"
            self._say(f"{names} had no effect: {why}")

    def _button(self, title: str, hint: str, give: Callable[[], None], why_not: Callable[[], str]) -> Action:
        def start() -> HelperThread:
            name = RESUME if title == PAUSE and self._steered.is_paused else title
            thread = HelperThread(self._run, name.lower(), give, name="steering", on_failure=self._failed)
            self._threads.append(thread)
            thread.start()
            return thread

        return Action(title, hint, start, why_not)

    def _run(self, name: str, give: Callable[[], None]) -> None:
        try:
            if self._no_pause():
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

    def _pause(self) -> None:
        (self._steered.resume if self._steered.is_paused else self._steered.pause)()

    def _save(self) -> None:
        self._note(f"saved {self._steered.save_checkpoint()}")

    def _no_pause(self) -> str:
        return _no_loop(_busy(self._request))

    def _no_save(self) -> str:
        busy = _busy(self._request)
        return _no_loop(busy) or (NO_FOLDER if any(one.has_folder is False for one in busy) else "")

    def _no_stop(self) -> str:
        busy = _busy(self._request)
        # Before the first step, the loop over epochs may be still to come.
        lacks_loop = any(one.has_epoch_loop is False and one.steps for one in busy)
        return _no_loop(busy) or (NO_EPOCH_LOOP if lacks_loop else "")


def _no_loop(busy: Sequence[Sample]) -> str:
    return NO_LOOP if busy and not any(one.takes_commands for one in busy) else ""


def _samples(request: Request) -> list[Sample]:
    try:
        return [rank.handle.page.read() for rank in request.ranks]
    except ValueError:  # they were closed: the ranks have just ended
        return []


def _busy(request: Request) -> list[Sample]:
    """Return the samples of ranks whose page does not show a call or cell that is over, maybe the one before."""
    return [one for one in _samples(request) if one.phase is not Phase.ENDED]


def _named(command: Command) -> str:
    return _NAMES[command.kind]


class _Attempts:
    """Gives one command, again if ranks do not agree.

    Args:
        timeout: seconds from the call to the deadline, for messages.
        deadline: `time.monotonic` at which to give up.
        at_end: what to do when training has ended, for messages; see `Steerable`.
    """

    def __init__(self, request: Request, command: Command, timeout: float, deadline: float, at_end: str) -> None:
        self._request = request
        self._command = command
        self._timeout = timeout
        self._deadline = deadline
        self._at_end = at_end
        self._came: set[int] = set()  # ranks that have agreed in any attempt
        self._pages: dict[int, CommandWriter] = {rank.rank: rank.handle.page.commands for rank in request.ranks}

    def run(self) -> list[str]:
        """Return the answers of all ranks, in their order."""
        ahead, hold = self._steps_ahead(), _FIRST_HOLD
        while True:
            number = next(_numbers)
            if self._agreed(number, ahead, hold):
                return self._answers(number)
            ahead, hold = 2 * ahead + 1, min(2 * hold, _LONGEST_HOLD)

    def _steps_ahead(self) -> int:
        before = self._steps()
        time.sleep(_AHEAD)
        return self._steps() - before

    def _steps(self) -> int:
        return max(one.steps for one in self._look(0))

    def _look(self, number: int) -> Sequence[CommandState]:
        """Return what all ranks say.

        Raises:
            LaunchError: one of them has come to its end, and not answered.
        """
        request = self._request
        has_ended = request.done.is_set() or request.step is not None or bool(request.answers)
        try:
            said = [page.look(number) for page in self._pages.values()]
            if not has_ended or all(one.answer is not None for one in said):
                return said
        except ValueError:  # the pages were closed: all has ended
            pass
        raise LaunchError(
            f"{self._name}: training ended before its next batch, so the command had no effect.{self._at_end}"
        )

    @property
    def _name(self) -> str:
        return _named(self._command)

    def _agreed(self, number: int, ahead: int, hold: float) -> bool:
        """Give the command, and return whether all ranks obey it; else it is withdrawn from all."""
        said = self._look(number)
        after = max(one.steps for one in said) + (0 if all(one.is_paused for one in said) else 1 + ahead)
        holds, waits_since = False, 0.0
        try:
            for page in self._pages.values():
                page.write(number, self._command, after=after)
            while True:
                said = self._look(number)
                self._came |= {rank for rank, one in zip(self._pages, said, strict=True) if one.has_agreed}
                if all(one.has_agreed for one in said):
                    holds = True
                    return True
                if any(not one.is_there or (one.steps > after and not one.has_agreed) for one in said):
                    return False
                now = time.monotonic()
                if any(one.steps >= after and one.has_agreed for one in said):
                    waits_since = waits_since or now
                    if now - waits_since > hold:
                        return False
                if now > self._deadline:
                    late = [rank for rank in self._pages if rank not in self._came]
                    what = f"{named(late)} began no batch of training" if late else "the ranks came to no step together"
                    raise DeadlineError(
                        f"{capitalized(what)} within {self._timeout:g} s. The command ({self._name}) was withdrawn."
                    )
                time.sleep(_LOOK)
        finally:
            self._decide(number, holds=holds)

    def _decide(self, number: int, *, holds: bool) -> None:
        with interrupts_later():  # a rank that is told nothing would wait for its decision
            for page in self._pages.values():
                try:
                    page.decide(number, holds=holds)
                except ValueError:  # it was closed: the rank has ended
                    continue

    def _answers(self, number: int) -> list[str]:
        while True:
            try:
                said = self._look(number)
            except LaunchError:
                if self._command.kind in (CommandKind.RESUME, CommandKind.STOP):
                    return []  # after which training may end sooner than somebody looks again
                raise
            if all(one.answer is not None for one in said):
                break
            if time.monotonic() > self._deadline:
                raise DeadlineError(f"Ranks do this ({self._name}), and have not ended it within {self._timeout:g} s.")
            time.sleep(_LOOK)
        failed = [one.answer for one in said if one.has_failed]
        if failed:
            error = CheckpointError if self._command.kind is CommandKind.SAVE else ConfigError
            raise error(failed[0])
        return [one.answer or "" for one in said]
