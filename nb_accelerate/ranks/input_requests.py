"""What debuggers on ranks ask, on its way to whoever waits for the ranks: the pool's thread puts, another gets."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.protocol.messages import Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.messages import Ask
    from nb_accelerate.ranks.proxy import Member

_NEXT_LINE = 0.5
"""Seconds in which a rank whose debugger went on may ask at the next line before another rank's question is put."""

_PIECE = 0.25
"""Seconds. A signal just before one long wait begins would be noticed when it ends."""


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
        self._talks = False
        self._closed = False

    def put(self, question: Question) -> None:
        """A rank asks."""
        with self._changed:
            self._waiting.append(question)
            self._changed.notify_all()

    def goes_on(self, rank: int) -> None:
        """The debugger of a rank has let its cell go on."""
        with self._changed:
            if rank == self._rank:
                self._talks = False
                self._changed.notify_all()

    def gone(self, rank: int) -> None:
        """A rank will not ask any more."""
        with self._changed:
            if rank == self._rank:
                self._rank, self._talks = -1, False
                self._changed.notify_all()

    def close(self) -> None:
        """Nobody will ask any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def get(self) -> Question | None:
        """Wait for the next question; None if there will be none. For one thread, which may be the main one."""
        with self._changed:
            self._wait_for(self._has_news)
            self._wait_for(lambda: not self._talks or self._has_next_word())
            self._changed.wait_for(lambda: self._rank < 0 or self._has_next_word(), _NEXT_LINE)
            if self._closed:
                return None
            question = min(self._waiting, key=lambda one: (one.member.rank != self._rank, one.member.rank))
            self._waiting.remove(question)
            self._rank, self._talks = question.member.rank, True
            return question

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not self._changed.wait_for(condition, _PIECE):
            pass

    def _has_news(self) -> bool:
        return self._closed or bool(self._waiting)

    def _has_next_word(self) -> bool:
        return self._closed or any(one.member.rank == self._rank for one in self._waiting)
