"""When the next checkpoint of a run is due, the same on all ranks.

All ranks save after the same batch. Intervals in steps and epochs are the same everywhere; clocks and signals are not,
so ranks ask each other now and then, and agree on when they ask again.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from nb_accelerate.base.config.project import ProjectConfiguration, SaveInterval
    from nb_accelerate.training.accelerator.core import Core

_ASK_EVERY = 0.25
"""Seconds between two questions of ranks to each other. A question takes a fraction of a millisecond."""

_MOST_STEPS = 1000
"""Upper limit of the steps between two questions, for steps that take almost no time."""


class CheckpointSchedule:
    """Decide when the next checkpoint is due, the same on all ranks. Without an interval, only signals ask for one."""

    def __init__(self, core: Core, interval: SaveInterval | None, project: ProjectConfiguration) -> None:
        self._core = core
        self._interval = interval
        self._signals = signals = project.signals
        self._saved_at_step = self._step
        self._saved_at = time.monotonic()
        self._asked_at = time.monotonic()
        self._steps_to_question = 1
        self._steps_since = 0
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._asks = core.steering.asks or (
            core.collectives.world_size > 1 and (bool(signals) or (interval is not None and interval.unit == "seconds"))
        )
        self.is_due = False
        self.is_asked_to_end = False

    @property
    def _step(self) -> int:
        return self._core.registry.progress.global_step or 0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            for number in self._signals:
                self._before[number] = signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; a second one does at once what it did before."""
        before = self._before.get(signal.Signals(number))
        if self._received is not None:
            if callable(before):
                before(number, frame)
            elif before != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        self._received = signal.Signals(number)

    def count_step(self) -> None:
        """Count a batch that is handed out."""
        self._core.registry.progress.global_step = self._step + 1
        self._steps_since += 1

    def end_step(self) -> None:
        """Decide whether a checkpoint is due after a batch that is not the last of its epoch."""
        if self._core.steering.has_uneven_batches:
            return
        interval = self._interval
        if interval is not None and interval.unit == "steps":
            self.is_due |= self._step - self._saved_at_step >= interval.amount
        self._steps_to_question -= 1
        if not self._asks:
            self._core.steering.agree()
            self._decide(self._time_is_over(), self._received is not None)
        elif self._steps_to_question <= 0:
            self._ask()

    def end_epoch(self, epoch: int, *, is_last: bool) -> None:
        """Decide whether a checkpoint is due when an epoch, and what the user does after it, is over.

        Raises:
            ConfigError: ranks come here with different numbers of batches, so that they cannot save together.
        """
        if self._core.steering.has_uneven_batches:
            raise ConfigError(
                "The loop over resumable stands inside join_uneven_inputs, in which ranks cannot save together. Write "
                "join_uneven_inputs inside the loop, around the batches of one epoch."
            )
        interval = self._interval
        has_news = self._step > self._saved_at_step
        if interval is not None:
            if interval.unit == "epochs":
                self.is_due |= (epoch + 1) % int(interval.amount) == 0
            elif interval.unit == "steps":
                self.is_due |= self._step - self._saved_at_step >= interval.amount
            self.is_due |= is_last and has_news
        if self._core.collectives.world_size > 1:
            self._ask()
        else:
            self._decide(self._time_is_over(), self._received is not None)

    def saved(self) -> None:
        """Note that a checkpoint was saved, and end training as before the handler if a signal has asked for that."""
        self.is_due = False
        self._saved_at_step = self._step
        self._saved_at = time.monotonic()
        if not self.is_asked_to_end:
            return
        number = self._received or self._signals[0]  # which another rank has received
        before: Callable[[int, Any], Any] | Any = self._before.get(number)
        self.__exit__()
        if callable(before):
            before(number, None)
        if number is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _time_is_over(self) -> bool:
        interval = self._interval
        if interval is None or interval.unit != "seconds":
            return False
        return time.monotonic() - self._saved_at >= interval.amount

    def _ask(self) -> None:
        """Agree on all ranks, by the clock of rank 0, which also sets the number of steps until the next time."""
        now = time.monotonic()
        seconds_per_step = (now - self._asked_at) / max(self._steps_since, 1)
        steps = min(max(int(_ASK_EVERY / max(seconds_per_step, 1e-9)), 1), _MOST_STEPS)
        steering = self._core.steering
        own = (steps, self._time_is_over(), self._received is not None, self.is_due, steering.own)
        told = self._core.collectives.all_gather_object(own)
        self._asked_at, self._steps_since = now, 0
        self._steps_to_question = told[0][0]
        self._decide(told[0][1], any(signalled for _, _, signalled, _, _ in told))
        self.is_due |= any(due for *_, due, _ in told)  # a rank with fewer batches has counted fewer steps
        steering.note(asked for *_, asked in told)

    def _decide(self, time_is_over: bool, signalled: bool) -> None:
        self.is_due |= time_is_over or signalled
        self.is_asked_to_end |= signalled
