"""Read progress pages: what one said at a moment, and its memory in the process that reads it."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import layout
from nb_accelerate.base.progress_page.facts import Activity, CodeLine, Phase, RankMemory, text_of
from nb_accelerate.base.progress_page.phase_times import seconds_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Buffer

    from nb_accelerate.base.progress_page.facts import Collective


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A progress bar."""

    label: str
    count: float
    total: float | None
    seconds: float  # since it began
    text: str = ""  # what tqdm writes beside it
    ended: bool = False
    level: int = 0  # bars that it stands in


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How far a rank is. None means not known, as 0 does of bytes, rows, epochs and numbers that count from 1."""

    request: int = 0  # number of the call or cell
    phase: Phase = Phase.NOTHING

    # The current loop over a loader.
    step: int = 0  # batches so far
    total: int | None = None
    loop: int = 0  # its number
    trains: bool = False  # there was a backward, or an optimizer's step, in it
    evaluates: bool = False  # it computes no gradients, or has gone on for a while without a backward
    in_loop: bool = False  # it has not ended
    spans_epochs: bool = False  # it goes over all epochs: `step` and `total` are those of the run
    num_workers: int | None = None  # of the loader
    rows: int = 0  # of all ranks together in one batch

    # What it trains with.
    accumulation: int = 0  # batches in one optimizer step
    precision: str = ""  # "" is not known
    resumed: bool = False  # it has loaded the state of a checkpoint

    # The run.
    epoch: int = 0  # of the run if `epochs` is known, else of the loader that is trained with
    epochs: int = 0
    steps_before: int = 0  # batches of training loops that have ended
    ended_after: tuple[int, int] | None = None  # epoch after which the notebook had a loop over so many end early
    obeys: int = 0  # 1 while a loop over epochs does what the notebook asks, 2 if it can save too
    answer: tuple[int, bool, str] | None = None  # number of the last checkpoint asked for, whether it failed, what came
    waits_in: Collective | None = None
    collectives: int = 0  # that have begun
    other_group: bool = False  # it may be in a process group with processes outside of its launch
    saves: bool = False  # a checkpoint is written in the background
    compiled: int = 0  # programs, for the device, in loops
    compiling: float = 0.0  # seconds that took
    warning: str = ""

    # Values.
    memory: int = 0  # bytes of the device in use
    peak: int = 0  # the most of them that was seen
    utilisation: int | None = None  # percent of the time in which the device computed, when a step last asked
    loss: float | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)  # logged last
    bars: tuple[Bar, ...] = ()  # outermost first
    held: RankMemory = field(default_factory=RankMemory)  # measured last, maybe in an earlier call or cell

    # Where its time goes, and where it is: not compared, because they differ from sample to sample.
    seconds: Mapping[Phase, float] = field(default_factory=dict, compare=False)
    line: CodeLine | None = field(default=None, compare=False)
    entered: int = field(default=0, compare=False)  # when the phase began, by `time.monotonic_ns` of the rank

    @property
    def activity(self) -> Activity:
        return Activity(self.phase, self.waits_in, self.in_loop, self.evaluates)

    @property
    def steps(self) -> int:
        """Batches trained with, over all epochs."""
        return self.steps_before + (self.step if self.in_loop and self.trains else 0)


_ENDLESS = 1e18  # nothing counts so far


def read(memory: Buffer) -> Sample:
    """Read a progress page. Leaves out values that make no sense, and never fails."""
    words = layout.HEADER.unpack_from(memory, 0)
    if not words[layout.REQUEST]:
        return Sample()
    loss = words[layout.LOSS]
    trains = bool(words[layout.TRAINS])
    epochs, epoch_of_run = words[layout.EPOCHS], words[layout.EPOCH_OF_RUN]
    has_epochs = 0 < epoch_of_run <= epochs
    now = time.monotonic_ns()
    activity = layout.activity_of(words)
    (warning,) = layout.WARNING.unpack_from(memory, layout.WARNING_AT)
    return Sample(
        request=words[layout.REQUEST],
        phase=activity.phase,
        step=max(0, words[layout.STEP]),
        total=words[layout.TOTAL] if words[layout.TOTAL] >= 0 and words[layout.LOOP] else None,
        loop=words[layout.LOOP],
        trains=trains,
        evaluates=activity.evaluates,
        in_loop=activity.in_loop,
        epoch=epoch_of_run if has_epochs else words[layout.EPOCH if trains else layout.TRAINED_EPOCH],
        epochs=epochs if has_epochs else 0,
        steps_before=max(0, words[layout.STEPS_BEFORE]),
        rows=max(0, words[layout.ROWS]),
        accumulation=max(0, words[layout.ACCUMULATION]),
        precision=dict(enumerate(layout.PRECISIONS)).get(words[layout.PRECISION], ""),
        resumed=bool(words[layout.RESUMED]),
        waits_in=activity.waits_in,
        collectives=words[layout.COLLECTIVES],
        memory=max(0, words[layout.MEMORY]),
        peak=max(0, words[layout.MEMORY_PEAK]),
        utilisation=words[layout.UTILISATION] if 0 <= words[layout.UTILISATION] <= 100 else None,
        loss=None if loss == layout.NO_LOSS else loss,
        scalars=_scalars(memory),
        bars=_bars(memory) if words[layout.BARS_SEEN] else (),
        saves=bool(words[layout.SAVES]),
        other_group=bool(words[layout.OTHER_GROUP]),
        ended_after=(words[layout.ENDED_AFTER], words[layout.ENDED_OF]) if words[layout.ENDED_AFTER] else None,
        obeys=words[layout.OBEYS],
        answer=_answer(memory, words[layout.SAVED]) if words[layout.SAVED] else None,
        held=RankMemory.read(memory, layout.MEMORY_AT),
        seconds=seconds_in(words, now),
        entered=layout.entered(words),
        num_workers=words[layout.WORKERS] - 1 if words[layout.WORKERS] > 0 else None,
        spans_epochs=bool(words[layout.SPANS_EPOCHS]),
        compiled=max(0, words[layout.COMPILED]),
        compiling=max(0, words[layout.COMPILING_MS]) / 1000,
        warning=text_of(warning) if warning[0] else "",
        line=CodeLine.read(memory, layout.LINE_AT),
    )


def _answer(memory: Buffer, saved: int) -> tuple[int, bool, str]:
    (text,) = layout.ANSWER.unpack_from(memory, layout.ANSWER_AT)
    return saved // 2, bool(saved % 2), text_of(text)


def _scalars(memory: Buffer) -> dict[str, float]:
    scalars = {}
    for index in range(layout.NUM_SCALARS):
        name, value = layout.SCALAR.unpack_from(memory, layout.SCALARS_AT + index * layout.SCALAR.size)
        if not name[0]:
            break
        scalars[text_of(name)] = value
    return scalars


def _bars(memory: Buffer) -> tuple[Bar, ...]:
    bars = []
    now = time.monotonic()
    rows = layout.BAR.iter_unpack(memoryview(memory)[layout.BARS_AT :])
    for state, level, count, total, began, changed, label, text in rows:
        if state:
            seconds = (changed if state == 2 else now) - began
            bar = Bar(
                label=text_of(label),
                count=count if 0 <= count < _ENDLESS else 0.0,
                total=total if 0 <= total < _ENDLESS else None,
                seconds=seconds if 0 <= seconds < _ENDLESS else 0.0,
                text=text_of(text),
                ended=state == 2,
                level=level,
            )
            bars.append(bar)
    return tuple(sorted(bars, key=lambda bar: bar.level))


class PageReader:
    """The memory of a progress page, for reading. `close` it.

    It takes over the descriptor of an empty file, which is for the process that writes, see `detach`. A file without a
    name is gone with the last process that holds it. Without a file the memory is this process's own.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        if fd < 0:
            self.buffer = mmap.mmap(-1, layout.SIZE)
            return
        os.ftruncate(fd, layout.SIZE)
        self.buffer = mmap.mmap(fd, layout.SIZE)

    def detach(self) -> int:
        """Return the descriptor, which the caller closes. The memory stays."""
        fd, self.fd = self.fd, -1
        return fd

    def read(self) -> Sample:
        return read(self.buffer)

    @property
    def request(self) -> int:
        number: int = layout.WORD.unpack_from(self.buffer, 8 * layout.REQUEST)[0]
        return number

    def copy(self) -> bytes:
        return self.buffer[:]

    def write(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Write bytes, each at its place, in this order."""
        for at, data in pieces:
            self.buffer[at : at + len(data)] = data

    def want_rows(self, wanted: bool) -> None:
        """Ask for progress bars in a panel, or as text; see `base.progress_page.ProgressPage.wants_rows`."""
        word, place = layout.WORD.pack(wanted), 8 * layout.ROWS_WANTED
        if self.buffer[place : place + len(word)] != word:  # a page of another machine is not sent it for each cell
            self.write([(place, word)])

    def interrupt(self, number: int, count: int) -> None:
        """Say which call or cell SIGINT is meant for; `count` is another one each time."""
        word = number * layout.INTERRUPTS + count % layout.INTERRUPTS
        self.write([(8 * layout.INTERRUPT, layout.WORD.pack(word))])

    def save(self, number: int) -> None:
        """Ask for a checkpoint, with a number that no other one has had."""
        self.write([(8 * layout.SAVE, layout.WORD.pack(number))])

    def stop(self) -> None:
        """Have training end after this epoch."""
        self.write([(8 * layout.STOP, layout.WORD.pack(1))])

    def close(self) -> None:
        self.buffer.close()
        if self.fd >= 0:
            os.close(self.detach())
