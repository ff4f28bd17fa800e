"""Commands to a training loop while it runs: a part of the progress page that the notebook writes and a rank answers.

::

    notebook                                             each rank, between two batches
    a command, and the optimizer step after which     -> says that it agrees, if it has not gone past that step
      all ranks are to obey it
    all agree: the command holds; else it is withdrawn -> after that step: waits for the decision, then obeys or goes on
    waits for what came of it                          <- answers

So all ranks obey after the same step, or none does, and no collective is needed for it. A word that depends on the
command has its number in it: what is left of an earlier one means nothing. More words say whether a training loop has
begun and what it could obey, so that nothing else is offered.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.progress_page import layout
from nb_accelerate.base.progress_page.code_line import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Buffer

    Pieces = Iterable[tuple[int, bytes]]
    """Bytes, each with its place on a page, in the order in which they are to be written."""

_AT = layout.COMMANDS_AT

# Words of 8 bytes, by number. Written by the notebook:
_COMMAND = 0  # number of the newest command; 0 if there is none
_KIND = 1  # a `CommandKind`
_VALUE = 2  # a float
_AFTER = 3  # the number of the command, and the optimizer step after which it is to be obeyed: see `_STEP_BITS`
_DECISION = 4  # the number of the command, and whether it holds: see `_decided`
# Written by the rank:
_STEPS = 5  # optimizer steps of this call or cell
_AGREED = 6  # number of the command that the rank agrees to obey
_ANSWERED = 7  # the number of the command that was obeyed, and whether it could not be
_PAUSED = 8  # training waits until it is told to go on
_FOLDER = 9  # numbered checkpoints have a folder: 0 not known, 1 no, 2 yes
_EPOCH_LOOP = 10  # a loop over epochs is on that can be ended after an epoch: as above
_ENDED_AFTER = 11  # the epoch, from 1, after which a loop over epochs was ended as asked, before its last; else 0
_ENDED_OF = 12  # the number of its epochs
_NUM_WORDS = 13

_TEXT_AT, _ANSWER_AT = _AT + 128, _AT + 576
_TEXT_SIZE = 448
"""Bytes of the text of a command, and of that of an answer, each with a zero at its end."""

_HOLDS, _WITHDRAWN = 1, 2

_STEP_BITS = 40
"""Bits of a word that hold the number of an optimizer step; that of the command is above them."""

NO_FOLDER = "Numbered checkpoints need a folder: Accelerator(project_dir=...)."
"""Why no checkpoint can be saved."""

NO_EPOCH_LOOP = (
    "This loop over epochs cannot be ended from outside. Write it as `for epoch in accelerator.epochs(3)`, or with "
    "accelerator.resumable(loader, epochs=3)."
)
"""Why training cannot be ended after an epoch."""

_WORDS = struct.Struct(f"{_NUM_WORDS}q")
_REAL = struct.Struct("d")
_TEXT = struct.Struct(f"{_TEXT_SIZE}s")

assert _AT + 8 * _NUM_WORDS <= _TEXT_AT
assert _TEXT_AT + _TEXT_SIZE <= _ANSWER_AT
assert _ANSWER_AT + _TEXT_SIZE <= layout.BARS_AT


class CommandKind(enum.IntEnum):
    """What a training loop is told to do."""

    PAUSE = 1
    RESUME = 2
    SAVE = 3
    LEARNING_RATE = 4
    STOP = 5


@dataclass(frozen=True, kw_only=True)
class Command:
    """What the notebook tells a training loop."""

    kind: CommandKind
    value: float = 0.0  # the learning rate
    text: str = ""  # the folder of a checkpoint; "" for the next numbered one


class CommandReader:
    """The commands of a page, in the process of the rank. Only the main thread uses it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory[_AT : _AT + 8 * _NUM_WORDS].cast("q")
        self._done = 0

    @property
    def pending(self) -> int:
        """Number of a command that is neither done nor withdrawn; 0 if there is none."""
        number = self._words[_COMMAND]
        return number if number != self._done else 0

    @property
    def steps(self) -> int:
        """Optimizer steps of this call or cell."""
        return self._words[_STEPS]

    def count_step(self) -> int:
        """Count an optimizer step. Returns what `pending` is then: it is called for each step, so it is one call."""
        words = self._words
        words[_STEPS] += 1
        number = words[_COMMAND]
        return number if number != self._done else 0

    def is_due(self, number: int) -> bool:
        """Return whether a command is to be obeyed now, if it holds: see `holds`. Agrees to it if that is to come."""
        words = self._words
        given, after = divmod(words[_AFTER], 1 << _STEP_BITS)
        if given != number:  # it is being written
            return False
        if words[_DECISION] == _decided(number, _WITHDRAWN):
            self._done = number
            return False
        if words[_AGREED] != number:
            if words[_STEPS] > after:  # too late: the notebook sees that
                return False
            words[_AGREED] = number
        return words[_STEPS] >= after

    def holds(self, number: int) -> bool | None:
        """Return whether a command is to be obeyed; None if that is not decided yet."""
        decision = self._words[_DECISION]
        if decision == _decided(number, _HOLDS):
            return True
        # The call or cell may have ended for the notebook, which clears nothing: only a new command is written.
        if decision == _decided(number, _WITHDRAWN) or self._words[_COMMAND] != number:
            self._done = number
            return False
        return None

    def read(self) -> Command:
        """Return the command."""
        (value,) = _REAL.unpack_from(self._memory, _AT + 8 * _VALUE)
        (text,) = _TEXT.unpack_from(self._memory, _TEXT_AT)
        return Command(kind=CommandKind(self._words[_KIND]), value=value, text=text_of(text))

    def answer(self, number: int, text: str, *, failed: bool) -> None:
        """Say that a command was obeyed, or why it could not be."""
        _TEXT.pack_into(self._memory, _ANSWER_AT, _bytes_of(text))
        self._done = number
        self._words[_ANSWERED] = 2 * number + failed

    def note_paused(self, paused: bool) -> None:
        """Say that training waits, or goes on."""
        self._words[_PAUSED] = paused

    def note_folder(self, there: bool) -> None:
        """Say whether numbered checkpoints have a folder."""
        self._words[_FOLDER] = 1 + there

    def note_epoch_loop(self, is_on: bool) -> None:
        """Say whether a loop over epochs is on that can be ended after an epoch."""
        self._words[_EPOCH_LOOP] = 1 + is_on

    def note_end(self, after: int, epochs: int) -> None:
        """Say that a loop over epochs was ended as asked, after an epoch (from 1) that is not its last one."""
        self._words[_ENDED_OF] = epochs
        self._words[_ENDED_AFTER] = after


@dataclass(frozen=True, kw_only=True)
class CommandState:
    """What a rank says about a command."""

    is_there: bool  # it is on the page; it is not if a call or cell has begun since it was written
    steps: int  # optimizer steps that the rank has taken
    is_paused: bool
    has_agreed: bool  # the rank will obey, or does
    answer: str | None  # what came of it; None before that
    has_failed: bool


class CommandWriter:
    """The commands of a page, in the notebook. All methods raise ValueError once the page is closed.

    Args:
        write: writes bytes to the page, each at its place, in this order.
    """

    def __init__(self, memory: Buffer, write: Callable[[Pieces], object]) -> None:
        self._memory = memory
        self._write = write

    def write(self, number: int, command: Command, *, after: int) -> None:
        """Write a command, with a greater number than all before it, to be obeyed after that optimizer step."""
        pack = layout.WORD.pack
        self._write(
            (
                (_at(_KIND), pack(command.kind)),
                (_at(_VALUE), _REAL.pack(command.value)),
                (_TEXT_AT, _TEXT.pack(_bytes_of(command.text))),
                (_at(_AFTER), pack((number << _STEP_BITS) + after)),
                (_at(_COMMAND), pack(number)),  # the last, since it makes the rank look at the others
            )
        )

    def decide(self, number: int, *, holds: bool) -> None:
        """Have a rank obey a command, or withdraw it."""
        self._write(((_at(_DECISION), layout.WORD.pack(_decided(number, _HOLDS if holds else _WITHDRAWN))),))

    def look(self, number: int) -> CommandState:
        """Return what the rank says about a command."""
        answered, has_failed = divmod(self._get(_ANSWERED), 2)
        (answer,) = _TEXT.unpack_from(self._memory, _ANSWER_AT)
        return CommandState(
            is_there=self._get(_COMMAND) == number,
            steps=self._get(_STEPS),
            is_paused=bool(self._get(_PAUSED)),
            has_agreed=self._get(_AGREED) == number,
            answer=text_of(answer) if answered == number else None,
            has_failed=bool(has_failed),
        )

    def _get(self, index: int) -> int:
        value: int = layout.WORD.unpack_from(self._memory, _at(index))[0]
        return value


def training_state(memory: Buffer) -> dict[str, Any]:
    """Return what the training loop of a page says about itself, as fields of `Sample`."""
    words = _WORDS.unpack_from(memory, _AT)  # all at once, since a panel does this for each rank several times a second
    after, epochs = words[_ENDED_AFTER], words[_ENDED_OF]
    return {
        "paused": bool(words[_PAUSED]),
        "takes_commands": bool(words[_FOLDER] or words[_STEPS]),
        "has_folder": _known(words[_FOLDER]),
        "has_epoch_loop": _known(words[_EPOCH_LOOP]),
        "ended_after": (after, epochs) if 0 < after < epochs else None,
    }


def check_text(text: str) -> None:
    """Raise ValueError if a text does not fit into a command."""
    if len(text.encode()) >= _TEXT_SIZE or "\0" in text:
        raise ValueError(f"it has {len(text.encode())} bytes; {_TEXT_SIZE - 1} fit")


def _known(word: int) -> bool | None:
    return word == 2 if word in (1, 2) else None


def _decided(number: int, decision: int) -> int:
    return 4 * number + decision


def _at(index: int) -> int:
    return _AT + 8 * index


def _bytes_of(text: str) -> bytes:
    return text.encode(errors="replace")[: _TEXT_SIZE - 1]
