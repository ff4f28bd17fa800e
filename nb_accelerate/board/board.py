"""Writing on the board of this process."""

from __future__ import annotations

import functools
import mmap
import operator
import os
import time
from typing import TYPE_CHECKING

from nb_accelerate.board import layout
from nb_accelerate.board.layout import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer

    from nb_accelerate.board.layout import Collective


MAX_RECORD = 4000
"""Bytes. It fits into one write to a pipe, which is never mixed with another."""


class Board:
    """What a process says about itself. Written by its main thread.

    Args:
        memory: `layout.SIZE` bytes; by default some that nobody reads.

    Attributes:
        enter: takes the `Phase` that begins. A bound method of C code, since loops call it several times a step.
        step: takes the number of batches that the current loop has handed out.
        outlet: takes a record, at most `MAX_RECORD` bytes of JSON, that somebody keeps; here nobody does.
        trains: takes nothing; says that the current loop trains. Other loops evaluate, or do something else.
    """

    def __init__(self, memory: Buffer | None = None) -> None:
        self._memory = memoryview(memory if memory is not None else bytearray(layout.SIZE)).cast("B")
        self._words = self._memory[: 8 * layout.NUM_WORDS].cast("q")
        self._reals = self._memory[: 8 * layout.NUM_WORDS].cast("d")
        self.enter: Callable[[int], None] = functools.partial(operator.setitem, self._words, layout.PHASE)
        self.step: Callable[[int], None] = functools.partial(operator.setitem, self._words, layout.STEP)
        self.trains: Callable[[], None] = functools.partial(operator.setitem, self._words, layout.TRAINS, 1)
        self.outlet: Callable[[bytes], object] = _nobody
        self._scalars: dict[str, int] = {}
        self._loops: list[Loop] = []
        self._reals[layout.LOSS] = layout.NO_LOSS

    @property
    def turn(self) -> int:
        """Number of the call or cell."""
        return self._words[layout.TURN]

    def begin_turn(self) -> None:
        """A call or a cell begins: what was said about the one before is wiped."""
        words = self._words
        turn = words[layout.TURN] + 1
        for index in range(layout.PHASE, layout.NUM_WORDS):
            words[index] = 0
        self._memory[layout.SCALARS_AT :] = bytes(layout.SIZE - layout.SCALARS_AT)
        self._scalars.clear()
        self._loops.clear()
        self._reals[layout.LOSS] = layout.NO_LOSS
        words[layout.TOTAL] = -1
        words[layout.UTILISATION] = -1
        words[layout.PHASE] = Phase.RUNNING
        words[layout.TURN] = turn

    def end_turn(self) -> None:
        """The call or cell has ended."""
        self._words[layout.PHASE] = Phase.ENDED

    # Loops over loaders.

    def begin_loop(self, *, total: int | None, rows: int | None, epoch: int, evaluates: bool, step: int = 0) -> Loop:
        """A loop over a loader begins, perhaps inside another. Give what this returns to `end_loop`.

        Args:
            total: batches of this rank.
            rows: rows of all ranks together in one batch.
            epoch: which of the loader, from 1.
            evaluates: no gradients are computed where it begins.
            step: batches that are left out at its beginning.
        """
        words = self._words
        if self._loops:
            outer = self._loops[-1]
            outer.words = tuple(words[index] for index in _LOOP_WORDS)
            self._count(outer)
        words[layout.STEP] = step
        words[layout.TOTAL] = -1 if total is None else total
        words[layout.ROWS] = rows or 0
        words[layout.EVALUATES] = evaluates
        words[layout.IN_LOOP] = 1
        words[layout.TRAINS] = 0
        words[layout.EPOCH] = epoch
        words[layout.LOOP] += 1
        loop = Loop()
        self._loops.append(loop)
        return loop

    def end_loop(self, loop: Loop) -> None:
        """The loop has ended, or was left. The one around it goes on; if there is none, this one stays on show.

        Loops that are zipped end in the order in which they began, so one may end before another inside it. One that
        is left over from a call or cell before means nothing now.
        """
        if loop not in self._loops:
            return
        words, is_innermost = self._words, loop is self._loops[-1]
        self._loops.remove(loop)
        if not is_innermost:
            return
        loop.words = tuple(words[index] for index in _LOOP_WORDS)
        self._count(loop)
        words[layout.IN_LOOP] = 0
        if self._loops:
            outer = self._loops[-1]
            words[layout.STEPS_BEFORE] -= outer.trained
            for index, value in zip(_LOOP_WORDS, outer.words, strict=True):
                words[index] = value
            words[layout.LOOP] += 1
        words[layout.PHASE] = Phase.RUNNING

    def _count(self, loop: Loop) -> None:
        """Note what a loop has done that ends, or waits for another inside it."""
        if loop.trained:
            self._words[layout.STEPS_BEFORE] += loop.trained
            self._words[layout.TRAINED_EPOCH] = self._words[layout.EPOCH]

    # Values.

    def loss(self, value: float) -> None:
        """The newest loss of this rank."""
        self._reals[layout.LOSS] = value

    def memory(self, used: int) -> None:
        """Bytes of the device in use."""
        words = self._words
        words[layout.MEMORY] = used
        words[layout.MEMORY_PEAK] = max(words[layout.MEMORY_PEAK], used)

    def utilisation(self, percent: int) -> None:
        """Part of the time, in percent, in which the device computed lately."""
        self._words[layout.UTILISATION] = percent

    def log(self, values: Mapping[str, object]) -> None:
        """Numbers that were logged, by name; the first sixteen names are kept, and of others nothing."""
        for name, value in values.items():
            if not name or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            index = self._scalars.get(name)
            if index is None:
                index = len(self._scalars)
                if index == layout.NUM_SCALARS:
                    continue
                self._scalars[name] = index
            at = layout.SCALARS_AT + index * layout.SCALAR.size
            layout.SCALAR.pack_into(self._memory, at, _cut(str(name), 24), value)

    # Waiting.

    def wait_in(self, collective: Collective) -> int:
        """A collective begins. Give what this returns, the phase before it, to `enter` when it is over."""
        words = self._words
        before = words[layout.PHASE]
        words[layout.WAITS_IN] = collective
        words[layout.COLLECTIVES] += 1
        words[layout.PHASE] = Phase.WAITING
        return before

    # Bars.

    @property
    def wants_rows(self) -> bool:
        """Somebody shows bars as rows, so they need not be printed."""
        return bool(self._words[layout.ROWS_WANTED])

    def new_bar(self) -> int | None:
        """A place for a progress bar: a free one, else that of a bar that has ended; None if all move."""
        states = [self._bar_state(index) for index in range(layout.NUM_BARS)]
        for wanted in (0, 2):
            if wanted in states:
                return states.index(wanted)
        return None

    def bar(
        self, index: int, *, label: str, count: float, total: float | None, began: float, level: int, ended: bool
    ) -> None:
        """Say how far a progress bar is; see `nb_accelerate.board.Bar`. `began` is a `time.monotonic`."""
        state = 2 if ended else 1
        place = layout.BARS_AT + index * layout.BAR.size
        whole = -1.0 if total is None else float(total)
        layout.BAR.pack_into(self._memory, place, state, level, count, whole, began, time.monotonic(), _cut(label, 56))
        self._words[layout.BARS_SEEN] += 1

    def drop_bar(self, index: int) -> None:
        """A progress bar is to disappear."""
        layout.BAR.pack_into(self._memory, layout.BARS_AT + index * layout.BAR.size, 0, 0, 0.0, 0.0, 0.0, 0.0, b"")
        self._words[layout.BARS_SEEN] += 1

    def _bar_state(self, index: int) -> int:
        state: int = layout.BAR.unpack_from(self._memory, layout.BARS_AT + index * layout.BAR.size)[0]
        return state


def _nobody(_: bytes) -> None:
    """Keep nothing."""


class Loop:
    """A loop that has begun.

    Attributes:
        words: what stood on the board about it, those of `_LOOP_WORDS`, when another began inside it.
    """

    __slots__ = ("words",)

    def __init__(self) -> None:
        self.words: tuple[int, ...] = ()

    @property
    def trained(self) -> int:
        """Steps of it that train."""
        return self.words[0] if self.words[-1] else 0


_LOOP_WORDS = (
    layout.STEP,
    layout.TOTAL,
    layout.ROWS,
    layout.EPOCH,
    layout.IN_LOOP,
    layout.EVALUATES,
    layout.TRAINS,
)


def _cut(text: str, size: int) -> bytes:
    """Text as at most `size` - 1 bytes, so that a zero ends it. If that is inside a letter, a reader drops the rest."""
    return text.encode(errors="replace")[: size - 1]


_board = Board()


def here() -> Board:
    """The board of this process; one that nobody reads, unless it was started by a notebook or a launcher."""
    return _board


def install(fd: int, outlet: Callable[[bytes], object] = _nobody) -> Board:
    """Write on the page behind a descriptor from now on. The descriptor is taken over."""
    global _board  # noqa: PLW0603 - the process has one
    memory = mmap.mmap(fd, layout.SIZE)
    os.close(fd)
    _board = Board(memory)
    _board.outlet = outlet
    return _board


def _forget() -> None:
    """In a process that was forked from this one, a loader's worker say: the board is its parent's."""
    global _board  # noqa: PLW0603 - as above
    _board = Board()


os.register_at_fork(after_in_child=_forget)
