"""What the notebook asks of a training loop while it runs: save a checkpoint now, end after this epoch.

The notebook writes to the page of one rank. The ranks ask each other at points that all of them come to (after a batch
of `Accelerator.resumable`, at the end of an epoch), so that all obey at the same point. That rank answers on its page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import layout
from nb_accelerate.base.progress_page.code_line import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Buffer

    Pieces = Iterable[tuple[int, bytes]]
    """Bytes, each with its place on a page, in the order in which they are to be written."""

# Words of 8 bytes, by number. Written by the notebook:
_SAVE = 0  # number of the checkpoint that is asked for; 0 if there is none
_STOP = 1  # training is to end after this epoch
# Written by the rank:
_LOOP = 2  # 1 while a loop over epochs obeys, 2 if it can save too
_SAVED = 3  # twice the number of the checkpoint that was saved last, and 1 more if it could not be
_ENDED_AFTER = 4  # the epoch, from 1, after which a loop over epochs was ended as asked, before its last; else 0
_ENDED_OF = 5  # the number of its epochs
_WORDS = struct.Struct("6q")

_ANSWER_AT = layout.COMMANDS_AT + 128
_ANSWER = struct.Struct("1024s")
assert _ANSWER_AT + _ANSWER.size <= layout.BARS_AT


class CommandReader:
    """The commands of a page, in the process of the rank."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory[layout.COMMANDS_AT : layout.COMMANDS_AT + _WORDS.size].cast("q")

    @property
    def save(self) -> int:
        """Number of the checkpoint that is asked for; 0 if there is none, or it was answered."""
        number = self._words[_SAVE]
        return number if self._words[_SAVED] // 2 != number else 0

    @property
    def stop(self) -> bool:
        """Whether training is to end after this epoch."""
        return bool(self._words[_STOP])

    def answer(self, text: str, *, failed: bool) -> None:
        """Say where the checkpoint is that was asked for, or why there is none."""
        if number := self.save:
            _ANSWER.pack_into(self._memory, _ANSWER_AT, text.encode(errors="replace")[: _ANSWER.size - 1])
            self._words[_SAVED] = 2 * number + failed

    def note_loop(self, obeys: int) -> None:
        """Say that a loop over epochs obeys: 0 for none, 2 for one that can save too."""
        self._words[_LOOP] = obeys

    def note_end(self, after: int, epochs: int) -> None:
        """Say that a loop over epochs was ended as asked, after an epoch (from 1) that is not its last one."""
        self._words[_ENDED_OF] = epochs
        self._words[_ENDED_AFTER] = after


@dataclass(frozen=True, kw_only=True)
class CommandState:
    """What a rank says.

    Attributes:
        loop: 1 while a loop over epochs obeys, 2 if it can save too.
        answer: what came of the checkpoint that was asked for; None before that.
        has_failed: there is no checkpoint, and `answer` says why.
    """

    loop: int
    answer: str | None
    has_failed: bool


class CommandWriter:
    """The commands of a page, in the notebook. All methods raise ValueError once the page is closed.

    Args:
        write: writes bytes to the page, each at its place, in this order.
    """

    def __init__(self, memory: Buffer, write: Callable[[Pieces], object]) -> None:
        self._memory = memory
        self._write = write

    def save(self, number: int) -> None:
        """Ask for a checkpoint, with a number that no other one has had."""
        self._write([(layout.COMMANDS_AT + 8 * _SAVE, layout.WORD.pack(number))])

    def stop(self) -> None:
        """Have training end after this epoch."""
        self._write([(layout.COMMANDS_AT + 8 * _STOP, layout.WORD.pack(1))])

    def look(self, number: int = 0) -> CommandState:
        """Return what the rank says, of the checkpoint with this number too."""
        words = _WORDS.unpack_from(self._memory, layout.COMMANDS_AT)
        answered, has_failed = divmod(words[_SAVED], 2)
        (answer,) = _ANSWER.unpack_from(self._memory, _ANSWER_AT)
        return CommandState(
            loop=words[_LOOP],
            answer=text_of(answer) if number and answered == number else None,
            has_failed=bool(has_failed),
        )


def ended_after(memory: Buffer) -> tuple[int, int] | None:
    """Return the epoch (from 1) after which a loop over so many was ended as asked; None if it was not."""
    words = _WORDS.unpack_from(memory, layout.COMMANDS_AT)
    after, epochs = words[_ENDED_AFTER], words[_ENDED_OF]
    return (after, epochs) if 0 < after < epochs else None
