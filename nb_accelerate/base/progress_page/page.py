"""Write the progress page of this process."""

from __future__ import annotations

import functools
import mmap
import operator
import os
import re
import time
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import layout
from nb_accelerate.base.progress_page.facts import CodeLine, Collective, Phase
from nb_accelerate.base.progress_page.phase_times import clock_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer

    from nb_accelerate.base.progress_page.facts import Activity, RankMemory


_NUMBER = re.compile(r"\d+")

MAX_RECORD = 4000  # Bytes. It fits into one write to a pipe, which is never mixed with another.


class ProgressPage:
    """The progress page of a process, for writing. Only the main thread writes, but for `note_line`.

    Args:
        memory: `layout.SIZE` bytes; by default some that nobody reads.
    """

    def __init__(self, memory: Buffer | None = None) -> None:
        self.is_read = memory is not None  # somebody may read it
        self.buffer = memoryview(memory if memory is not None else bytearray(layout.SIZE)).cast("B")
        self.words = self.buffer[: 8 * layout.NUM_WORDS].cast("q")
        self._reals = self.buffer[: 8 * layout.NUM_WORDS].cast("d")
        self.enter: Callable[[int], None]  # a `Phase` begins. A closure, since loops call it several times a step.
        self.enter, self._forget_times = clock_of(self.words)
        # The current loop has handed out so many batches; it trains. Other loops evaluate, or do something else.
        self.step: Callable[[int], None] = functools.partial(operator.setitem, self.words, layout.STEP)
        self.trains: Callable[[], None] = functools.partial(operator.setitem, self.words, layout.TRAINS, 1)
        self.outlet: Callable[[bytes], object] | None = None  # takes at most `MAX_RECORD` bytes of JSON, to be kept
        self.measure: Callable[[], object] = lambda: None  # notes with `rank_memory` what this process holds now
        # A prepared model has said, in this call or cell, that it was called; None if none is to.
        self.saw_forward: bool | None = None
        self.looked_for_state = False  # this call or cell has looked for a checkpoint to go on from
        self._scalars: dict[str, int] = {}
        self._loops: list[Loop] = []
        self._kinds_of_bars: dict[int, tuple[str, float | None]] = {}  # by index: label without numbers, and total
        self._lines_noted = 0
        self._guesses = False  # the epoch was guessed
        self._reals[layout.LOSS] = layout.NO_LOSS

    @property
    def request(self) -> int:
        return self.words[layout.REQUEST]

    @property
    def interrupt(self) -> tuple[int, int]:
        """Number of the call or cell that SIGINT is meant for, and how often that was said of any."""
        return divmod(self.words[layout.INTERRUPT], layout.INTERRUPTS)

    @property
    def phase(self) -> int:
        return self.words[layout.PHASE]

    @property
    def moment(self) -> tuple[int, Activity]:
        """When the phase that is on began, and what this process does."""
        return layout.entered(self.words), layout.activity_of(self.words)

    def save_in_background(self, begins: bool) -> None:
        """Note that a checkpoint begins to be written in a thread, or that it is written. Any thread."""
        self.words[layout.SAVES] = begins

    def note_choices(self, *, precision: str, accumulation: int) -> None:
        """Note what the newest `Accelerator` trains with; in later calls and cells too."""
        self.words[layout.PRECISION] = layout.PRECISIONS.index(precision)
        self.words[layout.ACCUMULATION] = accumulation

    def note_resumed(self) -> None:
        """Note that this call or cell has loaded the state of a checkpoint."""
        self.words[layout.RESUMED] = 1

    def note_other_group(self) -> None:
        """Note that this process makes a process group whose ranks may be processes outside of its launch."""
        self.words[layout.OTHER_GROUP] = 1

    def begin_request(self) -> None:
        """Begin a call or a cell, and clear what the page says about the one before."""
        words = self.words
        request = words[layout.REQUEST] + 1
        for index in range(layout.PHASE, layout.NUM_WORDS):
            if index not in _STAY:
                words[index] = 0
        self.buffer[layout.SCALARS_AT : layout.MEMORY_AT] = bytes(layout.MEMORY_AT - layout.SCALARS_AT)
        self.buffer[layout.ANSWER_AT :] = bytes(layout.SIZE - layout.ANSWER_AT)
        self._scalars.clear()
        self._loops.clear()
        self._guesses = False
        self.saw_forward = None if self.saw_forward is None else False
        self.looked_for_state = False
        self._reals[layout.LOSS] = layout.NO_LOSS
        words[layout.TOTAL] = -1
        words[layout.UTILISATION] = -1
        self._forget_times()
        self.enter(Phase.RUNNING)
        words[layout.REQUEST] = request

    def end_request(self) -> None:
        self.enter(Phase.ENDED)

    # Loops over loaders.

    def begin_loop(
        self,
        *,
        total: int | None,
        rows: int | None,
        epoch: int,
        evaluates: bool,
        step: int = 0,
        num_workers: int | None = None,
        spans_epochs: bool = False,
    ) -> Loop:
        """Begin a loop over a loader, perhaps inside another one; see `Sample`. Give the result to `end_loop`."""
        words = self.words
        if self._loops:
            outer = self._loops[-1]
            outer.words = _loop_words(words)
            self._count(outer)
        words[layout.STEP] = step
        words[layout.TOTAL] = -1 if total is None else total
        words[layout.ROWS] = rows or 0
        words[layout.EVALUATES] = evaluates
        words[layout.IN_LOOP] = 1
        words[layout.TRAINS] = 0
        words[layout.EPOCH] = epoch
        words[layout.WORKERS] = 0 if num_workers is None else num_workers + 1
        words[layout.SPANS_EPOCHS] = spans_epochs
        words[layout.LOOP] += 1
        loop = Loop()
        self._loops.append(loop)
        return loop

    def begin_work(self) -> None:
        """Begin what a loop does with a batch: the user's own code, until a prepared model says that it was called."""
        # One that was compiled afterwards does not say it. A loop that trains it is in forward, as far as is known.
        is_unsaid = self.saw_forward is False and self.words[layout.TRAINS]
        self.enter(Phase.FORWARD if is_unsaid else Phase.RUNNING)

    def end_loop(self, loop: Loop) -> None:
        """End a loop, also one that was left early. The page then shows the loop around it, if there is one."""
        # Loops that are zipped end in the order in which they began, so one may end before another inside it. One that
        # is left over from a call or cell before means nothing now.
        if loop not in self._loops:
            return
        words, is_innermost = self.words, loop is self._loops[-1]
        self._loops.remove(loop)
        if not is_innermost:
            return
        loop.words = _loop_words(words)
        self._count(loop)
        words[layout.IN_LOOP] = 0
        if self._loops:
            outer = self._loops[-1]
            words[layout.STEPS_BEFORE] -= outer.trained
            for index, value in zip(_LOOP_WORDS, outer.words, strict=True):
                words[index] = value
            words[layout.LOOP] += 1
        self.enter(Phase.RUNNING)

    def _count(self, loop: Loop) -> None:
        """Add the steps of a loop that ends, or that waits for another one inside it, to those of all loops."""
        if loop.trained:
            self.words[layout.STEPS_BEFORE] += loop.trained
            self.words[layout.TRAINED_EPOCH] = self.words[layout.EPOCH]

    def tell_epoch(self, number: int, epochs: int) -> None:
        """Note that an epoch of the whole run begins, as the program says: its number, from 1, of how many, or of 0."""
        self._guesses = False
        self.words[layout.EPOCHS] = epochs
        self.words[layout.EPOCH_OF_RUN] = number

    def guess_epoch(self, epoch: tuple[int, int] | None) -> None:
        """Note an epoch, of how many, that the code shows; None is not known, and then what the program says stays."""
        if epoch is not None or self._guesses:
            self.tell_epoch(*epoch or (0, 0))
        self._guesses = epoch is not None

    # What the notebook asks of a training loop. It writes to the page of one rank; ranks ask each other at points that
    # all of them come to, after a batch of `Accelerator.resumable` or at the end of an epoch, and that rank answers.

    @property
    def asks_to_save(self) -> bool:
        """Whether a checkpoint is asked for that was not answered."""
        return self.words[layout.SAVE] not in (0, self.words[layout.SAVED] // 2)

    @property
    def asks_to_stop(self) -> bool:
        """Whether training is to end after this epoch."""
        return bool(self.words[layout.STOP])

    def answer(self, text: str, *, failed: bool) -> None:
        """Say where the checkpoint is that was asked for, or why there is none."""
        if self.asks_to_save:
            layout.ANSWER.pack_into(self.buffer, layout.ANSWER_AT, _cut(text, layout.ANSWER.size))
            self.words[layout.SAVED] = 2 * self.words[layout.SAVE] + failed

    def note_obeying(self, obeys: int) -> None:
        """Note that a loop over epochs obeys: 0 for none, 2 for one that can save too."""
        self.words[layout.OBEYS] = obeys

    def note_end(self, after: int, epochs: int) -> None:
        """Note that a loop over epochs was ended as asked, after an epoch (from 1) that is not its last one."""
        self.words[layout.ENDED_OF] = epochs
        self.words[layout.ENDED_AFTER] = after

    # Values.

    def loss(self, value: float) -> None:
        self._reals[layout.LOSS] = value

    def memory(self, used: int) -> None:
        """Note how many bytes of the device are in use."""
        words = self.words
        words[layout.MEMORY] = used
        words[layout.MEMORY_PEAK] = max(words[layout.MEMORY_PEAK], used)

    def rank_memory(self, memory: RankMemory) -> None:
        """Note what of its memory is parameters, gradients, optimizer states and the rest."""
        memory.write(self.buffer, layout.MEMORY_AT)

    def utilisation(self, percent: int) -> None:
        self.words[layout.UTILISATION] = percent

    def compiled(self, programs: int, seconds: float) -> None:
        """Note that programs were compiled for the device, and how long that took."""
        self.words[layout.COMPILED] += programs
        self.words[layout.COMPILING_MS] += round(1000 * seconds)

    def warn(self, sentence: str) -> None:
        """Note what is wrong, for the panel. A later sentence takes the place of an earlier one."""
        layout.WARNING.pack_into(self.buffer, layout.WARNING_AT, _cut(sentence, layout.WARNING.size))

    def log(self, values: Mapping[str, object]) -> None:
        """Note numbers that were logged, by name. Only the first sixteen names are kept."""
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
            layout.SCALAR.pack_into(self.buffer, at, _cut(str(name), 24), value)

    def note_line(self, moment: tuple[int, Activity], *, filename: str, lineno: int, called: str, inside: str) -> None:
        """Note the line of the user's code at which the main thread was at a `moment`. One other thread calls this."""
        self._lines_noted += 1
        line = CodeLine(
            number=self._lines_noted,
            entered=moment[0],
            activity=moment[1],
            filename=filename,
            lineno=lineno,
            called=called,
            inside=inside,
        )
        line.write(self.buffer, layout.LINE_AT)

    # Waiting.

    def wait_in(self, collective: Collective) -> int:
        """Begin a collective. Returns the phase before it, to be given to `enter` when it is over."""
        words = self.words
        before = words[layout.PHASE]
        words[layout.WAITS_IN] = collective
        words[layout.COLLECTIVES] += 1
        self.enter(Phase.WAITING)
        return before

    def wait_after_backward(self) -> None:
        """Begin to wait for the exchange of gradients; not in another backward through the same loss, of the user."""
        if self.words[layout.PHASE] == Phase.BACKWARD:
            self.wait_in(Collective.backward)

    # Bars.

    @property
    def wants_rows(self) -> bool:
        """Whether the notebook shows progress bars in a panel, so that they need not be printed."""
        return bool(self.words[layout.ROWS_WANTED])

    def new_bar(self, label: str, total: float | None) -> int | None:
        """Return the index of a slot for a progress bar, or None if all of them move.

        A bar replaces an ended bar whose label differs in numbers only, such as the bar of the epoch before.
        """
        kind = (_NUMBER.sub("#", label), total)
        states = [row[0] for row in layout.BAR.iter_unpack(self.buffer[layout.BARS_AT :])]
        free, ended = ([index for index, state in enumerate(states) if state == wanted] for wanted in (0, 2))
        alike = [index for index in ended if self._kinds_of_bars.get(index) == kind]
        for index in (*alike, *free, *ended):
            self._kinds_of_bars[index] = kind
            return index
        return None

    def bar(
        self,
        index: int,
        *,
        label: str,
        text: str,
        count: float,
        total: float | None,
        began: float,
        level: int,
        ended: bool,
    ) -> None:
        """Note how far a progress bar is; see `base.progress_page.Bar`. `began` is a `time.monotonic`."""
        state = 2 if ended else 1
        at = layout.BARS_AT + index * layout.BAR.size
        whole = -1.0 if total is None else float(total)
        texts = _cut(label, 56), _cut(text, 152)
        layout.BAR.pack_into(self.buffer, at, state, level, count, whole, began, time.monotonic(), *texts)
        self.words[layout.BARS_SEEN] += 1

    def drop_bar(self, index: int) -> None:
        at = layout.BARS_AT + index * layout.BAR.size
        self.buffer[at : at + layout.BAR.size] = bytes(layout.BAR.size)
        self.words[layout.BARS_SEEN] += 1


class Loop:
    """A loop that has begun, with the `_LOOP_WORDS` that stood on the page when another began inside it."""

    __slots__ = ("words",)

    def __init__(self) -> None:
        self.words: tuple[int, ...] = ()

    @property
    def trained(self) -> int:
        """Number of its steps that train."""
        return self.words[0] if self.words[-1] else 0


# What holds for later calls and cells.
_STAY = (layout.SAVES, layout.OTHER_GROUP, layout.INTERRUPT, layout.PRECISION, layout.ACCUMULATION)

_LOOP_WORDS = (
    layout.STEP,
    layout.TOTAL,
    layout.ROWS,
    layout.EPOCH,
    layout.IN_LOOP,
    layout.EVALUATES,
    layout.WORKERS,
    layout.SPANS_EPOCHS,
    layout.TRAINS,
)

_loop_words: Callable[[memoryview[int]], tuple[int, ...]] = operator.itemgetter(*_LOOP_WORDS)


def _cut(text: str, size: int) -> bytes:
    """Encode text in at most `size` - 1 bytes, so that a zero follows. Readers drop a letter that was cut."""
    return text.encode(errors="replace")[: size - 1]


_page = ProgressPage()


def here() -> ProgressPage:
    """Return the progress page of this process; nobody reads it unless a notebook or a launcher started the process."""
    return _page


def install(fd: int, outlet: Callable[[bytes], object] | None = None) -> ProgressPage:
    """Write to the page behind a descriptor from now on, and take the descriptor over."""
    global _page  # noqa: PLW0603 - the process has one
    memory = mmap.mmap(fd, layout.SIZE)
    os.close(fd)
    _page = ProgressPage(memory)
    _page.outlet = outlet
    return _page


def _forget() -> None:
    """Let go of the page in a forked process, for example a loader's worker: the page is its parent's."""
    global _page  # noqa: PLW0603 - as above
    _page = ProgressPage()


os.register_at_fork(after_in_child=_forget)
