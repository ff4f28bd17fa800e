"""What debuggers on ranks ask, on its way to whoever waits for the ranks: the pool's thread puts, another gets."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.protocol.messages import Answer

if TYPE_CHECKING:
    from nb_accelerate.pool.member import Member
    from nb_accelerate.protocol.messages import Ask

_GOES_ON = 0.5
"""Seconds in which the rank that was answered may ask again before another rank's question is put."""


@dataclass(frozen=True)
class Question:
    """A rank waits for a line."""

    member: Member
    ask: Ask

    @property
    def prompt(self) -> str:
        """What to show, with the rank that asks."""
        return f"rank {self.member.rank} {self.ask.prompt}"

    def answer(self, text: str | None) -> None:
        """Send a line; None says that there will be none."""
        with contextlib.suppress(OSError):  # it has just ended
            self.member.handle.channel.send(Answer(number=self.ask.number, text=text))


class Questions:
    """Of one turn. A conversation with one rank is not interrupted by another's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Question] = []
        self._rank = -1
        self._closed = False

    def put(self, question: Question) -> None:
        """A rank asks."""
        with self._changed:
            self._waiting.append(question)
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody will ask any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def get(self) -> Question | None:
        """Wait for the next question; None if there will be none."""
        with self._changed:
            self._changed.wait_for(self._has_news)
            if not self._closed and self._rank >= 0:
                self._changed.wait_for(self._goes_on, _GOES_ON)
            if self._closed:
                return None
            question = min(self._waiting, key=lambda one: (one.member.rank != self._rank, one.member.rank))
            self._waiting.remove(question)
            self._rank = question.member.rank
            return question

    def _has_news(self) -> bool:
        return self._closed or bool(self._waiting)

    def _goes_on(self) -> bool:
        return self._closed or any(one.member.rank == self._rank for one in self._waiting)
