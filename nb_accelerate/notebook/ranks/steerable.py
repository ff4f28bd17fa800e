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

import contextlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page.commands import Command, CommandKind, check_text
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.base.words import capitalized
from nb_accelerate.errors import CheckpointError, ConfigError, DeadlineError, LaunchError
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.ranks.output.sinks import sink_here

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from nb_accelerate.base.progress_page.commands import CommandState, CommandWriter
    from nb_accelerate.notebook.ranks.request import Request

_INTERVAL = 0.002
"""Seconds between two readings of what the ranks say."""

_START_INTERVAL = 0.02
"""Seconds between two checks whether ranks have been started."""

_AHEAD = 0.05
"""Seconds of steps between the newest one and that after which a command is obeyed: ranks agree meanwhile, and none has
to wait for another."""

_FIRST_HOLD, _LONGEST_HOLD = 0.5, 20.0
"""Seconds that a rank which has come to the step may wait for the others to agree; doubled with each attempt."""

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
        """Let training go on after `pause`. It raises the same errors.

        Args:
            timeout: seconds for all ranks to go on.
        """
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
            if self.wait(_START_INTERVAL) and self._steered()[0] is None:
                raise LaunchError(f"{_named(command)}: the launch has ended before its ranks were started.")
        request, world_size = steered
        assert request is not None
        if request.done.is_set():
            raise LaunchError(
                f"{_named(command)}: {request.wording.what} has ended already, so there is no training to steer. Start "
                "it again, and give the command while it runs."
            )
        if len(request.ranks) != world_size:
            raise ConfigError(
                f"{_named(command)}: {len(request.ranks)} of {world_size} ranks are here, and only all together can be "
                "steered: ranks on other machines, and those that do not run this cell, would obey at another step."
            )
        if not request.steering.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineError(f"{capitalized(_named(command))}: another command has not ended within {timeout:g} s.")
        try:
            return _GivenCommand(request, command, timeout, deadline).give()
        finally:
            request.steering.release()


def _named(command: Command) -> str:
    return _NAMES[command.kind]


class _GivenCommand:
    """A command that is given to all ranks, again with another step if they do not agree on one."""

    def __init__(self, request: Request, command: Command, timeout: float, deadline: float) -> None:
        self._request = request
        self._command = command
        self._timeout = timeout
        self._deadline = deadline
        self._pages: dict[int, CommandWriter] = {rank.rank: rank.handle.page.commands for rank in request.ranks}

    def give(self) -> list[str]:
        """Return the answers of all ranks, in their order."""
        hold = _FIRST_HOLD
        while not self._is_agreed(number := next(_numbers), hold):
            hold = min(2 * hold, _LONGEST_HOLD)
        return self._answers(number)

    def _states(self, number: int) -> Sequence[CommandState]:
        """Return what all ranks say. Raises LaunchError if one of them has come to its end, and not answered."""
        request = self._request
        has_ended = request.done.is_set() or request.step is not None or bool(request.answers)
        try:
            states = [page.look(number) for page in self._pages.values()]
            if not has_ended or all(state.answer is not None for state in states):
                return states
        except ValueError:  # the pages were closed: all has ended
            pass
        raise LaunchError(
            f"{_named(self._command)}: training ended before its next batch, so the command had no effect."
        )

    def _is_agreed(self, number: int, hold: float) -> bool:
        """Write the command to all pages, and return whether all ranks obey it; else it is withdrawn from all.

        Args:
            hold: seconds that a rank which has come to the step may wait for others, which may wait for it elsewhere.
        """
        before = max(state.steps for state in self._states(0))
        time.sleep(_AHEAD)
        states = self._states(number)
        newest = max(state.steps for state in states)
        # A step to come, before which every rank looks at its page; there is none while training is paused.
        after = newest if all(state.is_paused for state in states) else newest + 1 + (newest - before)
        holds, waits_since = False, 0.0
        try:
            for page in self._pages.values():
                page.write(number, self._command, after=after)
            while True:
                states = self._states(number)
                if all(state.has_agreed for state in states):
                    holds = True
                    return True
                now = time.monotonic()
                if now > self._deadline:
                    late = [rank for rank, state in zip(self._pages, states, strict=True) if not state.has_agreed]
                    what = f"{named(late)} began no batch of training" if late else "the ranks came to no step together"
                    raise DeadlineError(
                        f"{capitalized(what)} within {self._timeout:g} s. The command ({_named(self._command)}) was "
                        "withdrawn."
                    )
                if any(not state.is_there or (state.steps > after and not state.has_agreed) for state in states):
                    return False
                if any(state.steps >= after and state.has_agreed for state in states):
                    waits_since = waits_since or now
                    if now - waits_since > hold:
                        return False
                time.sleep(_INTERVAL)
        finally:
            with interrupts_later():  # a rank that is told nothing would wait for its decision
                for page in self._pages.values():
                    with contextlib.suppress(ValueError):  # it was closed: the rank has ended
                        page.decide(number, holds=holds)

    def _answers(self, number: int) -> list[str]:
        while True:
            try:
                states = self._states(number)
            except LaunchError:
                if self._command.kind in (CommandKind.RESUME, CommandKind.STOP):
                    return []  # after which training may end sooner than somebody looks again
                raise
            if all(state.answer is not None for state in states):
                break
            if time.monotonic() > self._deadline:
                what = _named(self._command)
                raise DeadlineError(f"Ranks do this ({what}), and have not ended it within {self._timeout:g} s.")
            time.sleep(_INTERVAL)
        failed = [state.answer for state in states if state.has_failed]
        if failed:
            error = CheckpointError if self._command.kind is CommandKind.SAVE else ConfigError
            raise error(failed[0])
        return [state.answer or "" for state in states]
